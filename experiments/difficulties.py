"""The difficulties of a config's training data: what is measured, on which samples."""

import hashlib
import math
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_collections

from dataeff_jax import curriculum
from experiments import corpora

KINDS = ("rows", "documents")


class Samples(NamedTuple):
    """What is analyzed: records by position, and what stands for them."""

    records: Any
    fingerprint: str
    max_length: int  # of the longest, in tokens


def samples(
    config: ml_collections.ConfigDict, corpus: corpora.Corpus, kind: str
) -> Samples:
    """The training rows or documents of a config.

    Args:
      config: the configuration.
      corpus: what ``corpora.corpus`` made of it.
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
        if not settings.packed:
            told += ["documents"]
    fingerprint = hashlib.sha256(repr([kind, *told]).encode()).hexdigest()
    return Samples(records, fingerprint, max_length)


def _length(corpus: corpora.Corpus, max_length: int) -> curriculum.Metric:
    # Rows of one document are filled up, which their segment 0 tells.
    mask = "segment_ids" if isinstance(corpus.train, curriculum.DocumentRows) else None
    return curriculum.sequence_length(mask_field=mask)


def _rarity(corpus: corpora.Corpus, max_length: int) -> curriculum.Metric:
    mask = "segment_ids" if isinstance(corpus.train, curriculum.DocumentRows) else None
    size = corpus.tokenizer.vocab_size
    return curriculum.vocabulary_rarity(vocab_size=size, mask_field=mask)


def _lexicographic(corpus: corpora.Corpus, max_length: int) -> curriculum.Metric:
    """Length, then rarity, with the power of ten that no rarity of theirs reaches."""
    num_tokens = max(2, sum(map(int, corpus.train.documents.lengths)))
    rarest = math.log(num_tokens + corpus.tokenizer.vocab_size)
    bound = 10 ** len(str(math.ceil((max_length + 1) * rarest)))
    return curriculum.Lexicographic(
        _length(corpus, max_length), _rarity(corpus, max_length), bound=bound
    )


METRICS: dict[str, Callable[[corpora.Corpus, int], curriculum.Metric]] = {
    "sequence_length": _length,
    "vocabulary_rarity": _rarity,
    "sequence_length_vocabulary_rarity": _lexicographic,
}


def index(
    config: ml_collections.ConfigDict,
    corpus: corpora.Corpus,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> curriculum.DifficultyIndex:
    """The index that a config's curriculum draws by.

    ``config.curriculum.index`` is opened, or, where it is empty, the training rows are
    analyzed, once: the index is kept in ``config.data.cache_dir``.

    Args:
      config: the configuration, with metrics in its curriculum.
      corpus: what ``corpora.corpus`` made of it.
      progress: called as ``progress(done, total)`` while analyzing.

    Raises:
      ValueError: an index of other data or without one of the metrics.
    """
    names = sorted(config.curriculum.metrics)
    chosen = samples(config, corpus, "rows")
    if config.curriculum.index:
        found = curriculum.DifficultyIndex(config.curriculum.index)
        if found.manifest["source"] != chosen.fingerprint:
            raise ValueError(
                f"curriculum.index={str(found.directory)!r} was made from other data "
                "than this config's training rows; analyze them with the same config "
                "and overrides, or leave curriculum.index empty"
            )
        for name in names:
            found.values(name)  # an unknown metric is told with the known ones
        return found
    name = f"index-{chosen.fingerprint[:12]}-{'-'.join(names)}"
    return curriculum.analyze(
        chosen.records,
        [METRICS[name](corpus, chosen.max_length) for name in names],
        pathlib.Path(config.data.cache_dir) / name,
        source_fingerprint=chosen.fingerprint,
        progress=progress,
    )
