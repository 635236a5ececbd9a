"""The weights of a mixture as a table of the steps at which they change."""

import math
import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np

from dataeff_jax.curriculum import _eligibility

# More would make the tables large for nothing.
_MAX_SEGMENTS = 2**20


def table(
    weights: Mapping[str, Any],
    names: tuple[str, ...],
    step_offset: int,
    num_steps: int | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps at which weights change, int64[J], and the weights, [J, K].

    Args:
      weights: by name, numbers or schedules.
      names: the columns.
      step_offset: step t has the weights of the schedules at t + step_offset.
      num_steps: changes after this step are not seen; None takes the schedules' totals.

    Raises:
      ValueError: a weight that is no finite number from 0 on, all of them 0 at a step,
        a schedule whose end is not known, or too many changes.
    """
    columns = []
    for name in names:
        columns.append(_column(name, weights[name], step_offset, num_steps))
    starts = sorted({step for column in columns for step, _ in column})
    if len(starts) > _MAX_SEGMENTS:
        raise ValueError(
            f"The weights change at {len(starts)} steps, more than {_MAX_SEGMENTS}; "
            f"use a larger difficulty_step."
        )
    result = np.empty((len(starts), len(names)))
    for number, column in enumerate(columns):
        steps, values = zip(*column, strict=True)
        places = np.searchsorted(steps, starts, side="right") - 1
        result[:, number] = np.array(values, np.float64)[places]
    nothing = np.flatnonzero(~result.any(axis=1))
    if len(nothing):
        raise ValueError(
            f"All weights are 0 at step {starts[nothing[0]]}; at least one corpus must "
            f"have a positive weight at every step."
        )
    return np.array(starts, np.int64), result


def _column(
    name: str, weight: Any, step_offset: int, num_steps: int | None
) -> list[tuple[int, float]]:
    """Return the steps at which one weight changes, with the weights."""
    if not callable(weight):
        return [(0, _checked(name, weight, 0))]
    ends = (getattr(weight, "total", None), num_steps)
    known = [end for end in ends if end is not None]
    if not known:
        raise ValueError(
            f"The weight of {name!r} does not tell its end: pass num_steps, the step "
            f"from which on it is constant, or a schedule with a total."
        )
    last = max(0, min(known) - min(step_offset, 0))
    points = _eligibility._change_points(weight, step_offset, last)
    return [(step, _checked(name, value, step)) for step, value in points]


def _checked(name: str, weight: Any, step: int) -> float:
    """Return a weight, or say what is wrong with it."""
    is_number = isinstance(weight, numbers.Real) and not isinstance(weight, bool)
    if not is_number or not math.isfinite(weight) or weight < 0:
        raise ValueError(
            f"The weight of {name!r} is {weight!r} at step {step}; it must be a finite "
            f"number, not negative."
        )
    return float(weight)
