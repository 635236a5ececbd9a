"""Shows what a config's run would feed, step by step, before any training.

    python -m experiments.preview --config=configs/gpt_curriculum.py \\
        [--output=preview.png] [--rows=12]

Prints difficulty, length, kept tokens, the part of the samples that may be drawn,
learning rate and tokens over the steps, and the shapes that will be compiled, as a
table and a plot. The data is read (and analyzed, once) only where the curriculum draws
by a metric or from several corpora, or batches are filled by tokens.
"""

import itertools
import pathlib
import sys
from typing import Any

import ml_collections
import numpy as np

from dataeff_jax import training
from experiments import builders, command_line, corpora, curricula, random_ltd

MAX_POINTS = 400  # of a curve


def preview(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Computes what a run would feed.

    Args:
      config: the configuration.

    Returns:
      ``timeline``; ``steps`` int64[P], the steps shown, and under ``curves`` by name
      arrays [P] of what holds at them.

    Raises:
      ValueError: for data, an index or schedules that do not serve.
    """
    plan = _plan(config)
    timeline = plan.timeline
    rate = builders.learning_rate(config, timeline)
    steps = _shown(timeline, MAX_POINTS)
    tokens = [timeline.tokens(step) for step in steps]
    layer_tokens = [timeline.layer_tokens(step) for step in steps]
    clocks = zip(steps, tokens, layer_tokens, strict=True)
    curves: dict[str, list] = {"tokens": tokens}
    if config.random_ltd is not None:
        curves["layer tokens"] = layer_tokens
        kept = [random_ltd.num_kept(timeline[step]) for step in steps]
        curves["kept tokens"] = kept
    curves["length"] = [timeline[step].length for step in steps]
    curves["learning rate"] = [rate(*clock) for clock in clocks]
    if plan.order is not None:
        told = [plan.order.difficulties(step) for step in steps]
        for name in told[0]:
            curves[name.replace("_", " ")] = [one[name] for one in told]
        pool = [plan.order.num_eligible(step) for step in steps]
        curves["eligible, %"] = [100 * n / plan.order.num_samples for n in pool]
    arrays = {name: np.array(values) for name, values in curves.items()}
    return {"timeline": timeline, "steps": np.array(steps), "curves": arrays}


def _plan(config: ml_collections.ConfigDict) -> curricula.Curriculum:
    settings = config.curriculum
    drawn = settings is not None and (settings.metrics or settings.mixture)
    if not drawn and not config.data.max_tokens:
        return curricula.Curriculum(curricula.timeline(config), None, None)
    corpus = corpora.corpus(config, progress=command_line.counter("tokenized"))
    counter = command_line.counter("analyzed")
    return curricula.build(config, corpus, progress=counter)


def _shown(timeline: training.Timeline, count: int) -> list[int]:
    """Steps spread evenly over the run, the first and the last among them."""
    last = timeline.num_steps - 1
    places = np.linspace(0, last, min(count, last + 1))
    return sorted({round(place) for place in places.tolist()})


def table(found: dict[str, Any], rows: int) -> str:
    """The curves at ``rows`` steps, aligned, under a header."""
    places = np.linspace(0, len(found["steps"]) - 1, min(rows, len(found["steps"])))
    places = sorted({round(place) for place in places.tolist()})
    cells = [["step", *found["curves"]]]
    for place in places:
        values = [found["steps"][place], *(c[place] for c in found["curves"].values())]
        cells.append([_text(value.item()) for value in values])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True))
        for row in cells
    )


def _text(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def shapes_table(timeline: training.Timeline) -> str:
    """The shapes that will be compiled, with the steps that have them."""
    steps = range(timeline.num_steps)
    counted = {shape: 0 for shape in timeline.shapes()}
    for shape, group in itertools.groupby(steps, lambda step: timeline[step].shape):
        counted[shape] += sum(1 for _ in group)
    lines = [f"{len(counted)} shapes, each compiled once:"]
    for shape, count in counted.items():
        name, first = random_ltd.shape_name(shape), timeline.first_step(shape)
        lines.append(f"  {name}: {count:,} steps, from step {first:,} on")
    return "\n".join(lines)


def plot(found: dict[str, Any], path: str | pathlib.Path) -> pathlib.Path:
    """Draws the curves over the steps and writes a PNG."""
    import matplotlib.figure  # takes a second

    curves = found["curves"]
    size = (8, 1.6 * len(curves) + 0.5)
    figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(curves), 1, sharex=True, squeeze=False).flat
    for axes, (name, values) in zip(panels, curves.items(), strict=True):
        axes.step(found["steps"], values, where="post")
        axes.set_ylabel(name)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    axes.set_xlabel("steps")
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")
    return path


def main(argv: list[str] | None = None) -> None:
    """Parses the flags, prints the tables and writes the plot."""
    parser = command_line.parser(__doc__ or "")
    parser.add_argument("--output", metavar="PNG", default="preview.png")
    parser.add_argument("--rows", type=int, default=12, help="of the table (12)")
    flags = command_line.parse(parser, argv)
    try:
        if flags.rows < 2:
            raise ValueError(f"--rows={flags.rows} must be at least 2")
        found = preview(flags.config)
        path = plot(found, flags.output)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    timeline = found["timeline"]
    tokens = timeline.tokens(timeline.num_steps)
    print(f"{timeline.num_steps:,} steps, {tokens:,} tokens\n")
    print(table(found, flags.rows))
    print(f"\n{shapes_table(timeline)}\n\nplot: {path}", file=sys.stdout)


if __name__ == "__main__":
    main()
