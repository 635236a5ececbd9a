"""The length of every step's batch, known before the run, and batches cut to it."""

import bisect
from collections.abc import Sequence
from typing import Any, Literal

import grain
import numpy as np

from dataeff_jax import typing
from dataeff_jax.curriculum import _eligibility, _length, _sampler

Mode = Literal["truncate", "reshape", "segment"]
_MODES = {
    "truncate": _length.truncate,
    "reshape": _length.reshape,
    "segment": _length.segment,
}


class _Shorten:
    """Maps a place and a batch to the shorter batch; pickles."""

    def __init__(self, lengths: Any):
        self._lengths = lengths

    def __call__(self, place: int, batch: typing.Batch) -> typing.Batch:
        step = int(batch["step"][0]) if "step" in batch else int(place)
        return self._lengths.shorten(batch, step=step)


def _with_all_fields(batch: typing.Batch, field: str) -> typing.Batch:
    """Add what :func:`segment` adds at some lengths, so that all steps are alike."""
    shape = batch[field].shape[:2]
    added = {
        "segment_ids": np.ones(shape, np.int32),
        "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
        "weights": np.ones(shape, np.float32),
    }
    return {**added, **batch}


def _with_length(batch: typing.Batch, length: int, field: str) -> typing.Batch:
    rows, size = batch[field].shape[:2]
    return {**batch, "length": np.full(rows, min(length, size), np.int64)}


class LengthCurriculum:
    """Sequence lengths that follow a schedule, as a function of the step alone.

    The schedule is read once, when this is built, so the lengths and the shapes that
    will be compiled are known before the run.

    Args:
      schedule: ``clock -> length``, for example ``schedules.fixed_linear_schedule``.
      mode: what becomes of a full row: ``"truncate"`` keeps its beginning,
        ``"reshape"`` splits it into more rows, ``"segment"`` splits it by the attention
        mask; see the functions of these names.
      buckets: lengths that may come out; the schedule's are rounded down to them, and
        those below the first become the first. See ``schedules.length_buckets``. None
        takes the schedule's own.
      step_offset: step t has the length of the schedule at t + step_offset; the
        original counts from 1.
      num_steps: needed for schedules without an end: the step from which on they are
        constant. Later changes are not seen.
      field: of the batch, whose axis 1 tells its length.
      axes: sequence axes of fields where they are not clear; see :func:`truncate`.

    Attributes:
      lengths: the different lengths, in the order in which they first come.

    Raises:
      ValueError: an unknown mode, buckets that do not rise, a schedule whose end is not
        known, or one that gives something else than whole numbers from 1 on.

    Example:
      >>> from dataeff_jax import curriculum, data, schedules
      >>> pacing = schedules.fixed_linear_schedule(2, max_difficulty=8, total=6)
      >>> lengths = curriculum.LengthCurriculum(pacing, buckets=(2, 4, 8))
      >>> lengths.lengths, [lengths.length_at(t) for t in range(6)]
      ((2, 4, 8), [2, 4, 4, 4, 4, 8])
      >>> rows = data.MemorySource({"tokens": np.zeros((4, 8), int)})
      >>> steps = lengths.batches(data.batches(rows, batch_size=2, seed=0))
      >>> steps[1]["tokens"].shape, steps[1]["length"].tolist()
      ((2, 4), [4, 4])
    """

    def __init__(
        self,
        schedule: typing.Schedule,
        *,
        mode: Mode = "truncate",
        buckets: Sequence[int] | None = None,
        step_offset: int = 1,
        num_steps: int | None = None,
        field: str = "tokens",
        axes: _length.Axes | None = None,
    ):
        if mode not in _MODES:
            raise ValueError(f"mode={mode!r} must be one of {', '.join(_MODES)}.")
        points = _points(schedule, step_offset, num_steps)
        if buckets is not None:
            points = _snapped(points, _checked_buckets(buckets))
        self._mode, self._field, self._axes = mode, field, axes
        self._starts = [step for step, _ in points]
        self._values = [length for _, length in points]
        self.lengths = tuple(dict.fromkeys(self._values))

    def length_at(self, step: int) -> int:
        """Return the length of a step."""
        return self._values[max(bisect.bisect_right(self._starts, step) - 1, 0)]

    def batches(self, dataset: grain.MapDataset) -> grain.MapDataset:
        """Return a dataset of batches, each at the length of its step.

        The step is the batch's field ``step``, as ``curriculum.batches`` gives it, or
        its place in the dataset where there is none, as with ``data.batches``.
        """
        return dataset.map_with_index(_Shorten(self))

    def shorten(self, batch: typing.Batch, *, step: int) -> typing.Batch:
        """Return the batch of a step at its length.

        The new field ``length`` int64[rows] is the step's, or that of the batch where
        it is shorter; with ``mode="segment"`` the pieces have it, and batches of all
        steps have ``segment_ids``, ``positions`` and ``weights``.
        """
        length = self.length_at(step)
        change = _MODES[self._mode]
        short = change(batch, length=length, field=self._field, axes=self._axes)
        if self._mode == "segment":
            short = _with_all_fields(short, self._field)
        return _with_length(short, length, self._field)


def _points(
    schedule: typing.Schedule, step_offset: int, num_steps: int | None
) -> list[tuple[int, int]]:
    """Return the steps at which the length changes, with the lengths."""
    total = getattr(schedule, "total", None)
    ends = [end for end in (total, num_steps) if end is not None]
    if not ends:
        raise ValueError(
            "The schedule does not tell its end: pass num_steps, the step from which "
            "on it is constant, or a schedule with a total."
        )
    last = max(0, min(ends) - min(step_offset, 0))
    points = list(_eligibility._change_points(schedule, step_offset, last))
    for step, length in points:
        if length != int(length) or length < 1:
            raise ValueError(
                f"The schedule gives {length} at step {step}; a length must be a whole "
                f"number, at least 1."
            )
    return [(step, int(length)) for step, length in points]


def _checked_buckets(buckets: Sequence[int]) -> np.ndarray:
    found = np.asarray(buckets)
    if not found.size or found.dtype.kind not in "iu" or found.min() < 1:
        raise ValueError(f"buckets={tuple(buckets)} must be integers from 1 on.")
    if (np.diff(found) <= 0).any():
        raise ValueError(f"buckets={tuple(buckets)} must rise.")
    return found


def _snapped(points: list[tuple[int, int]], buckets: np.ndarray) -> list:
    """Round lengths down to buckets, and leave out changes that are none any more."""
    result: list[tuple[int, int]] = []
    for step, length in points:
        place = max(int(np.searchsorted(buckets, length, side="right")) - 1, 0)
        snapped = int(buckets[place])
        if not result or result[-1][1] != snapped:
            result.append((step, snapped))
    return result


class Trimming:
    """Batches cut to their longest row, rounded up to a bucket: only padding goes.

    For rows that hold one text each and are filled up, such as ``DocumentRows``, in an
    order by their length: a step's rows are about equally long, so little padding is
    computed. The longest row is that of the global batch, so all processes cut alike.

    Args:
      order: which samples a step has.
      row_lengths: real tokens of each sample, [N], for example
        ``index.values("sequence_length")``.
      buckets: the lengths that may come out, rising; the last one holds every row.
      field: of the batch, whose axis 1 tells its length.
      axes: sequence axes of fields where they are not clear; see :func:`truncate`.

    Attributes:
      lengths: the buckets.

    Raises:
      ValueError: lengths of another number of samples, buckets that do not rise, or a
        row that is longer than the last bucket.

    Example:
      >>> import tempfile
      >>> from dataeff_jax import curriculum, data, schedules
      >>> documents = data.TokenDocuments([[1], [2] * 5, [3] * 3], end_of_text=0)
      >>> rows = curriculum.DocumentRows(documents, length=8)
      >>> metric = curriculum.sequence_length(mask_field="segment_ids")
      >>> index = curriculum.analyze(rows, [metric], tempfile.mkdtemp())
      >>> pacing = schedules.fixed_linear_schedule(1, max_difficulty=8, total=4)
      >>> criteria = {"sequence_length": curriculum.Criterion(pacing, "value")}
      >>> order = curriculum.SampleOrder(index, criteria, batch_size=2, seed=0)
      >>> values = index.values("sequence_length")
      >>> trimming = curriculum.Trimming(order, values, buckets=(2, 4, 8))
      >>> steps = trimming.batches(curriculum.batches(rows, order))
      >>> steps[0]["tokens"].tolist(), steps[0]["sample_id"].tolist()
      ([[0, 1], [0, 1]], [0, 0])
    """

    def __init__(
        self,
        order: _sampler.SampleOrder,
        row_lengths: Any,
        *,
        buckets: Sequence[int],
        field: str = "tokens",
        axes: _length.Axes | None = None,
    ):
        if len(row_lengths) != order.num_samples:
            raise ValueError(
                f"There are {len(row_lengths)} row_lengths for {order.num_samples} "
                f"samples."
            )
        self._buckets = _checked_buckets(buckets)
        if (longest := int(np.max(row_lengths))) > self._buckets[-1]:
            raise ValueError(
                f"The longest row has {longest} tokens, more than the last of buckets="
                f"{tuple(buckets)}; add a bucket that holds it."
            )
        self._order, self._row_lengths = order, row_lengths
        self._field, self._axes = field, axes
        self.lengths = tuple(self._buckets.tolist())

    def length_at(self, step: int) -> int:
        """Return the length of a step: the bucket that holds its longest row."""
        longest = self._row_lengths[self._order[step]].max()
        return int(self._buckets[np.searchsorted(self._buckets, longest)])

    def batches(self, dataset: grain.MapDataset) -> grain.MapDataset:
        """Return a dataset of batches, each at the length of its step.

        The step is the batch's field ``step``, as ``curriculum.batches`` gives it, or
        its place in the dataset where there is none, as with ``data.batches``.
        """
        return dataset.map_with_index(_Shorten(self))

    def shorten(self, batch: typing.Batch, *, step: int) -> typing.Batch:
        """Return the batch of a step at its length.

        The new field ``length`` int64[rows] is that of the rows.
        """
        length = self.length_at(step)
        short = _length.truncate(
            batch, length=length, field=self._field, axes=self._axes
        )
        return _with_length(short, length, self._field)
