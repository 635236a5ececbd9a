"""Curves and a table of one run or several."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

Records = Sequence[Mapping[str, Any]]

# Field of a line, label of the axis.
_AXES = (
    ("step", "steps"),
    ("tokens", "tokens"),
    ("seconds", "seconds"),
    ("flops", "FLOPs (formula)"),
)


def _points(records: Records, x: str, y: str) -> tuple[list[float], list[float]]:
    """The points of the lines that have both fields."""
    pairs = [
        (float(line[x]), float(line[y]))
        for line in records
        if line.get(x) is not None and line.get(y) is not None
    ]
    return [p[0] for p in pairs], [p[1] for p in pairs]


def plot_runs(
    runs: Mapping[str, Records],
    path: str | pathlib.Path,
    *,
    loss: str = "loss",
    validation_loss: str = "validation_loss",
) -> pathlib.Path:
    """Draws loss against steps, tokens, seconds and FLOPs, and writes a PNG.

    The training loss is a thin line, the validation loss of the same color a line with
    dots.

    Args:
      runs: name -> lines of its log (``read_log``).
      path: of the PNG; its directory is made if needed.
      loss: field of the training loss.
      validation_loss: field of the validation loss.

    Returns:
      The path.

    Raises:
      ValueError: if there is no run.

    Example:
      >>> import tempfile
      >>> records = [{"step": s, "tokens": 8 * s, "loss": 1 / s} for s in (1, 2)]
      >>> plot_runs({"a": records}, f"{tempfile.mkdtemp()}/loss.png").name
      'loss.png'
    """
    if not runs:
        raise ValueError("there is no run to plot.")
    import matplotlib.figure  # takes a second, and most programs never plot

    figure = matplotlib.figure.Figure(figsize=(11, 7), layout="constrained")
    for axes, (field, label) in zip(figure.subplots(2, 2).flat, _AXES, strict=True):
        for index, (name, records) in enumerate(runs.items()):
            color = f"C{index % 10}"
            axes.plot(*_points(records, field, loss), color=color, lw=0.7, alpha=0.5)
            points = _points(records, field, validation_loss)
            axes.plot(*points, "o-", color=color, ms=3, label=name)
        axes.set_xlabel(label)
        axes.set_ylabel("loss")
        axes.grid(alpha=0.3)
    figure.axes[0].legend()
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")
    return path


def _last(records: Records, field: str) -> Any:
    return next((r[field] for r in reversed(records) if r.get(field) is not None), None)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"


def summary_table(
    runs: Mapping[str, Records],
    *,
    fields: Sequence[str] = (
        "step",
        "tokens",
        "seconds",
        "flops",
        "loss",
        "validation_loss",
        "perplexity",
    ),
) -> str:
    """Writes the last value of each field of each run as a table of text.

    Args:
      runs: name -> lines of its log.
      fields: columns; a dash where a run has no such value.

    Returns:
      Lines of equal width, a header first.

    Example:
      >>> records = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}]
      >>> print(summary_table({"a": records}, fields=("step", "loss")))
      run  step  loss
      a       2   1.5
    """
    rows = [["run", *(field.replace("_", " ") for field in fields)]]
    for name, records in runs.items():
        rows.append([name, *(_text(_last(records, field)) for field in fields)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)]
        )
        for row in rows
    )
