"""Computes the difficulty of every sample of a config's training data, into an index.

    python -m experiments.analyze --config=configs/gpt_baseline.py \\
        --metric=sequence_length --metric=vocabulary_rarity --output=runs/index

The samples are the training rows, which a curriculum draws, or with --of=documents the
training documents. The metrics loss and perplexity are those of the model of a run,
named by --model=WORKDIR. A run that was killed goes on where it was when it is started
again.
"""

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import ml_collections

from dataeff_jax import curriculum, training
from experiments import command_line, corpora, difficulties

MODEL_METRICS: dict[str, Callable[..., curriculum.Metric]] = {
    "loss": curriculum.model_loss,
    "perplexity": curriculum.model_perplexity,
}


def _restored(
    workdir: str | None,
    corpus: corpora.Corpus,
    samples: difficulties.Samples,
    kind: str,
) -> Any:
    """The model of a run, if it can read these samples."""
    if workdir is None:
        raise ValueError(
            "loss and perplexity are those of a model; give --model=WORKDIR of a run"
        )
    if kind != "rows":
        raise ValueError(
            f"a model reads rows of one length, not {kind}; leave out --of"
        )
    model: Any = training.restore(workdir)
    if not model.causal:
        raise ValueError(
            f"{workdir} holds a {type(model).__name__}, which sees the tokens that "
            "it predicts; give the work directory of a GPT"
        )
    vocab_size = corpus.vocab_size
    if model.vocab_size != vocab_size or model.max_length < samples.max_length:
        raise ValueError(
            f"the model of {workdir} has {model.vocab_size} words and "
            f"{model.max_length} positions, this config {vocab_size} and "
            f"{samples.max_length}; give a run with this config's tokenizer and "
            "data.seq_len"
        )
    return model


def analyze(
    config: ml_collections.ConfigDict,
    metrics: list[str],
    directory: str,
    *,
    kind: str = "rows",
    model: str | None = None,
    num_workers: int = 0,
    shard_size: int = 2**16,
    overwrite: bool = False,
    progress: Callable[[int, int, int], None] | None = None,
) -> curriculum.DifficultyIndex:
    """Builds the index of a config's training data, or opens what is there.

    Args:
      config: the configuration.
      metrics: names of ``difficulties.METRICS`` or ``MODEL_METRICS``, different ones.
      directory: of the index.
      kind: ``"rows"`` or ``"documents"``.
      model: work directory of the run whose model gives loss and perplexity.
      num_workers: processes; 0 computes in this one.
      shard_size: samples that a process computes, and a killed run loses, at a time.
      overwrite: replace an index of other data or metrics.
      progress: called as ``progress(done, total, num_samples)``; the samples are done
        once a pass, and ``total / num_samples`` is the number of passes.

    Raises:
      ValueError: for a corpus, a model or a directory that does not serve.
    """
    chosen_metrics = set(metrics) & set(MODEL_METRICS)
    if model is not None and not chosen_metrics:
        raise ValueError("--model is of the metrics loss and perplexity; ask for one")
    corpus = corpora.corpus(config)
    chosen = difficulties.samples(config, corpus, kind)
    restored: Any = _restored(model, corpus, chosen, kind) if chosen_metrics else None

    def metric(name: str) -> curriculum.Metric:
        if name in MODEL_METRICS:
            return MODEL_METRICS[name](type(restored).row_losses, params=restored)
        return difficulties.METRICS[name](corpus, chosen.max_length)

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress(done, total, len(chosen.records))

    return curriculum.analyze(
        chosen.records,
        [metric(name) for name in metrics],
        directory,
        num_workers=num_workers,
        shard_size=shard_size,
        source_fingerprint=chosen.fingerprint,
        overwrite=overwrite,
        progress=report,
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


class _Line:
    """The line that tells how far the analysis is, and the time left."""

    def __init__(self, what: str, stream: TextIO, clock=time.monotonic):
        self._what, self._stream, self._clock = what, stream, clock
        self._began = clock()

    def __call__(self, done: int, total: int, num_samples: int) -> None:
        number = -(-done // num_samples)  # passes are done one after the other
        left = round((self._clock() - self._began) / done * (total - done))
        self._stream.write(
            f"\rpass {number} of {total // num_samples}: "
            f"{done - (number - 1) * num_samples:,} of {num_samples:,} {self._what}, "
            f"{left // 60}:{left % 60:02} left "
        )
        if done == total:
            self._stream.write("\n")
        self._stream.flush()


def main(argv: list[str] | None = None) -> None:
    """Parses the flags, analyzes and prints the percentiles."""
    parser = command_line.parser(__doc__ or "")
    parser.add_argument(
        "--metric",
        action="append",
        required=True,
        choices=[*difficulties.METRICS, *MODEL_METRICS],
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
        "--shard_size",
        type=int,
        default=2**16,
        metavar="N",
        help="samples a process computes, and a killed run loses, at a time (65536)",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace an index of other data or metrics",
    )
    parser.add_argument(
        "--model",
        metavar="WORKDIR",
        help="of the run whose model gives loss and perplexity",
    )
    flags = command_line.parse(parser, argv)
    try:
        index = analyze(
            flags.config,
            flags.metric,
            flags.output,
            kind=flags.of,
            model=flags.model,
            num_workers=flags.num_workers,
            shard_size=flags.shard_size,
            overwrite=flags.overwrite,
            progress=_Line(flags.of, sys.stderr),
        )
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {command_line.in_flags(error)}\n")
    print(f"{len(index):,} {flags.of} in {index.directory}")
    print(table(index, (0, 10, 50, 90, 100)))


if __name__ == "__main__":
    main()
