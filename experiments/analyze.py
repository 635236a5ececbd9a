"""Computes the difficulty of every sample of a config's training data, into an index.

    python -m experiments.analyze --config=configs/gpt_baseline.py \\
        --metric=sequence_length --metric=vocabulary_rarity --output=runs/index

The samples are the training rows, which a curriculum draws, or with --of=documents the
training documents. A run that was killed goes on where it was when it is started again.
"""

import hashlib
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_collections

from dataeff_jax import curriculum
from experiments import builders, command_line

KINDS = ("rows", "documents")


class Samples(NamedTuple):
    """What is analyzed: records by position, and what stands for them."""

    records: Any
    fingerprint: str
    max_length: int  # of the longest, in tokens


def samples(
    config: ml_collections.ConfigDict, corpus: builders.Corpus, kind: str
) -> Samples:
    """The training rows or documents of a config.

    Args:
      config: the configuration.
      corpus: what ``builders.corpus`` made of it.
      kind: ``"rows"`` or ``"documents"``.
    """
    documents: Any = corpus.train.documents  # a subset of a cache
    settings = config.data
    # The documents' tokens and their choice and order, and how they are cut.
    told = [documents.cache.fingerprint, hashlib.sha256(documents.indices).hexdigest()]
    if kind == "documents":
        records, max_length = documents, int(documents.lengths.max())
    else:
        records, max_length = corpus.train, settings.seq_len
        told += [settings.seq_len, settings.segments]
    fingerprint = hashlib.sha256(repr([kind, *told]).encode()).hexdigest()
    return Samples(records, fingerprint, max_length)


def _lexicographic(corpus: builders.Corpus, max_length: int) -> curriculum.Metric:
    """Length, then rarity, with the power of ten that no rarity of theirs reaches."""
    num_tokens = max(2, corpus.train.num_targets)
    rarest = math.log(num_tokens + corpus.tokenizer.vocab_size)
    bound = 10 ** len(str(math.ceil((max_length + 1) * rarest)))
    return curriculum.Lexicographic(
        curriculum.sequence_length(), _rarity(corpus, max_length), bound=bound
    )


def _rarity(corpus: builders.Corpus, max_length: int) -> curriculum.Metric:
    return curriculum.vocabulary_rarity(vocab_size=corpus.tokenizer.vocab_size)


METRICS: dict[str, Callable[[builders.Corpus, int], curriculum.Metric]] = {
    "sequence_length": lambda corpus, max_length: curriculum.sequence_length(),
    "vocabulary_rarity": _rarity,
    "sequence_length_vocabulary_rarity": _lexicographic,
}


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
      metrics: names of ``METRICS``, different ones.
      directory: of the index.
      kind: ``"rows"`` or ``"documents"``.
      num_workers: processes; 0 computes in this one.
      overwrite: replace an index of other data or metrics.
      progress: called as ``progress(done, total)``.

    Raises:
      ValueError: for a corpus or a directory that does not serve.
    """
    corpus = builders.corpus(config)
    chosen = samples(config, corpus, kind)
    return curriculum.analyze(
        chosen.records,
        [METRICS[name](corpus, chosen.max_length) for name in metrics],
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
        choices=list(METRICS),
        help="a difficulty; give the flag once for each",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="of the index")
    parser.add_argument(
        "--of", choices=KINDS, default="rows", help="what a sample is (rows)"
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
