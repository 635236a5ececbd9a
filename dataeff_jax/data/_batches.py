"""Batches by step number: pure functions of (rows, seed, step), whatever the layout.

The rows of one epoch after another form one endless sequence of samples; the batch of
step t holds samples ``first_sample + t B`` to ``first_sample + (t + 1) B - 1``. Process
h of P takes the slots ``h B / P`` to ``(h + 1) B / P - 1`` of each batch. Nothing else
decides, so one integer resumes a run, on any number of processes.
"""

import collections.abc
import functools
import sys
from typing import Any

import grain
import numpy as np

from dataeff_jax.data import _splits

# Grain numbers the elements of an endless dataset up to this.
_ENDLESS = 2**62


def _slots(batch_size: int, process_index: int, process_count: int) -> range:
    """Return this process's slots of the global batch, or say why there are none."""
    if batch_size < 1 or process_count < 1:
        raise ValueError(f"{batch_size=} and {process_count=} must be at least 1.")
    if not 0 <= process_index < process_count:
        raise ValueError(f"{process_index=} must lie in 0 to {process_count - 1}.")
    local, rest = divmod(batch_size, process_count)
    if rest:
        below, above = batch_size - rest, batch_size - rest + process_count
        near = above if below == 0 else f"{below} or {above}"
        raise ValueError(
            f"batch_size={batch_size} does not divide by process_count="
            f"{process_count}; the nearest that do: {near}."
        )
    return range(process_index * local, (process_index + 1) * local)


@functools.lru_cache(maxsize=16)
def epoch_seed(seed: int, epoch: int) -> int:
    """Return the 32-bit seed of an epoch's permutation.

    Hashed, so that epoch 1 of seed 0 is not epoch 0 of seed 1.
    """
    state = np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint32)
    return int(state[0])


class _Batch:
    """Maps a step to its batch; plain fields only, so that it pickles."""

    def __init__(
        self,
        rows: Any,
        batch_size: int,
        slots: range,
        seed: int | None,
        first_sample: int,
        transform: collections.abc.Callable[[dict, int], dict] | None,
    ):
        self._rows = rows
        self._batch_size = batch_size
        self._slots = slots
        self._seed = seed
        self._first_sample = first_sample
        self._transform = transform

    def __call__(self, step: int) -> dict[str, np.ndarray]:
        start = self._first_sample + step * self._batch_size
        if start < 0:
            raise IndexError(
                f"Step {step} would hold sample {start}; with first_sample="
                f"{self._first_sample} and batch_size={self._batch_size} the first "
                f"step is {-(self._first_sample // self._batch_size)}."
            )
        return stack([self._record(start + slot) for slot in self._slots])

    def _record(self, sample: int) -> dict[str, Any]:
        epoch, position = divmod(sample, len(self._rows))
        row = position
        if self._seed is not None:
            seed = epoch_seed(self._seed, epoch)
            row = _splits.permuted(position, len(self._rows), seed)
        record = {"sample_id": np.int64(row), **self._rows[row]}
        return record if self._transform is None else self._transform(record, sample)


def stack(records: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Stack records along a new first axis, [B, ...]; all have the same keys."""
    for record in records:
        if record.keys() != records[0].keys():
            raise ValueError(
                f"Rows of one batch differ in their fields: {sorted(records[0])} and "
                f"{sorted(record)}."
            )
    return {
        name: np.stack([np.asarray(record[name]) for record in records])
        for name in records[0]
    }


def batches(
    rows: Any,
    *,
    batch_size: int,
    seed: int | None,
    process_index: int = 0,
    process_count: int = 1,
    first_sample: int = 0,
    transform: collections.abc.Callable[[dict, int], dict] | None = None,
) -> grain.MapDataset:
    """Return the endless training batches, by step.

    Each epoch has every row once, in an order that depends on (seed, epoch) alone; the
    next epoch goes on in the middle of a batch where the rows do not divide evenly. So
    every process has a batch for every step, and none waits for another at an epoch's
    end. No permutation is held in memory.

    Args:
      rows: anything with ``__len__`` and ``__getitem__(i) -> dict of arrays``.
      batch_size: rows of the global batch, B; divisible by ``process_count``.
      seed: of the order, not negative; None keeps the rows in order.
      process_index: which slice of each batch this process gets.
      process_count: number of processes.
      first_sample: what step 0 starts with. A run that goes on at step t after n
        samples with another batch size passes n - t * batch_size, maybe negative.
      transform: applied to each record as ``transform(record, sample)`` with the
        sample's number in the endless sequence; see ``mask_tokens``.

    Returns:
      A dataset whose element t is the local part of batch t, arrays [B / P, ...], with
      ``sample_id`` int64[B / P] (the row's number).

    Raises:
      ValueError: an empty ``rows``, or sizes that do not divide.

    Example:
      >>> from dataeff_jax import data
      >>> rows = data.MemorySource({"labels": np.arange(6)})
      >>> steps = data.batches(rows, batch_size=4, seed=0)
      >>> sorted(np.concatenate([steps[0]["labels"], steps[1]["labels"][:2]]).tolist())
      [0, 1, 2, 3, 4, 5]
    """
    if not len(rows):
        raise ValueError("There are no rows to make batches of.")
    if seed is not None and seed < 0:
        raise ValueError(f"seed={seed} must not be negative.")
    slots = _slots(batch_size, process_index, process_count)
    batch = _Batch(rows, batch_size, slots, seed, first_sample, transform)
    return grain.MapDataset.range(_ENDLESS).map(batch)


class _EvaluationBatch:
    """Maps a batch number to rows in order, filled up with rows of weight 0."""

    def __init__(
        self,
        rows: Any,
        num_rows: int,
        batch_size: int,
        slots: range,
        transform: Any,
    ):
        self._rows = rows
        self._num_rows = num_rows
        self._batch_size = batch_size
        self._slots = slots
        self._transform = transform

    def __call__(self, number: int) -> dict[str, np.ndarray]:
        start = number * self._batch_size
        return stack([self._record(start + slot) for slot in self._slots])

    def _record(self, sample: int) -> dict[str, Any]:
        row = min(sample, self._num_rows - 1)
        record = {"sample_id": np.int64(row), **self._rows[row]}
        if self._transform is not None:
            record = self._transform(record, row)
        weights = record.get("weights")
        if weights is None:
            weights = np.ones(np.shape(_targets(record)), np.float32)
        if sample < self._num_rows:
            return {**record, "weights": weights}
        nothing = {"sample_id": np.int64(-1), "weights": np.zeros_like(weights)}
        return {**record, **nothing}


def _targets(record: dict[str, Any]) -> Any:
    for name in ("targets", "labels"):
        if name in record:
            return record[name]
    raise ValueError(
        f"An evaluation row needs 'targets', 'labels' or 'weights', to know what is "
        f"counted; it has {sorted(record)}."
    )


def evaluation_batches(
    rows: Any,
    *,
    batch_size: int,
    process_index: int = 0,
    process_count: int = 1,
    remainder: str = "pad",
    max_rows: int | None = None,
    transform: collections.abc.Callable[[dict, int], dict] | None = None,
) -> grain.MapDataset:
    """Return every row once, in order, in batches of one shape.

    All processes have the same number of batches. Rows that fill up the last batch are
    copies of the last row with weights 0 and ``sample_id`` -1, so sums over weights do
    not depend on batch size, processes or devices.

    Args:
      rows: as for ``batches``; records have ``targets``, ``labels`` or ``weights``.
      batch_size: rows of the global batch, B; divisible by ``process_count``.
      process_index: which slice of each batch this process gets.
      process_count: number of processes.
      remainder: ``"pad"``, or ``"drop"`` to leave out an incomplete last batch.
      max_rows: only the first so many rows; None means all.
      transform: applied to each record as ``transform(record, row)``.

    Returns:
      A dataset of ceil(rows / B) batches, floor with ``"drop"``; arrays [B / P, ...],
      always with ``weights``.

    Raises:
      ValueError: an empty ``rows``, no complete batch to drop to, or sizes that do not
        divide.

    Example:
      >>> from dataeff_jax import data
      >>> rows = data.MemorySource({"labels": np.arange(5)})
      >>> [b["weights"].tolist() for b in data.evaluation_batches(rows, batch_size=3)]
      [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]
    """
    if remainder not in ("pad", "drop"):
        raise ValueError(f"remainder={remainder!r} must be 'pad' or 'drop'.")
    slots = _slots(batch_size, process_index, process_count)
    num_rows = len(rows) if max_rows is None else min(len(rows), max_rows)
    count = num_rows // batch_size
    if remainder == "pad":
        count = -(-num_rows // batch_size)
    if count < 1:
        raise ValueError(
            f"{num_rows} rows make no batch of {batch_size} with {remainder=}."
        )
    batch = _EvaluationBatch(rows, num_rows, batch_size, slots, transform)
    return grain.MapDataset.range(count).map(batch)


def prefetch(
    dataset: grain.MapDataset,
    *,
    start_step: int = 0,
    num_threads: int = 2,
    buffer_size: int = 4,
    num_workers: int = 0,
) -> grain.DatasetIterator:
    """Iterate from a step on, with the next batches prepared in the background.

    The elements are those of ``dataset[start_step:]``, in order, for every number of
    threads and workers: whole batches are handed to them. Call ``close()`` on the
    iterator when you leave before its end.

    Worker processes start by importing the main script again, so a script that uses
    them needs ``if __name__ == "__main__":`` around its start, as with all of Python's
    multiprocessing on "spawn". ``python -c`` and notebooks work as they are.

    Args:
      dataset: ``batches(...)`` or ``evaluation_batches(...)``.
      start_step: the first element; what a resumed run needs.
      num_threads: threads in each process that reads.
      buffer_size: batches kept ready in each process.
      num_workers: processes; 0 reads in this one, which is enough for packed tokens.

    Returns:
      The iterator.

    Raises:
      ValueError: a negative number.

    Example:
      >>> from dataeff_jax import data
      >>> rows = data.MemorySource({"labels": np.arange(6)})
      >>> steps = data.batches(rows, batch_size=2, seed=None)
      >>> iterator = data.prefetch(steps, start_step=1)
      >>> next(iterator)["labels"].tolist()
      [2, 3]
      >>> iterator.close()
    """
    sizes = (start_step, num_threads, buffer_size, num_workers)
    if min(sizes) < 0:
        raise ValueError(
            f"{start_step=}, {num_threads=}, {buffer_size=} and {num_workers=} must "
            f"not be negative."
        )
    options = grain.ReadOptions(
        num_threads=num_threads, prefetch_buffer_size=buffer_size
    )
    steps = dataset[start_step:].to_iter_dataset(options)
    if num_workers:
        _allow_unparsed_flags()
        steps = steps.mp_prefetch(
            grain.MultiprocessingOptions(
                num_workers=num_workers, per_worker_buffer_size=max(1, buffer_size)
            )
        )
    return iter(steps)


def _allow_unparsed_flags() -> None:
    """Let grain read its own flag in programs that never parse absl flags.

    Marking this one flag as present gives its default, and leaves the parsing of a
    command line, with its errors for unknown flags, as it is.
    """
    flags = sys.modules.get("absl.flags")  # loaded by grain, if it still uses it
    name = "grain_enable_multiprocess_worker_profiling"
    if flags is not None and not flags.FLAGS.is_parsed() and name in flags.FLAGS:
        flags.FLAGS[name].present = True
