"""Does a curriculum reach the baseline's loss with less data? Runs, table and plot.

    python -m experiments.data_efficiency               # makes what is missing
    python -m experiments.data_efficiency --only='voc-100-*'
    python -m experiments.data_efficiency --quick       # one short run a method

The methods are the paper's: truncated (seqtru) and reshaped (seqres) sequences,
vocabulary rarity (voc), and both (seqtru_voc), each with all and with half of the
baseline's tokens. As in the paper, the ramps shrink with the budget, and the learning
rate follows the tokens. All are evaluated on the same tokens.

Li et al., DeepSpeed Data Efficiency, https://arxiv.org/abs/2212.03597.
"""

import pathlib
from typing import Any

import numpy as np

from experiments import sweep

DIRECTORY = sweep.ROOT / "docs" / "results" / "data_efficiency"
METHODS = ("baseline", "seqtru", "seqres", "voc", "seqtru_voc")
BUDGETS = (100, 50)  # percent of the tokens
SEEDS = (0, 1, 2)
FULL_STEPS = 1200  # of the baseline, at full length


def runs(*, quick: bool = False) -> list[sweep.Run]:
    """All methods, budgets and seeds; ``quick`` has one short run a method."""
    result = []
    for seed in SEEDS[:1] if quick else SEEDS:
        for method in METHODS:
            for budget in BUDGETS[:1] if quick else BUDGETS:
                result.append(_run(method, budget, seed, quick))
    return result


def _run(method: str, budget: int, seed: int, quick: bool) -> sweep.Run:
    steps = (40 if quick else FULL_STEPS) * budget // 100
    config = (
        f"configs/gpt_curriculum.py:method={method},seed={seed}"
        if method != "baseline"
        else f"configs/gpt_baseline.py:seed={seed}"
    )
    tokens = steps * 16 * 128
    overrides = (
        f"train.num_steps={steps}",
        f"train.num_tokens={tokens}",
        "schedule.clock=tokens",
        "schedule.warmup_clock=steps",
        "schedule.kwargs.warmup=60" if not quick else "schedule.kwargs.warmup=4",
        f"eval.every_steps={max(1, steps // 8)}",
        "eval.compare_with_ngrams=False",
        "checkpoint.every_steps=100000",
        "train.log_every_steps=10",
    )
    labels = (("method", method), ("budget", budget), ("seed", seed))
    name = f"{method}-{budget}-{seed}"
    return sweep.Run(f"quick-{name}" if quick else name, config, overrides, labels)


def table(results: dict[str, dict[str, Any]]) -> str:
    """Mean and standard deviation over seeds, a line a method and budget."""
    lines = [
        "| method | tokens, % | runs | validation loss | steps | samples drawn | "
        "tokens fed | FLOPs | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for budget in BUDGETS:
        for method in METHODS:
            found = [
                r
                for r in results.values()
                if (r["method"], r["budget"]) == (method, budget)
            ]
            if not found:
                continue
            losses = [r["validation_loss"] for r in found]
            spread = f" ± {np.std(losses, ddof=1):.3f}" if len(losses) > 1 else ""
            mean = {
                name: np.mean([r[name] for r in found])
                for name in ("steps", "samples", "tokens", "flops", "cpu_seconds")
            }
            lines.append(
                f"| {method} | {budget} | {len(found)} | {np.mean(losses):.3f}{spread}"
                f" | {mean['steps']:,.0f} | {mean['samples']:,.0f} | "
                f"{mean['tokens'] / 1e6:.3f} M | {mean['flops'] / 1e12:.2f} T | "
                f"{mean['cpu_seconds']:.0f} |"
            )
    return "\n".join(lines)


def plot(results: dict[str, dict[str, Any]], path: pathlib.Path) -> None:
    """Validation loss against tokens and FLOPs, a color a method."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (column, scale, label) in zip(
        panels, ((1, 1e6, "million tokens fed"), (2, 1e12, "TFLOP")), strict=True
    ):
        for number, method in enumerate(METHODS):
            for budget, style in zip(BUDGETS, ("-", "--"), strict=True):
                curves = [
                    np.array(r["validation_curve"])
                    for r in results.values()
                    if (r["method"], r["budget"]) == (method, budget)
                ]
                if not curves:
                    continue
                length = min(map(len, curves))
                mean = np.mean([c[:length] for c in curves], axis=0)
                axes.plot(
                    mean[1:, column] / scale,
                    mean[1:, 3],
                    style,
                    color=f"C{number}",
                    label=f"{method}, {budget}%" if axes is panels[0] else None,
                )
        axes.set_xlabel(label)
    panels[0].set_ylabel("validation loss, nats a token")
    panels[0].legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> None:
    """Makes the runs that are missing, then the table and the plot."""
    sweep.main(argv, __doc__ or "", runs, DIRECTORY, table, plot)


if __name__ == "__main__":
    main()
