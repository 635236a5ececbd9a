"""Which samples may be drawn at a step: a closed form instead of set algebra.

A schedule cuts a run into *stages* of constant difficulty. With several metrics a
sample x may be drawn as soon as all of them admit it, from the stage

    tau(x) = max over metrics m of min { stage k : d_m(k) >= level_m(x) }

on, where the level is the value itself, or its rank. Sorted by tau, the pool of stage k
is a prefix of one array, and what stage k adds to the pool, its *cluster*, is a
contiguous range of it.

References:
  Li et al., "DeepSpeed Data Efficiency", https://arxiv.org/abs/2212.03597, 2022
"""

import bisect
import dataclasses
import fractions
import itertools
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from dataeff_jax import typing

_TYPES = ("value", "percentile", "deepspeed_percentile")

# More stages than this would make the sampler's tables large for nothing.
MAX_STAGES = 4096

_CHUNK = 2**22  # samples handled at once, so that memory stays bounded


@dataclasses.dataclass(frozen=True)
class Criterion:
    """What one metric admits at a clock.

    Args:
      schedule: ``clock -> difficulty``, for example of
        ``schedules.fixed_linear_schedule``; it must not fall.
      difficulty_type: ``"value"`` admits samples with value <= difficulty.
        ``"percentile"`` admits the easiest ``ceil(difficulty / 100 * samples)``, at
        least one; equal values are told apart by their position in the data set.
        ``"deepspeed_percentile"`` admits ``difficulty * (samples // max_difficulty)``,
        and all at ``max_difficulty``, that of the schedule.

    Raises:
      ValueError: an unknown type, or a schedule that does not fit it.

    Example:
      >>> from dataeff_jax import curriculum, schedules
      >>> pacing = schedules.fixed_root_schedule(1, max_difficulty=100, total=1000)
      >>> curriculum.Criterion(pacing).difficulty_type
      'percentile'
    """

    schedule: typing.Schedule
    difficulty_type: Literal["value", "percentile", "deepspeed_percentile"] = (
        "percentile"
    )

    def __post_init__(self):
        if not callable(self.schedule):
            raise ValueError(f"schedule={self.schedule!r} must be callable.")
        if self.difficulty_type not in _TYPES:
            raise ValueError(
                f"difficulty_type={self.difficulty_type!r} must be one of "
                f"{', '.join(_TYPES)}."
            )
        low = getattr(self.schedule, "min_difficulty", 0)
        high = getattr(self.schedule, "max_difficulty", None)
        if self.difficulty_type == "percentile":
            percentile_count(low, 1)
            percentile_count(100 if high is None else high, 1)
        if self.difficulty_type == "deepspeed_percentile" and high is None:
            raise ValueError(
                "difficulty_type='deepspeed_percentile' needs a schedule with a "
                "max_difficulty; use those of dataeff_jax.schedules."
            )

    def count(self, difficulty: Any, values: np.ndarray, order: np.ndarray) -> int:
        """Return how many samples, from the easiest on, a difficulty admits.

        Args:
          difficulty: a value or a percentile.
          values: the metric by sample, [N].
          order: the samples sorted by it, [N].
        """
        num_samples = len(order)
        if self.difficulty_type == "value":
            return bisect.bisect_right(
                range(num_samples), difficulty, key=lambda i: values[order[i]]
            )
        if self.difficulty_type == "percentile":
            return percentile_count(difficulty, num_samples)
        top = getattr(self.schedule, "max_difficulty")  # noqa: B009
        if difficulty >= top:
            return num_samples
        return int(difficulty * (num_samples // top))


def percentile_count(percentile: Any, num_samples: int) -> int:
    """Returns how many of the easiest samples a percentile admits, by nearest rank.

    ``ceil(percentile / 100 * num_samples)``, at least 1, with the decimal number as it
    is written.

    Args:
      percentile: a number from 0 to 100.
      num_samples: at least 1.

    Returns:
      The count.

    Raises:
      ValueError: no number from 0 to 100.

    Example:
      >>> from dataeff_jax import curriculum
      >>> [curriculum.percentile_count(50, n) for n in (1, 2, 3, 5)]
      [1, 1, 2, 3]
    """
    is_number = isinstance(percentile, numbers.Real)
    is_number = is_number and not isinstance(percentile, bool | np.bool_)
    number = float(percentile) if is_number else math.nan
    if not 0 <= number <= 100:
        raise ValueError(
            f"percentile={percentile!r} must be a number from 0 to 100; for units of "
            f"1/max_difficulty use difficulty_type='deepspeed_percentile'."
        )
    exact = fractions.Fraction(str(number))
    return max(1, math.ceil(exact * num_samples / 100))


class Stages(NamedTuple):
    """A run cut into stages of constant difficulty."""

    starts: np.ndarray  # int64[J], the first step of each; starts[0] is 0
    difficulties: dict[str, list[Any]]  # by metric, J values each


def _change_points(
    schedule: typing.Schedule, offset: int, num_steps: int
) -> Iterator[tuple[int, Any]]:
    """Yield the steps of [0, num_steps] at which the difficulty changes, with it."""
    before = schedule(offset)
    yield 0, before
    if getattr(schedule, "is_monotone", False):
        yield from _halved(schedule, offset, (0, before), num_steps)
        return
    for step in range(1, num_steps + 1):
        now = schedule(step + offset)
        if now != before:
            yield step, now
        before = now


def _halved(
    schedule: typing.Schedule, offset: int, first: tuple[int, Any], last: int
) -> Iterator[tuple[int, Any]]:
    """Yield the changes after ``first`` up to ``last``, by halving, in order."""
    todo = [(*first, last, schedule(last + offset))]
    while todo:
        low, below, high, above = todo.pop()
        if below == above:
            continue
        if high == low + 1:
            yield high, above
            continue
        middle = (low + high) // 2
        value = schedule(middle + offset)
        todo.append((middle, value, high, above))
        todo.append((low, below, middle, value))


def last_step(
    name: str, criterion: Criterion, step_offset: int, num_steps: int | None
) -> int:
    """Return the step from which on a metric's difficulty is constant."""
    total = getattr(criterion.schedule, "total", None)
    ends = [end for end in (total, num_steps) if end is not None]
    if not ends:
        raise ValueError(
            f"The schedule of {name!r} does not tell its end: pass num_steps, the step "
            f"from which on it is constant, or a schedule with a total."
        )
    return max(0, min(ends) - min(step_offset, 0))


def make_stages(
    criteria: Mapping[str, Criterion], *, step_offset: int, num_steps: int | None
) -> Stages:
    """Cut a run into stages.

    Args:
      criteria: by metric.
      step_offset: step t has the difficulties of the schedules at t + step_offset.
      num_steps: changes after this step are not seen; None takes the schedules' totals.

    Returns:
      The stages; the last one never ends.

    Raises:
      ValueError: a schedule that falls or whose end is not known, or too many stages.
    """
    changes: dict[str, list[tuple[int, Any]]] = {}
    for name, criterion in criteria.items():
        last = last_step(name, criterion, step_offset, num_steps)
        points = list(_change_points(criterion.schedule, step_offset, last))
        for (_, below), (step, above) in itertools.pairwise(points):
            if not above > below:
                raise ValueError(
                    f"The schedule of {name!r} falls from {below} to {above} at step "
                    f"{step}; samples that were admitted stay, so it must not fall; "
                    f"PhasedOrder.at_falls plans anew there."
                )
        changes[name] = points
    starts = sorted({step for points in changes.values() for step, _ in points})
    if len(starts) > MAX_STAGES:
        raise ValueError(
            f"The schedules change at {len(starts)} steps, more than {MAX_STAGES}; use "
            f"a larger difficulty_step."
        )
    difficulties = {}
    for name, points in changes.items():
        steps, values = zip(*points, strict=True)
        places = np.searchsorted(steps, starts, side="right") - 1
        difficulties[name] = [values[place] for place in places.tolist()]
    return Stages(np.array(starts, np.int64), difficulties)


def admitted_counts(
    criterion: Criterion,
    difficulties: Sequence[Any],
    values: np.ndarray,
    order: np.ndarray,
) -> np.ndarray:
    """Return how many samples each stage admits by one metric, int64[J]."""
    counts, last = [], (None, 0)
    for difficulty in difficulties:
        if difficulty != last[0]:
            last = difficulty, criterion.count(difficulty, values, order)
        counts.append(last[1])
    return np.array(counts, np.int64)


def raise_tau(
    tau: np.ndarray,
    criterion: Criterion,
    difficulties: Sequence[Any],
    values: np.ndarray,
    order: np.ndarray,
) -> None:
    """Raise ``tau`` [N] in place to the stages at which one metric admits the samples.

    Samples that are never admitted get the number of stages, J.
    """
    if criterion.difficulty_type == "value":
        for start in range(0, len(values), _CHUNK):
            part = slice(start, start + _CHUNK)
            stage = np.searchsorted(difficulties, values[part], side="left")
            np.maximum(tau[part], stage.astype(tau.dtype), out=tau[part])
        return
    counts = admitted_counts(criterion, difficulties, values, order)
    for start in range(0, len(order), _CHUNK):
        samples = order[start : start + _CHUNK]
        ranks = np.arange(start, start + len(samples))
        stage = np.searchsorted(counts, ranks, side="right").astype(tau.dtype)
        tau[samples] = np.maximum(tau[samples], stage)
