"""Shows an index: percentiles, histograms, and the text of easy and hard samples.

    python -m experiments.inspect runs/index --config=configs/gpt_baseline.py \\
        --percentile=1 --percentile=50 --percentile=99 --output=runs/index.png

The config is that of the analysis; its data tells the texts.
"""

import pathlib
from typing import Any

import ml_collections

from dataeff_jax import curriculum
from experiments import analyze, command_line, corpora, difficulties

PERCENTILES = (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 100)


def plot(index: curriculum.DifficultyIndex, path: str | pathlib.Path) -> pathlib.Path:
    """Draws the histogram of each metric, with a few percentiles, and writes a PNG.

    Args:
      index: the difficulties.
      path: of the PNG; its directory is made if needed.

    Returns:
      The path.
    """
    import matplotlib.figure  # takes a second

    count = len(index.metrics)
    figure = matplotlib.figure.Figure(figsize=(8, 3 * count), layout="constrained")
    panels = figure.subplots(count, 1, squeeze=False).flat
    for axes, metric in zip(panels, index.metrics, strict=True):
        histogram = index.manifest["metrics"][metric]["histogram"]
        axes.stairs(histogram["counts"], histogram["edges"], fill=True, alpha=0.6)
        for percentile in (1, 50, 99):
            value = index.quantile(metric, percentile)
            axes.axvline(value, color="black", lw=0.8, ls="--")
            # The value tells how far across, the panel how high.
            place = axes.get_xaxis_transform()
            axes.text(value, 1.02, f"{percentile}%", transform=place, ha="center")
        axes.set_xlabel(metric.replace("_", " "))
        axes.set_ylabel("samples")
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")
    return path


def samples_of(
    config: ml_collections.ConfigDict,
    corpus: corpora.Corpus,
    index: curriculum.DifficultyIndex,
) -> Any:
    """The records that were analyzed, rows or documents, by their fingerprint.

    Raises:
      ValueError: where the index is of other data than the config's.
    """
    for kind in difficulties.KINDS:
        found = difficulties.samples(config, corpus, kind)
        if found.fingerprint == index.manifest["source"]:
            return found.records
    raise ValueError(
        f"{index.directory} was made from other data than this config's; give the "
        "config and the overrides of the analysis"
    )


def text_of(record: Any, tokenizer: Any, max_characters: int) -> str:
    """A sample's text on one line, cut after ``max_characters``."""
    tokens = record["tokens"] if isinstance(record, dict) else record
    text = repr(tokenizer.decode(tokens))[1:-1]
    rest = len(text) - max_characters
    return text if rest <= 0 else f"{text[:max_characters]}... ({rest:,} more)"


def samples_at(
    index: curriculum.DifficultyIndex, metric: str, percentile: int, count: int
) -> list[int]:
    """Up to ``count`` neighbours in difficulty, the last one at the percentile."""
    order = index.order(metric)
    end = curriculum.percentile_count(percentile, len(index))
    end = min(len(order), max(end, count))
    return order[max(0, end - count) : end].tolist()


def texts(
    index: curriculum.DifficultyIndex,
    records: Any,
    tokenizer: Any,
    *,
    metrics: list[str],
    percentiles: list[int],
    count: int,
    max_characters: int,
) -> str:
    """The texts of samples at percentiles of metrics, a line each under headings."""
    lines = []
    for metric in metrics:
        values = index.values(metric)
        for percentile in percentiles:
            lines.append(f"\n{metric}, {percentile}%:")
            for sample in samples_at(index, metric, percentile, count):
                value = analyze.number_text(values[sample].item())
                text = text_of(records[sample], tokenizer, max_characters)
                lines.append(f"  sample {sample} ({value}): {text}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Parses the flags, writes the plot and prints table and texts."""
    parser = command_line.parser(__doc__ or "")
    parser.add_argument("index", metavar="DIR", help="what analyze has written")
    parser.add_argument("--metric", action="append", help="all, if not given")
    parser.add_argument(
        "--percentile",
        action="append",
        type=int,
        choices=range(101),
        metavar="0..100",
        help="whose samples to show; give the flag once for each (1, 50, 99)",
    )
    parser.add_argument("--num_samples", type=int, default=2, help="at each (2)")
    parser.add_argument("--characters", type=int, default=300, help="of a text (300)")
    parser.add_argument(
        "--output", metavar="PNG", help="the plot; DIR.png if not given"
    )
    flags = command_line.parse(parser, argv)
    try:
        if min(flags.num_samples, flags.characters) < 1:
            raise ValueError("--num_samples and --characters must be at least 1")
        index = curriculum.DifficultyIndex(flags.index)
        metrics = flags.metric or list(index.metrics)
        for metric in metrics:
            index.values(metric)  # an unknown one is told with the known ones
        corpus = corpora.corpus(flags.config)
        records = samples_of(flags.config, corpus, index)
        directory = index.directory.resolve()
        output = flags.output or directory.with_name(f"{directory.name}.png")
        path = plot(index, output)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {command_line.in_flags(error)}\n")
    print(analyze.table(index, PERCENTILES))
    print(
        texts(
            index,
            records,
            corpus.tokenizer,
            metrics=metrics,
            percentiles=flags.percentile or [1, 50, 99],
            count=flags.num_samples,
            max_characters=flags.characters,
        )
    )
    print(f"\nplot: {path}")


if __name__ == "__main__":
    main()
