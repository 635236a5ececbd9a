"""Difficulty metrics: one number a sample, the larger the harder.

References:
  Li et al., "DeepSpeed Data Efficiency", https://arxiv.org/abs/2212.03597, 2022
"""

import functools
import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from dataeff_jax.curriculum import _records

# -ln p of a word is kept in units of 2^-36: sums of integers do not depend on their
# order, 2^21 tokens of the rarest word fit 64 bits, and 2048 tokens err by 1.5e-8.
_FRACTION_BITS = 36


class Metric:
    """A difficulty metric; subclass it for one that works on many records at once.

    A metric may first count something over all samples: :meth:`accumulate` gives the
    counts of some records, they are added up over the data set, :meth:`prepare` makes
    of the sum what :meth:`values` needs. Objects of the class are sent to other
    processes, so they have to pickle.

    Attributes:
      name: a word, the metric's name in the index.
      dtype: of the values: an integer or a float of NumPy, at most 8 bytes.
      batch_size: records that it wants to see at once. Few are best for NumPy, whose
        arrays then stay in the processor's cache.

    Example:
      >>> from dataeff_jax import curriculum
      >>> class FirstToken(curriculum.Metric):
      ...     name, dtype = "first_token", "int64"
      ...     def values(self, records, prepared):
      ...         return np.array([record["tokens"][0] for record in records])
      >>> source = [{"tokens": [5, 1]}, {"tokens": [2]}]
      >>> FirstToken().values(curriculum.Records(source, 0, 2), None).tolist()
      [5, 2]
    """

    name: str
    dtype: str = "int64"
    # Not mapped anew each time either: 64 records of 512 tokens took a quarter of the
    # time of 256.
    batch_size: int = 64

    def accumulate(self, records: _records.Records) -> np.ndarray | None:
        """Return integer counts of some records; None where nothing is counted."""
        return None

    def prepare(self, total: np.ndarray | None) -> Any:
        """Return what :meth:`values` gets, from the counts of all samples."""
        return total

    def values(self, records: _records.Records, prepared: Any) -> np.ndarray:
        """Return the difficulty of each of some records, [n]."""
        raise NotImplementedError

    @property
    def counts(self) -> bool:
        """Return whether the metric counts something first."""
        return type(self).accumulate is not Metric.accumulate

    parts: tuple["Metric", ...] = ()  # what a product is made of

    @property
    def fingerprint(self) -> str:
        """Return what changes when the values do: settings, and code of yours."""
        text = f"{self.name} {self.dtype} {described(self)}"
        return hashlib.sha256(text.encode()).hexdigest()


def described(value: Any) -> str:
    """Return a text for a setting that is the same in every process."""
    if isinstance(value, tuple | list):
        return f"({', '.join(described(one) for one in value)})"
    if isinstance(value, functools.partial):
        settings = sorted(value.keywords.items())
        return described([value.func, value.args, settings])
    if inspect.isroutine(value) or inspect.isclass(value):
        module = getattr(value, "__module__", None)  # methods of built-in types: none
        return f"{module}.{value.__qualname__} {_source(value)}"
    if isinstance(value, Metric) or callable(value):
        kind = type(value)
        settings = sorted(getattr(value, "__dict__", {}).items())
        # This library's classes change their name when their values change.
        own = kind.__module__.startswith("dataeff_jax.")
        code = "" if own else _source(kind)
        return f"{kind.__module__}.{kind.__qualname__} {described(settings)} {code}"
    return repr(value)


def _source(value: Any) -> str:
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):  # built in, or typed at a prompt
        return ""


class _Masked(Metric):
    """What metrics of tokens share: which of them count."""

    def __init__(self, field: Any, mask_field: Any, padding: int | None):
        if mask_field is not None and padding is not None:
            raise ValueError(
                f"mask_field={mask_field!r} and padding={padding} both tell the "
                f"padding; give one."
            )
        self._field = field
        self._mask_field = mask_field
        self._padding = padding

    def _tokens(
        self, records: _records.Records
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return flat tokens, lengths, and which of the tokens count."""
        flat, lengths = records.flat(self._field)
        if self._padding is not None:
            return flat, lengths, flat != self._padding
        if self._mask_field is None:
            return flat, lengths, None
        mask, mask_lengths = records.flat(self._mask_field)
        if not np.array_equal(lengths, mask_lengths):
            bad = records.start + int(np.argmax(lengths != mask_lengths))
            raise ValueError(
                f"Sample {bad}: {self._field!r} and {self._mask_field!r} differ in "
                f"length."
            )
        return flat, lengths, mask != 0


class _SequenceLength(_Masked):
    name = "sequence_length"

    def values(self, records: _records.Records, prepared: Any) -> np.ndarray:
        _, lengths, counted = self._tokens(records)
        return lengths if counted is None else _records.row_sums(counted, lengths)


def sequence_length(
    *, field: Any = "tokens", mask_field: Any = None, padding: int | None = None
) -> Metric:
    """The number of tokens that are no padding.

    Args:
      field: the records' field with the tokens; a place where records are tuples.
      mask_field: a field of the same length that is 0 at padding, for example
        ``"segment_ids"`` or ``"weights"``.
      padding: the token that is padding. With neither, all tokens count.

    Returns:
      The metric ``sequence_length``, int64.

    Raises:
      ValueError: both ways to tell the padding.

    Example:
      >>> from dataeff_jax import curriculum
      >>> records = curriculum.Records([[5, 6, 0], [7, 0, 0]], 0, 2)
      >>> curriculum.sequence_length(padding=0).values(records, None).tolist()
      [2, 1]
    """
    return _SequenceLength(field, mask_field, padding)


class _VocabularyRarity(_Masked):
    name = "vocabulary_rarity"

    def __init__(self, vocab_size: int, *masking: Any):
        super().__init__(*masking)
        if vocab_size < 1:
            raise ValueError(f"vocab_size={vocab_size} must be at least 1.")
        self._vocab_size = vocab_size

    @property
    def _padding_is_a_word(self) -> bool:
        """Whether padding can be left out of the table, at no cost a token."""
        return self._padding is not None and 0 <= self._padding < self._vocab_size

    def _counted(self, records: _records.Records):
        """Return as :meth:`_tokens` does, with padding that the table leaves out."""
        if self._padding_is_a_word:
            return *records.flat(self._field), None
        return self._tokens(records)

    def accumulate(self, records: _records.Records) -> np.ndarray:
        flat, lengths, counted = self._counted(records)
        known = flat if counted is None else flat[counted]
        signed = known.dtype.kind == "i" and len(known) and known.min() < 0
        counts = np.bincount(known[:0] if signed else known, minlength=self._vocab_size)
        if signed or len(counts) > self._vocab_size:
            outside = (flat < 0) | (flat >= self._vocab_size)
            bad = np.flatnonzero(outside if counted is None else outside & counted)[0]
            place = np.searchsorted(np.cumsum(lengths), bad, side="right")
            raise ValueError(
                f"Sample {records.start + int(place)} has token {flat[bad]}, outside "
                f"vocab_size={self._vocab_size}."
            )
        if self._padding_is_a_word:
            counts[self._padding] = 0
        return counts

    def prepare(self, total: np.ndarray | None) -> np.ndarray:
        counts = np.maximum(np.asarray(total, np.int64), 1)
        rarity = np.log(counts.sum()) - np.log(counts)
        if self._padding_is_a_word:
            rarity[self._padding] = 0
        return np.rint(rarity * 2**_FRACTION_BITS).astype(np.int64)

    def values(self, records: _records.Records, prepared: Any) -> np.ndarray:
        flat, lengths, counted = self._counted(records)
        if counted is not None:
            flat = np.where(counted, flat, 0)
        rarity = prepared.take(flat)
        if counted is not None:
            rarity *= counted
        return _records.row_sums(rarity, lengths) >> _FRACTION_BITS


def vocabulary_rarity(
    *,
    vocab_size: int,
    field: Any = "tokens",
    mask_field: Any = None,
    padding: int | None = None,
) -> Metric:
    """How rare the words of a sample are: ``floor(-sum of ln p(token))``.

    p is a token's share in the whole data set, where a token that never occurs counts
    once. It is a sum, so it grows with the length.

    Args:
      vocab_size: tokens are 0 to vocab_size - 1.
      field: the records' field with the tokens; a place where records are tuples.
      mask_field: a field of the same length that is 0 at padding.
      padding: the token that is padding. With neither, all tokens count.

    Returns:
      The metric ``vocabulary_rarity``, int64.

    Raises:
      ValueError: a vocabulary without tokens, or both ways to tell the padding.

    Example:
      >>> from dataeff_jax import curriculum
      >>> records = curriculum.Records([[0, 0, 0], [0, 1, 2]], 0, 2)
      >>> metric = curriculum.vocabulary_rarity(vocab_size=3)
      >>> metric.accumulate(records).tolist()
      [4, 1, 1]
      >>> table = metric.prepare(metric.accumulate(records))
      >>> metric.values(records, table).tolist()  # 3 ln(6/4); ln(6/4) + 2 ln 6
      [1, 3]
    """
    return _VocabularyRarity(vocab_size, field, mask_field, padding)


class Lexicographic(Metric):
    """Orders by one metric, and by another where the first is equal.

    ``first * bound + second``. Sequence length with vocabulary rarity is what the
    original calls seqlen_voc, with a power of ten as the bound.

    Args:
      first: a metric with integer values, not negative.
      second: another one.
      bound: larger than all values of ``second``; the analysis checks it.

    Raises:
      ValueError: a metric whose values are no integers, or a bound below 1.

    Example:
      >>> from dataeff_jax import curriculum
      >>> length = curriculum.sequence_length()
      >>> rarity = curriculum.vocabulary_rarity(vocab_size=50_000)
      >>> curriculum.Lexicographic(length, rarity, bound=10**6).name
      'sequence_length_vocabulary_rarity'
    """

    def __init__(self, first: Metric, second: Metric, *, bound: int):
        for metric in (first, second):
            if np.dtype(metric.dtype).kind not in "iu":
                raise ValueError(
                    f"{metric.name} has {metric.dtype} values; a lexicographic product "
                    f"needs integers."
                )
        if bound < 1:
            raise ValueError(f"bound={bound} must be at least 1.")
        self.name = f"{first.name}_{second.name}"
        self.parts = (first, second)
        self._bound = bound

    def values(self, records: _records.Records, prepared: Any) -> np.ndarray:
        """Return the products, int64[n]; ``prepared`` is what the two parts need."""
        first, second = (
            np.asarray(metric.values(records, own), np.int64)
            for metric, own in zip(self.parts, prepared, strict=True)
        )
        limit = (2**63 - 1) // self._bound
        bad = (second < 0) | (second >= self._bound) | (first < 0) | (first >= limit)
        if bad.any():
            place = int(np.argmax(bad))
            raise ValueError(
                f"Sample {records.start + place} has {self.parts[0].name}="
                f"{first[place]} (allowed: 0 to {limit - 1}) and "
                f"{self.parts[1].name}={second[place]}, which must lie in 0 to bound - "
                f"1 = {self._bound - 1}."
            )
        return first * self._bound + second


class _Function(Metric):
    def __init__(
        self, function: Any, name: str, dtype: str, accumulate: Any, version: str
    ):
        if not callable(function) or not (accumulate is None or callable(accumulate)):
            raise ValueError(f"{function=!r} and {accumulate=!r} must be callable.")
        if not name.isidentifier():
            raise ValueError(f"name={name!r} must be a word: letters, digits and _.")
        if np.dtype(dtype).kind not in "iuf" or np.dtype(dtype).itemsize > 8:
            raise ValueError(
                f"dtype={dtype!r} must be an integer or a float of at most 8 bytes."
            )
        self.name, self.dtype = name, np.dtype(dtype).name
        self._version = version
        self._function = function
        self._accumulate = accumulate

    @property
    def counts(self) -> bool:
        return self._accumulate is not None

    def accumulate(self, records: _records.Records) -> np.ndarray | None:
        if self._accumulate is None:
            return None
        counts = [np.asarray(self._accumulate(record)) for record in records]
        return np.sum(counts, axis=0)

    def values(self, records: _records.Records, prepared: Any) -> np.ndarray:
        extra = (prepared,) if self.counts else ()
        return np.array([self._function(record, *extra) for record in records])


def function_metric(
    function: Callable[..., Any],
    *,
    name: str,
    dtype: str = "float32",
    accumulate: Callable[[Any], Any] | None = None,
    version: str = "",
) -> Metric:
    """A metric that is a function of yours of one record.

    With ``accumulate`` it is ``function(record, total)``, where the total is the sum of
    ``accumulate(record)`` over the data set. Functions are sent to other processes, so
    define them in a module.

    Args:
      function: ``record -> number``.
      name: of the metric, a word.
      dtype: of its values.
      accumulate: ``record -> integer array`` of one shape.
      version: change it when the function gives other values and its source code does
        not show it, because of what it calls or captures.

    Returns:
      The metric.

    Raises:
      ValueError: no function, or a name or a dtype that is not allowed.

    Example:
      >>> from dataeff_jax import curriculum
      >>> metric = curriculum.function_metric(
      ...     lambda record: len(record["text"]), name="characters", dtype="int64")
      >>> metric.values(curriculum.Records([{"text": "abc"}], 0, 1), None).tolist()
      [3]
    """
    return _Function(function, name, dtype, accumulate, version)
