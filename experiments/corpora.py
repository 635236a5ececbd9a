"""The text of a config: read, tokenized, split and packed into rows."""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import ml_collections

from dataeff_jax import curriculum, data
from experiments import mixtures


class Rows(NamedTuple):
    """The rows of one corpus, to train and to evaluate on."""

    fingerprint: str  # of text and tokenizer
    train: data.PackedRows | curriculum.DocumentRows
    validation: data.PackedRows


class Corpus(NamedTuple):
    """The tokenized documents of a run, as rows to train and to evaluate on."""

    tokenizer: data.Tokenizer
    fingerprint: str  # of all texts and the tokenizer
    vocab_size: int  # of the model: the tokenizer's, and a mask token where one is used
    train: data.PackedRows | curriculum.DocumentRows  # of config.data's own corpus
    validation: data.PackedRows
    transform: Callable[[dict, int], dict] | None  # what becomes of a row when drawn
    parts: Mapping[str, Rows] = {}  # of the mixture, by name


def corpus(config: ml_collections.ConfigDict, *, progress=None) -> Corpus:
    """Reads, tokenizes (once, then from the cache), splits and packs the documents.

    Args:
      config: the configuration.
      progress: called as ``progress(documents_done, num_documents)`` while tokenizing.

    Raises:
      ValueError: for a corpus that is missing, empty or too small.
    """
    settings = config.data
    source = _source(settings)
    tokenizer = _tokenizer(settings, source)
    own = _rows(settings, source, tokenizer, progress)
    parts, fingerprint = _parts(config, tokenizer, own, progress), own.fingerprint
    if parts:
        told = {name: rows.fingerprint for name, rows in parts.items()}
        fingerprint = mixtures.fingerprint(fingerprint, told)
    vocab_size, transform = tokenizer.vocab_size, None
    if settings.mask_rate:
        vocab_size += 1
        transform = functools.partial(
            data.mask_tokens,
            seed=config.seed,
            mask_token=tokenizer.vocab_size,
            vocab_size=vocab_size,
            special_tokens=(tokenizer.end_of_text,),
            mask_rate=settings.mask_rate,
        )
    _, train, validation = own
    return Corpus(
        tokenizer, fingerprint, vocab_size, train, validation, transform, parts
    )


def _parts(config, tokenizer, own: Rows, progress) -> dict[str, Rows]:
    """The corpora of the mixture, of one tokenizer; ``config.data``'s own as it is."""
    if config.curriculum is None or config.curriculum.mixture is None:
        return {}
    parts = {}
    for name in sorted(config.curriculum.mixture.corpora):
        settings = mixtures.config_of(config, name).data
        if mixtures.source(settings) == mixtures.source(config.data):
            parts[name] = own
            continue
        try:
            parts[name] = _rows(settings, _source(settings), tokenizer, progress)
        except ValueError as error:
            where = f"curriculum.mixture.corpora.{name}"
            raise ValueError(f"{where}: {error}") from None
    return parts


def _rows(settings, source, tokenizer, progress) -> Rows:
    directory = data.cache_directory(settings.cache_dir, source, tokenizer)
    cache = data.tokenize(source, tokenizer, directory, progress=progress)
    train, validation = data.split_documents(
        cache,
        validation_fraction=settings.validation_fraction,
        seed=settings.split_seed,
    )
    rows = dict(length=settings.seq_len, segments=settings.segments)
    return Rows(
        cache.fingerprint,
        data.PackedRows(train, **rows)
        if settings.packed
        else curriculum.DocumentRows(train, length=settings.seq_len),
        # All configs are evaluated on the same rows.
        data.PackedRows(validation, keep_remainder=True, **rows),
    )


def _source(settings):
    if settings.name in data.CORPORA:
        return data.corpus(settings.name)
    return data.open_source(settings.name, settings.path, field=settings.field)


def _tokenizer(settings, source):
    name = settings.tokenizer.name
    if name == "bytes":
        return data.ByteTokenizer()
    if name == "bpe":
        size = settings.tokenizer.vocab_size
        return data.trained_tokenizer(source, size, settings.cache_dir)
    return data.load_tokenizer(name)
