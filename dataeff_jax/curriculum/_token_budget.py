"""Batches of about as many tokens each, from rows of different length."""

import functools
import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import grain
import numpy as np

from dataeff_jax.curriculum import (
    _length_batches,
    _permutation,
    _token_batches,
)
from dataeff_jax.data import _batches

Order = Literal["dataloader", "random", "length", "bucketed"]
_ORDERS = ("dataloader", "random", "length", "bucketed")
_TOO_LONG = ("error", "drop", "truncate")
_SCALES: dict[str, Callable[[float], float]] = {
    "linear": lambda ratio: ratio,
    "sqrt": lambda ratio: ratio**0.5,
    "none": lambda ratio: 1.0,
}


class TokenBudget:
    """Batches that are filled with rows up to a number of computed tokens.

    A batch is as long as the bucket of its longest row, L, and has the most rows that
    fit, ``max_tokens // L`` (in multiples of ``row_multiple``): the shapes are known
    before the run, one for each bucket. Rows are taken in the order of the epoch, in
    one pass, as long as they fit; what then stays empty, and the end of the epoch's
    last batch, is filled up with rows of weight 0. So every sample comes once in every
    epoch, and padding is counted by the budget.

    The batch of a step is a function of (lengths, settings, step). The order "random"
    has another number of batches in each epoch, so the first batch of epoch e costs
    e + 1 passes over the lengths; any batch of the other orders costs at most one.

    Args:
      row_lengths: real tokens of each sample, integers [N], at least 1; for example
        ``index.values("sequence_length")``.
      max_tokens: rows times length of a batch, at most.
      buckets: the lengths that may come out, rising; see ``schedules.length_buckets``.
      order: of the samples. ``"random"``: another one in each epoch. ``"dataloader"``:
        as they are. ``"length"``: from short to long. ``"bucketed"``: samples of one
        bucket together, at random, and the batches in random order, others in each
        epoch. The last two pad least.
      seed: of what is random, not negative.
      min_rows: of samples in every batch but one of an epoch.
      max_rows: of a batch; None for no bound.
      row_multiple: what the rows of every batch are a multiple of: the devices of all
        processes.
      too_long: what becomes of samples longer than the last bucket: ``"error"`` refuses
        them, ``"drop"`` leaves them out, ``"truncate"`` cuts them.

    Attributes:
      shapes: the (rows, length) that may come out, by rising length.
      samples: those that are used, of N.

    Raises:
      ValueError: settings that are out of range or contradict each other.

    Example:
      >>> from dataeff_jax import curriculum
      >>> budget = curriculum.TokenBudget(
      ...     [2, 7, 3, 4, 1], max_tokens=16, buckets=(4, 8), order="dataloader")
      >>> budget.shapes, budget.num_steps(0)
      (((4, 4), (2, 8)), 2)
      >>> [(budget[t].tolist(), budget.length_at(t)) for t in (0, 1)]
      [([0, 1], 8), ([2, 3, 4, -1], 4)]
      >>> budget.learning_rate_scale(1, reference=12, method="sqrt")
      0.5

    References:
      https://www.deepspeed.ai/docs/config-json/#data-efficiency (dynamic_batching)
    """

    def __init__(
        self,
        row_lengths: Any,
        *,
        max_tokens: int,
        buckets: Sequence[int],
        order: Order = "bucketed",
        seed: int = 0,
        min_rows: int = 1,
        max_rows: int | None = None,
        row_multiple: int = 1,
        too_long: Literal["error", "drop", "truncate"] = "error",
    ):
        if order not in _ORDERS:
            raise ValueError(f"order={order!r} must be one of {', '.join(_ORDERS)}.")
        if seed < 0:
            raise ValueError(f"seed={seed} must not be negative.")
        if min_rows < 1 or row_multiple < 1:
            raise ValueError(f"{min_rows=} and {row_multiple=} must be at least 1.")
        lengths = _length_batches._checked_buckets(buckets)
        self._row_lengths = _checked_lengths(row_lengths)
        self._lengths: list[int] = lengths.tolist()
        self._order, self._seed = order, seed
        self.num_samples = len(self._row_lengths)
        self._levels = np.searchsorted(lengths, self._row_lengths)
        self.samples = _used(self._row_lengths, self._lengths[-1], too_long)
        self._levels = np.minimum(self._levels, len(lengths) - 1)
        bound = max_tokens if max_rows is None else max_rows
        fitting = np.minimum(max_tokens // lengths, bound)
        self._rows: list[int] = (fitting // row_multiple * row_multiple).tolist()
        used = np.unique(self._levels[self.samples]).tolist()
        for level in used:
            self._check_rows(level, max_tokens, min_rows, max_rows, row_multiple)
        self.shapes = tuple((self._rows[b], self._lengths[b]) for b in used)
        self._start()

    def _check_rows(
        self,
        level: int,
        max_tokens: int,
        min_rows: int,
        max_rows: int | None,
        row_multiple: int,
    ) -> None:
        rows, length = self._rows[level], self._lengths[level]
        if rows < max(min_rows, 1):
            raise ValueError(
                f"{max_tokens=}, {max_rows=} and {row_multiple=} leave {rows} rows of "
                f"{length} tokens; at least {max(min_rows, row_multiple)} are needed."
            )

    def _start(self) -> None:
        self._lock = threading.RLock()
        self._firsts = [0]  # the first step of each epoch
        self._num_steps: int | None = None  # of every epoch, where that is so
        self._epoch = functools.lru_cache(maxsize=2)(self._cut_epoch)

    def __getstate__(self) -> dict[str, Any]:
        made = ("_lock", "_firsts", "_epoch", "_num_steps")
        return {k: v for k, v in self.__dict__.items() if k not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def _cut_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return an epoch's samples, where its batches start, and their turns."""
        samples = self.samples
        if self._order in ("random", "bucketed"):
            samples = samples[self._shuffled(len(samples), epoch, 0)]
        if self._order in ("length", "bucketed"):
            by = self._row_lengths if self._order == "length" else self._levels
            samples = samples[np.argsort(by[samples], kind="stable")]
        starts = np.fromiter(_cut(self._levels[samples].tolist(), self._rows), np.int64)
        turns = np.arange(len(starts))
        if self._order == "bucketed":
            turns = self._shuffled(len(starts), epoch, 1)
        return samples, np.append(starts, len(samples)), turns

    def _shuffled(self, size: int, *numbers: int) -> np.ndarray:
        """Return a random order of ``range(size)``."""
        key = np.uint64(_permutation.key_of(self._seed, 10, *numbers))
        mixed = _permutation.mixed(np.arange(size, dtype=np.uint64) + key)
        return np.argsort(mixed, kind="stable")

    def _place(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step, and its number in it."""
        if step < 0:
            raise IndexError(f"step={step} must not be negative.")
        if self._order != "random":  # every epoch has as many
            return divmod(step, self.num_steps(0))
        with self._lock:
            while self._firsts[-1] <= step:
                steps = self.num_steps(len(self._firsts) - 1)
                self._firsts.append(self._firsts[-1] + steps)
            epoch = int(np.searchsorted(self._firsts, step, side="right")) - 1
            return epoch, step - self._firsts[epoch]

    def num_steps(self, epoch: int) -> int:
        """Return the batches of an epoch."""
        if self._order == "random":
            return len(self._epoch(epoch)[2])
        if self._num_steps is None:
            self._num_steps = len(self._epoch(0)[2])
        return self._num_steps

    def epoch_at(self, step: int) -> int:
        """Return the epoch of a step."""
        return self._place(step)[0]

    def _samples(self, step: int) -> np.ndarray:
        """Return the samples of a step's batch, without padding."""
        epoch, number = self._place(step)
        always = self._order in ("dataloader", "length")
        samples, starts, turns = self._epoch(0 if always else epoch)
        turn = turns[number]
        return samples[starts[turn] : starts[turn + 1]]

    def __getitem__(self, step: int) -> np.ndarray:
        """Return the samples of a step's batch, int64[rows]; -1 is a row of padding."""
        samples = self._samples(step)
        rows = np.full(self._rows[self._levels[samples].max()], -1, np.int64)
        rows[: len(samples)] = samples
        return rows

    def length_at(self, step: int) -> int:
        """Return the length of a step's batch."""
        return self._lengths[self._levels[self._samples(step)].max()]

    def learning_rate_scale(
        self,
        step: int,
        *,
        reference: float,
        method: Literal["linear", "sqrt", "none"] = "linear",
        unit: Literal["rows", "tokens"] = "rows",
    ) -> float:
        """Return what the learning rate of a step is multiplied by.

        Args:
          step: of the run.
          reference: the rows or tokens of the batch for which the rate is meant.
          method: ``"linear"`` is the batch's size over the reference, ``"sqrt"`` its
            square root, ``"none"`` 1.
          unit: what the size counts: samples, or their real tokens.

        Raises:
          ValueError: an unknown method or unit, or a reference that is not positive.
        """
        if method not in _SCALES or unit not in ("rows", "tokens"):
            raise ValueError(
                f"{method=} must be one of {', '.join(_SCALES)} and {unit=} rows or "
                f"tokens."
            )
        if not 0 < reference < float("inf"):
            raise ValueError(f"reference={reference} must be a positive number.")
        samples = self._samples(step)
        longest = self._lengths[-1]
        tokens = int(np.minimum(self._row_lengths[samples], longest).sum())
        size = len(samples) if unit == "rows" else tokens
        return _SCALES[method](size / reference)

    @property
    def fingerprint(self) -> str:
        """Return a sha256 that changes when the samples of any step do."""
        told = [self._lengths, self._rows, self._order, self._seed]
        arrays = self._levels.tobytes() + self.samples.tobytes()
        if self._order == "length":
            arrays += self._row_lengths.tobytes()
        return hashlib.sha256(repr(told).encode() + arrays).hexdigest()

    def batches(
        self,
        rows: Any,
        *,
        process_index: int = 0,
        process_count: int = 1,
        transform: Callable[[dict, int], dict] | None = None,
        field: str = "tokens",
    ) -> grain.MapDataset:
        """Return the endless batches, by step.

        Args:
          rows: N rows, anything with ``__len__`` and ``__getitem__(i) -> dict of
            arrays``. Arrays whose first axis is that of ``field`` are cut to the length
            of the batch, or filled up with 0; records may differ in it.
          process_index: which slice of each batch this process gets.
          process_count: number of processes, P; it divides ``row_multiple``.
          transform: applied to each record as ``transform(record, step)``.
          field: tells the length of a record.

        Returns:
          A dataset whose element t is the local part of batch t, arrays [rows / P,
          ...], with ``sample_id``, ``step``, ``length`` int64[rows / P], and
          ``weights``, which are 0 at padding. Rows of padding are copies, of
          ``sample_id`` -1.

        Raises:
          ValueError: sizes that do not divide, or another number of rows.
        """
        if len(rows) != self.num_samples:
            raise ValueError(
                f"There are {self.num_samples} row_lengths, but {len(rows)} rows."
            )
        for count, _ in self.shapes:
            if count % process_count:
                raise ValueError(
                    f"Batches of {count} rows do not divide by {process_count=}; give "
                    f"a row_multiple that does."
                )
            _batches._slots(count, process_index, process_count)
        batch = _token_batches.Batch(
            self, rows, process_index, process_count, transform, field
        )
        return grain.MapDataset.range(_batches._ENDLESS).map(batch)


def _checked_lengths(row_lengths: Any) -> np.ndarray:
    lengths = np.asarray(row_lengths)
    if lengths.ndim != 1 or not len(lengths) or lengths.dtype.kind not in "iu":
        raise ValueError(
            f"row_lengths must be integers [N], at least one; they are "
            f"{lengths.dtype} {list(lengths.shape)}."
        )
    if lengths.min() < 1:
        sample = int(lengths.argmin())
        raise ValueError(
            f"row_lengths must be at least 1; sample {sample} has {lengths[sample]}."
        )
    return lengths


def _used(lengths: np.ndarray, longest: int, too_long: str) -> np.ndarray:
    """Return the samples that are used, or say which are too long."""
    if too_long not in _TOO_LONG:
        raise ValueError(
            f"too_long={too_long!r} must be one of {', '.join(_TOO_LONG)}."
        )
    wrong = np.flatnonzero(lengths > longest)
    if len(wrong) and too_long == "error":
        raise ValueError(
            f"{len(wrong)} of {len(lengths)} samples are longer than the last bucket, "
            f"{longest}; the first: {lengths[wrong[0]]} of sample {wrong[0]}. Add a "
            f"bucket, or say too_long='drop' or 'truncate'."
        )
    if too_long == "drop" and len(wrong) == len(lengths):
        raise ValueError(f"All samples are longer than the last bucket, {longest}.")
    if too_long == "drop":
        return np.flatnonzero(lengths <= longest)
    return np.arange(len(lengths))


def _cut(levels: Iterable[int], rows: Sequence[int]) -> Iterable[int]:
    """Yield where batches start: each takes what fits, in one pass.

    Args:
      levels: the bucket of each sample, in order.
      rows: how many samples a batch of each bucket holds, not rising.
    """
    top, count = 0, rows[0]  # full: the first sample starts a batch
    for place, level in enumerate(levels):
        top, count = max(top, level), count + 1
        if count > rows[top]:
            yield place
            top, count = level, 1
