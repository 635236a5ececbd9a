"""Splits: by the hash of a document's content, or at random over any rows."""

import collections.abc
import functools
from typing import Any, Protocol

import numpy as np
from grain import experimental

from dataeff_jax.data import _cache, _sources


class Documents(Protocol):
    """Tokenized documents, as ``PackedRows`` takes them.

    ``TokenCache``, ``DocumentSubset`` and ``TokenDocuments`` are such; so is anything
    with these members.

    Example:
      >>> from dataeff_jax import data
      >>> documents: data.Documents = data.TokenDocuments([[1, 2]], end_of_text=0)
      >>> len(documents), documents[0].tolist()
      (1, [1, 2])
    """

    end_of_text: int

    def __len__(self) -> int:
        """Return the number of documents."""
        ...

    def __getitem__(self, index: int) -> np.ndarray:
        """Return the tokens of a document, without end_of_text."""
        ...

    @property
    def lengths(self) -> np.ndarray:
        """Return the documents' numbers of tokens, int64[D]."""
        ...


class TokenDocuments:
    """Tokenized documents in memory.

    Args:
      documents: token arrays, one a document; may be empty.
      end_of_text: the token between documents.

    Example:
      >>> from dataeff_jax import data
      >>> documents = data.TokenDocuments([[1, 2], [], [3]], end_of_text=0)
      >>> documents.lengths.tolist()
      [2, 0, 1]
    """

    def __init__(self, documents: collections.abc.Iterable[Any], *, end_of_text: int):
        self._documents = [np.asarray(tokens, np.int32) for tokens in documents]
        self.end_of_text = end_of_text
        if not self._documents:
            raise ValueError("There is no document; give at least one.")

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> np.ndarray:
        return self._documents[index]

    @property
    def lengths(self) -> np.ndarray:
        """Return the documents' numbers of tokens, int64[D]."""
        return np.array([len(tokens) for tokens in self._documents], np.int64)


class DocumentSubset:
    """Some documents of a cache, in its order.

    Args:
      cache: the cache, or any ``Documents``.
      indices: which of its documents, int64[n].

    Example:
      >>> from dataeff_jax import data
      >>> documents = data.TokenDocuments([[1], [2, 3], [4]], end_of_text=0)
      >>> data.DocumentSubset(documents, indices=[1, 2]).lengths.tolist()
      [2, 1]
    """

    def __init__(self, cache: Documents, *, indices: Any):
        self.cache = cache
        self.indices = np.asarray(indices, np.int64)
        self.end_of_text = cache.end_of_text

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.cache[self.indices[index]]

    @property
    def lengths(self) -> np.ndarray:
        """Return the documents' numbers of tokens, int64[n]."""
        return self.cache.lengths[self.indices]


def _mixed(values: np.ndarray, seed: int) -> np.ndarray:
    """Return well-mixed uint64 of values and seed (the finisher of splitmix64)."""
    with np.errstate(over="ignore"):
        offset = np.uint64((seed * 0x9E3779B97F4A7C15 + 1) % 2**64)
        x = np.asarray(values, np.uint64) + offset
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def split_documents(
    cache: _cache.TokenCache, *, validation_fraction: float, seed: int = 0
) -> tuple[DocumentSubset, DocumentSubset]:
    """Split documents into training and validation by their content.

    A document goes to validation when hash(text, seed) / 2^64 < validation_fraction. So
    copies of a document fall on one side, a document keeps its side when the corpus
    grows or the tokenizer changes, and each side holds about its share of documents.

    Args:
      cache: the tokenized corpus.
      validation_fraction: expected share of distinct documents, between 0 and 1.
      seed: another seed gives another split.

    Returns:
      Training and validation documents.

    Raises:
      ValueError: a fraction outside (0, 1), or one that leaves a side empty.

    Example:
      >>> import tempfile
      >>> from dataeff_jax import data
      >>> source = data.MemorySource([f"text {i // 2}" for i in range(200)])
      >>> cache = data.tokenize(source, data.ByteTokenizer(), tempfile.mkdtemp())
      >>> train, validation = data.split_documents(cache, validation_fraction=0.2)
      >>> len(train) + len(validation), len(validation) % 2  # every text twice
      (200, 0)
    """
    if not 0 < validation_fraction < 1:
        raise ValueError(
            f"validation_fraction={validation_fraction} must lie between 0 and 1."
        )
    limit = np.uint64(int(validation_fraction * 2**64))
    held_out = _mixed(cache.hashes, seed) < limit
    sides = tuple(
        DocumentSubset(cache, indices=np.flatnonzero(side))
        for side in (~held_out, held_out)
    )
    if not len(sides[0]) or not len(sides[1]):
        raise ValueError(
            f"validation_fraction={validation_fraction} of {len(cache)} documents "
            f"gives {len(sides[0])} for training and {len(sides[1])} for validation; "
            f"use more documents, another fraction or another seed."
        )
    return sides[0], sides[1]


class RowSubset:
    """A fixed random part of any rows; repeating and reshuffling never leave it.

    Args:
      rows: the whole.
      start: first place of the part in a keyed permutation of the rows.
      stop: the place after its last.
      seed: of the permutation.

    Example:
      >>> from dataeff_jax import data
      >>> rows = data.MemorySource({"labels": np.arange(4)})
      >>> halves = [data.RowSubset(rows, start=s, stop=s + 2, seed=0) for s in (0, 2)]
      >>> sorted(int(half[i]["sample_id"]) for half in halves for i in range(2))
      [0, 1, 2, 3]
    """

    def __init__(self, rows: Any, *, start: int, stop: int, seed: int):
        self._rows = rows
        self._start = start
        self._length = stop - start
        self._seed = seed

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the record, with the ``sample_id`` that it has in the whole."""
        index = _sources.checked_index(index, self._length)
        row = permuted(self._start + index, len(self._rows), self._seed)
        return {"sample_id": np.int64(row), **self._rows[row]}


_SHORT = 4096


@functools.lru_cache(maxsize=16)
def _short_permutation(length: int, seed: int) -> np.ndarray:
    """Return a permutation of ``range(length)``, int64[length]."""
    # The raw bits of Philox are the same in all versions of NumPy.
    bits = np.random.Philox(key=np.array([seed, length], np.uint64))
    return np.argsort(bits.random_raw(length), kind="stable")


def permuted(index: int, length: int, seed: int) -> int:
    """Return where a keyed permutation of ``range(length)`` sends ``index``.

    A Feistel network for long ranges: no array is made, whatever the length. It walks
    in a domain of at least 2^16 until it lands inside, 4 ms for a length of 10, so
    short ranges are sorted by random numbers instead. ``seed`` counts modulo 2^32.
    """
    seed %= 2**32
    if length <= _SHORT:
        return int(_short_permutation(length, seed)[index])
    return experimental.index_shuffle(index, max_index=length - 1, seed=seed, rounds=4)


def random_split(
    rows: Any, *, sizes: collections.abc.Sequence[int], seed: int
) -> tuple[RowSubset, ...]:
    """Split rows at random into parts that share none.

    The parts are slices of one keyed permutation; each is a fixed set, so batches of it
    never hold a row of another part, in any epoch.

    Args:
      rows: anything with ``__len__`` and ``__getitem__``.
      sizes: rows a part; their sum is at most ``len(rows)``.
      seed: decides the permutation.

    Returns:
      The parts, which are rows themselves.

    Raises:
      ValueError: an empty part, or more rows asked for than there are.

    Example:
      >>> from dataeff_jax import data
      >>> rows = data.MemorySource({"labels": np.arange(12)})
      >>> parts = data.random_split(rows, sizes=(9, 3), seed=5)
      >>> sorted(int(part[i]["labels"]) for part in parts for i in range(len(part)))
      [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    """
    if min(sizes, default=0) < 1 or sum(sizes) > len(rows):
        raise ValueError(
            f"sizes={tuple(sizes)} must be positive with a sum of at most {len(rows)}."
        )
    stops = np.cumsum(sizes).tolist()
    return tuple(
        RowSubset(rows, start=stop - size, stop=stop, seed=seed)
        for size, stop in zip(sizes, stops, strict=True)
    )
