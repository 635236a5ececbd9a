"""Computes the difficulty of every sample of a config's training data, into an index.

    python -m experiments.analyze --config=configs/gpt_baseline.py \\
        --metric=sequence_length --metric=vocabulary_rarity --output=runs/index

The samples are the training rows, which a curriculum draws, or with --of=documents the
training documents. A run that was killed goes on where it was when it is started again.
"""

import sys
from collections.abc import Callable

import ml_collections

from dataeff_jax import curriculum
from experiments import command_line, corpora, difficulties


def analyze(
    config: ml_collections.ConfigDict,
    metrics: list[str],
    directory: str,
    *,
    kind: str = "rows",
    num_workers: int = 0,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> curriculum.DifficultyIndex:
    """Builds the index of a config's training data, or opens what is there.

    Args:
      config: the configuration.
      metrics: names of ``difficulties.METRICS``, different ones.
      directory: of the index.
      kind: ``"rows"`` or ``"documents"``.
      num_workers: processes; 0 computes in this one.
      overwrite: replace an index of other data or metrics.
      progress: called as ``progress(done, total)``.

    Raises:
      ValueError: for a corpus or a directory that does not serve.
    """
    corpus = corpora.corpus(config)
    chosen = difficulties.samples(config, corpus, kind)
    return curriculum.analyze(
        chosen.records,
        [difficulties.METRICS[name](corpus, chosen.max_length) for name in metrics],
        directory,
        num_workers=num_workers,
        source_fingerprint=chosen.fingerprint,
        overwrite=overwrite,
        progress=progress,
    )


def table(index: curriculum.DifficultyIndex, percentiles: tuple[int, ...]) -> str:
    """The difficulties at percentiles, a line a metric, under a header."""
    rows = [["metric", *(f"{p}%" for p in percentiles)]]
    for metric in index.metrics:
        found = [index.quantile(metric, p) for p in percentiles]
        rows.append([metric, *map(number_text, found)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)]
        )
        for row in rows
    )


def number_text(value: int | float) -> str:
    """A difficulty as text: integers in full, others to six digits."""
    return f"{value:,.6g}" if isinstance(value, float) else f"{value:,}"


def _show(done: int, total: int) -> None:
    print(f"\ranalyzed {done:,} of {total:,}", end="", file=sys.stderr)
    if done == total:
        print(file=sys.stderr)


def main(argv: list[str] | None = None) -> None:
    """Parses the flags, analyzes and prints the percentiles."""
    parser = command_line.parser(__doc__ or "")
    parser.add_argument(
        "--metric",
        action="append",
        required=True,
        choices=list(difficulties.METRICS),
        help="a difficulty; give the flag once for each",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="of the index")
    parser.add_argument(
        "--of",
        choices=difficulties.KINDS,
        default="rows",
        help="what a sample is (rows)",
    )
    parser.add_argument("--num_workers", type=int, default=0, help="processes (0)")
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace an index of other data or metrics",
    )
    flags = command_line.parse(parser, argv)
    try:
        index = analyze(
            flags.config,
            flags.metric,
            flags.output,
            kind=flags.of,
            num_workers=flags.num_workers,
            overwrite=flags.overwrite,
            progress=_show,
        )
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    print(f"{len(index):,} {flags.of} in {index.directory}")
    print(table(index, (0, 10, 50, 90, 100)))


if __name__ == "__main__":
    main()
