"""The order of a curriculum as Grain datasets and as a sampler of its loader."""

from collections.abc import Callable
from typing import Any

import grain
import numpy as np

from dataeff_jax.curriculum import _sampler
from dataeff_jax.data import _batches


class _Record:
    """Maps the number of a draw of this process to its record; pickles."""

    def __init__(self, rows: Any, order: _sampler.SampleOrder, slots: range):
        self._rows = rows
        self._order = order
        self._slots = slots
        self._last: tuple[int, Any, dict[str, Any]] = (-1, None, {})

    def __call__(self, number: int) -> dict[str, Any]:
        step, place = divmod(int(number), len(self._slots))
        return self.at(step, self._slots[place])

    def at(self, step: int, slot: int) -> dict[str, Any]:
        samples, told = self._of(step)
        sample = int(samples[slot])
        return {"sample_id": np.int64(sample), **self._rows[sample], **told}

    def _of(self, step: int) -> tuple[Any, dict[str, Any]]:
        """Return a step's samples and what its records are told, found once a step."""
        last, samples, told = self._last  # read and set whole: threads share it
        if last != step:
            samples = self._order[step]
            difficulties = self._order.difficulties(step).items()
            told = {
                "step": np.int64(step),
                **{f"difficulty_{name}": np.asarray(d)[()] for name, d in difficulties},
            }
            self._last = step, samples, told
        return samples, told


class _Batch:
    """Maps a step to the local part of its batch; pickles."""

    def __init__(
        self,
        record: _Record,
        slots: range,
        batch_size: int,
        transform: Callable[[dict, int], dict] | None,
    ):
        self._record = record
        self._slots = slots
        self._batch_size = batch_size
        self._transform = transform

    def __call__(self, step: int) -> dict[str, np.ndarray]:
        return _batches.stack([self._one(int(step), slot) for slot in self._slots])

    def _one(self, step: int, slot: int) -> dict[str, Any]:
        record = self._record.at(step, slot)
        if self._transform is None:
            return record
        return self._transform(record, step * self._batch_size + slot)


def _check_rows(rows: Any, order: _sampler.SampleOrder) -> None:
    if len(rows) != order.num_samples:
        raise ValueError(
            f"The index is of {order.num_samples} samples, but there are {len(rows)} "
            f"rows; analyze these rows, or give those that were analyzed."
        )


def dataset(
    rows: Any,
    order: _sampler.SampleOrder,
    *,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.MapDataset:
    """Return the endless records of a curriculum, one after another.

    The element i is draw i of this process, so ``.batch(B / P)`` gives the batches of
    the steps, and composes with ``map`` and ``mp_prefetch`` as any dataset does:
    everything is a function of i.

    Args:
      rows: anything with ``__len__`` and ``__getitem__(i) -> dict of arrays``, the data
        set that was analyzed.
      order: which samples a step has.
      process_index: which slice of each batch this process gets.
      process_count: number of processes, P; it divides the batch size.

    Returns:
      A dataset of the rows' records with ``sample_id``, ``step`` and the schedules'
      difficulties at that step, ``difficulty_METRIC``.

    Raises:
      ValueError: sizes that do not divide, or rows that are not those of the index.

    Example:
      >>> import tempfile
      >>> from dataeff_jax import curriculum, schedules
      >>> rows = [{"tokens": np.zeros(3, int)}, {"tokens": np.ones(3, int)}]
      >>> metric = curriculum.function_metric(
      ...     lambda record: record["tokens"][0], name="first", dtype="int64")
      >>> index = curriculum.analyze(rows, [metric], tempfile.mkdtemp())
      >>> pacing = schedules.fixed_linear_schedule(0, max_difficulty=1, total=9)
      >>> criteria = {"first": curriculum.Criterion(pacing, "value")}
      >>> order = curriculum.SampleOrder(index, criteria, batch_size=2, seed=0)
      >>> batch = curriculum.dataset(rows, order).batch(2)[3]
      >>> batch["tokens"].tolist(), batch["step"].tolist()
      ([[0, 0, 0], [0, 0, 0]], [3, 3])
    """
    _check_rows(rows, order)
    slots = _batches._slots(order.batch_size, process_index, process_count)
    endless = _batches._ENDLESS // len(slots) * len(slots)
    return grain.MapDataset.range(endless).map(_Record(rows, order, slots))


def batches(
    rows: Any,
    order: _sampler.SampleOrder,
    *,
    process_index: int = 0,
    process_count: int = 1,
    transform: Callable[[dict, int], dict] | None = None,
) -> grain.MapDataset:
    """Return the endless batches of a curriculum, by step; for ``data.prefetch``.

    Args:
      rows: as for :func:`dataset`.
      order: which samples a step has.
      process_index: which slice of each batch this process gets.
      process_count: number of processes, P; it divides the batch size.
      transform: applied to each record as ``transform(record, draw)`` with the number
        of the draw among all processes' draws; see ``data.mask_tokens``.

    Returns:
      A dataset whose element t is the local part of the batch of step t, arrays
      [B / P, ...], with the fields of :func:`dataset`.

    Raises:
      ValueError: sizes that do not divide, or rows that are not those of the index.

    Example:
      >>> import tempfile
      >>> from dataeff_jax import curriculum, data, schedules
      >>> rows = data.MemorySource({"tokens": np.arange(8).reshape(4, 2)})
      >>> metric = curriculum.sequence_length()
      >>> index = curriculum.analyze(
      ...     rows, [metric], tempfile.mkdtemp(), source_fingerprint="four rows")
      >>> pacing = schedules.fixed_linear_schedule(50, max_difficulty=100, total=4)
      >>> criteria = {"sequence_length": curriculum.Criterion(pacing)}
      >>> order = curriculum.SampleOrder(
      ...     index, criteria, batch_size=4, seed=0, step_offset=0)
      >>> steps = curriculum.batches(rows, order)
      >>> sorted(steps[0]["sample_id"].tolist()), steps[0]["tokens"].shape
      ([0, 0, 1, 1], (4, 2))
    """
    _check_rows(rows, order)
    slots = _batches._slots(order.batch_size, process_index, process_count)
    record = _Record(rows, order, slots)
    batch = _Batch(record, slots, order.batch_size, transform)
    return grain.MapDataset.range(_batches._ENDLESS).map(batch)


class Sampler:
    """The order of a curriculum for ``grain.DataLoader``.

    The loader batches in each of its workers; so that a batch is the batch of a step,
    the sampler gives every worker whole steps and has to know their number. To go on
    at a step, with any number of workers or shards, make a new one with
    ``first_step``.

    Args:
      order: which samples a step has.
      num_workers: the loader's ``worker_count``.
      shard_count: the ``shard_count`` of the loader's ``ShardOptions``; it divides the
        batch size. Batch with ``grain.transforms.Batch(batch_size // shard_count)``.
      first_step: the step to start at.
      num_steps: steps to give, a multiple of the workers; None never ends.

    Raises:
      ValueError: sizes that do not divide, or negative numbers.

    Example:
      >>> import grain, tempfile
      >>> from dataeff_jax import curriculum, schedules
      >>> rows = [np.arange(n) for n in (3, 1, 4, 2)]
      >>> metric = curriculum.sequence_length()
      >>> index = curriculum.analyze(rows, [metric], tempfile.mkdtemp())
      >>> pacing = schedules.fixed_linear_schedule(2, max_difficulty=4, total=4)
      >>> criteria = {metric.name: curriculum.Criterion(pacing, "value")}
      >>> order = curriculum.SampleOrder(index, criteria, batch_size=2, seed=0)
      >>> loader = grain.DataLoader(
      ...     data_source=list(range(4)), sampler=curriculum.Sampler(order),
      ...     shard_options=grain.sharding.NoSharding(),
      ...     operations=[grain.transforms.Batch(2)])
      >>> sorted(next(iter(loader)).tolist())
      [1, 3]
    """

    def __init__(
        self,
        order: _sampler.SampleOrder,
        *,
        num_workers: int = 0,
        shard_count: int = 1,
        first_step: int = 0,
        num_steps: int | None = None,
    ):
        if min(num_workers, first_step, num_steps or 0) < 0:
            raise ValueError(
                f"{num_workers=}, {first_step=} and {num_steps=} must not be negative."
            )
        self._local = len(_batches._slots(order.batch_size, 0, shard_count))
        self._order = order
        self._workers = max(1, num_workers)
        self._shards = shard_count
        self._first_step = first_step
        if (num_steps or 0) % self._workers:
            raise ValueError(
                f"num_steps={num_steps} must be a multiple of {num_workers=}: every "
                f"worker gives whole steps, in turn."
            )
        endless = _batches._ENDLESS // (order.batch_size * self._workers)
        self._num_steps = endless * self._workers if num_steps is None else num_steps

    def __len__(self) -> int:
        return self._num_steps * self._order.batch_size

    def __getitem__(self, index: int) -> grain.RecordMetadata:
        """Return the sample and the random generator of a position."""
        if not 0 <= index < len(self):
            raise IndexError(f"index={index} is outside {len(self)}.")
        number, shard = divmod(index, self._shards)
        step, place = self._step_and_place(number)
        slot = shard * self._local + place
        step += self._first_step
        random = np.random.Philox(
            np.random.SeedSequence([self._order.seed, step, slot])
        )
        return grain.RecordMetadata(
            index=index,
            record_key=int(self._order[step][slot]),
            rng=np.random.Generator(random),
        )

    def _step_and_place(self, number: int) -> tuple[int, int]:
        """Return the step and the place in its batch of a shard's position.

        Worker w reads the positions w, w + W, ...: they are the steps w, w + W, ...
        """
        turn, worker = divmod(number, self._workers)
        step, place = divmod(turn, self._local)
        return step * self._workers + worker, place

    def __repr__(self) -> str:
        return (
            f"Sampler({self._order!r}, num_workers={self._workers}, "
            f"shard_count={self._shards}, first_step={self._first_step}, "
            f"num_steps={self._num_steps})"
        )
