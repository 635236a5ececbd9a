"""Where does training spike or diverge, and does sequence length warmup help?

    python -m experiments.stability               # makes what is missing
    python -m experiments.stability --only='seqlen_warmup-32-*'
    python -m experiments.stability --quick       # one short run a variant

A grid of batch sizes and learning rates at equal tokens, without clipping and with a
short warm-up of the rate: the baseline, the same with sequence length warmup, and two
controls, a longer warm-up of the rate and clipping.

Li et al., The Stability-Efficiency Dilemma, https://arxiv.org/abs/2108.06084. Its
measure is the loss ratio, a loss over the smallest one before; 1.2 is a spike.
"""

import itertools
import pathlib
from typing import Any

import numpy as np

from experiments import sweep

DIRECTORY = sweep.ROOT / "docs" / "results" / "stability"
VARIANTS = {
    "baseline": ("curriculum=None",),
    "seqlen_warmup": (),
    "longer_warmup": ("curriculum=None", "schedule.kwargs.warmup=0.3"),
    "clipping": ("curriculum=None", "optimizer.max_grad_norm=1.0"),
}
BATCH_SIZES = (4, 16, 32)  # rows of 128 bytes
LEARNING_RATES = (2e-3, 8e-3, 3.2e-2, 1.28e-1)
SEEDS = (0, 1, 2)
TOKENS = 400_000
_SHARED = (
    "data.tokenizer.name=bytes",
    "model.kwargs.num_layers=4",
    "model.kwargs.width=64",
    "optimizer.max_grad_norm=0.0",
    "schedule.kwargs.warmup=10",
    "train.log_every_steps=1",
    "eval.max_rows=256",
    "eval.every_steps=100000",
    "eval.compare_with_ngrams=False",
    "checkpoint.every_steps=100000",
)


def runs(*, quick: bool = False) -> list[sweep.Run]:
    """The whole grid; ``quick`` has one cell with few tokens."""
    batch_sizes, rates, seeds = BATCH_SIZES, LEARNING_RATES, SEEDS
    if quick:
        batch_sizes, rates, seeds = BATCH_SIZES[:1], LEARNING_RATES[-1:], SEEDS[:1]
    cells = itertools.product(seeds, batch_sizes, rates, VARIANTS)
    return [_run(*cell, quick=quick) for cell in cells]


def _run(
    seed: int, batch_size: int, rate: float, variant: str, *, quick: bool
) -> sweep.Run:
    own = {key.partition("=")[0]: key for key in (*_SHARED, *VARIANTS[variant])}
    tokens = TOKENS // 10 if quick else TOKENS
    overrides = (
        *own.values(),
        f"data.batch_size={batch_size}",
        f"schedule.kwargs.peak_value={rate}",
        f"train.num_tokens={tokens}",
        f"train.num_steps={tokens // (128 * batch_size)}",
    )
    labels = (
        ("variant", variant),
        ("batch_size", batch_size),
        ("learning_rate", rate),
        ("seed", seed),
    )
    name = f"{variant}-{batch_size}-{rate:g}-{seed}"
    config = f"configs/gpt_seqlen_warmup.py:seed={seed}"
    return sweep.Run(f"quick-{name}" if quick else name, config, overrides, labels)


def _cell(results, variant: str, batch_size: int, rate: float) -> list[dict[str, Any]]:
    key = (variant, batch_size, rate)
    return [
        r
        for r in results.values()
        if (r["variant"], r["batch_size"], r["learning_rate"]) == key
    ]


def table(results: dict[str, dict[str, Any]]) -> str:
    """A line a cell: loss, largest ratio and spikes of every variant."""
    names = list(VARIANTS)
    head = " | ".join(f"{n}: loss, largest ratio, spikes" for n in names)
    lines = [f"| batch | rate | {head} |", "| --- " * (2 + len(names)) + "|"]
    for batch_size, rate in itertools.product(BATCH_SIZES, LEARNING_RATES):
        cells = [_text(_cell(results, name, batch_size, rate)) for name in names]
        lines.append(f"| {batch_size} | {rate:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _text(found: list[dict[str, Any]]) -> str:
    if not found:
        return ""
    losses = [r["validation_loss"] for r in found if not r["diverged"]]
    diverged = len(found) - len(losses)
    parts = []
    if losses:
        spread = f" ± {np.std(losses, ddof=1):.3f}" if len(losses) > 1 else ""
        parts.append(f"{np.mean(losses):.3f}{spread}")
    if diverged:
        parts.append(f"{diverged} of {len(found)} diverged")
    parts.append(f"{max(r['max_loss_ratio'] for r in found):.2f}")
    parts.append(f"{sum(r['spikes'] for r in found)}")
    return ", ".join(parts)


def plot(results: dict[str, dict[str, Any]], path: pathlib.Path) -> None:
    """Validation loss and largest loss ratio against the rate, a column a batch."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(11, 6), layout="constrained")
    panels = figure.subplots(2, len(BATCH_SIZES), sharex=True, sharey="row")
    for column, batch_size in enumerate(BATCH_SIZES):
        for name in VARIANTS:
            points = []
            for rate in LEARNING_RATES:
                found = _cell(results, name, batch_size, rate)
                losses = [r["validation_loss"] for r in found if not r["diverged"]]
                if found:
                    loss = np.mean(losses) if losses else np.nan
                    ratio = max(r["max_loss_ratio"] for r in found)
                    points.append((rate, loss, ratio))
            if points:
                rates, losses, ratios = zip(*points, strict=True)
                panels[0][column].plot(rates, losses, "o-", label=name)
                panels[1][column].plot(rates, ratios, "o-")
        panels[0][column].set_title(f"batch {batch_size} x 128")
        panels[1][column].axhline(sweep.SPIKE_RATIO, color="black", lw=0.8, ls="--")
        panels[1][column].set_xscale("log")
        panels[1][column].set_yscale("log")
        panels[1][column].set_xlabel("peak learning rate")
    panels[0][0].set_ylabel("validation loss, nats a byte")
    panels[1][0].set_ylabel("largest loss ratio")
    panels[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> None:
    """Makes the runs that are missing, then the table and the plot."""
    sweep.main(argv, __doc__ or "", runs, DIRECTORY, table, plot)


if __name__ == "__main__":
    main()
