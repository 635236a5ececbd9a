"""Snaps a schedule's values down to a bounded set, so that few shapes compile."""

import bisect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dataeff_jax import typing


def length_buckets(
    min_length: int, *, max_length: int, multiple: int, max_count: int | None = None
) -> tuple[int, ...]:
    """Returns lengths from the minimum to the maximum, a bounded number of them.

    The minimum, the multiples of ``multiple`` above it, and the maximum. Where these
    are more than ``max_count``, they are thinned out evenly.

    Args:
      min_length: the shortest, at least 1.
      max_length: the longest.
      multiple: what the lengths between are multiples of; 128 suits TPUs, 64 GPUs.
      max_count: how many at most, at least 2; None sets no bound.

    Returns:
      The lengths, rising.

    Raises:
      ValueError: if an argument is out of range.

    Example:
      >>> length_buckets(80, max_length=500, multiple=128)
      (80, 128, 256, 384, 500)
      >>> length_buckets(80, max_length=500, multiple=128, max_count=3)
      (80, 256, 500)
    """
    if not 1 <= min_length <= max_length:
        raise ValueError(
            f"min_length={min_length} must lie between 1 and max_length={max_length}."
        )
    if multiple < 1:
        raise ValueError(f"multiple={multiple} must be at least 1.")
    if max_count is not None and max_count < 2:
        raise ValueError(
            f"max_count={max_count} must be at least 2: the minimum and the maximum."
        )
    first = (min_length // multiple + 1) * multiple
    lengths = sorted({min_length, *range(first, max_length, multiple), max_length})
    if max_count is not None and len(lengths) > max_count:
        last = len(lengths) - 1
        places = (i * last // (max_count - 1) for i in range(max_count))
        lengths = [lengths[place] for place in places]
    return tuple(lengths)


def bucketed_schedule(schedule: typing.Schedule, *, buckets: Any) -> typing.Schedule:
    """Makes a schedule whose values are rounded down to a bucket.

    Values below the first bucket become the first.

    Args:
      schedule: ``clock -> value``.
      buckets: the values that may come out, rising.

    Returns:
      ``clock -> bucket``: a number for numbers, an array for arrays.

    Raises:
      ValueError: if there is no bucket, or they do not rise.

    Example:
      >>> from dataeff_jax import schedules
      >>> ideal = schedules.fixed_linear_schedule(80, max_difficulty=500, total=100)
      >>> lengths = bucketed_schedule(ideal, buckets=(80, 128, 256, 384, 500))
      >>> [(ideal(t), lengths(t)) for t in (0, 50, 99, 100)]
      [(80, 80), (290, 256), (495, 384), (500, 500)]
    """
    values = [value.item() if hasattr(value, "item") else value for value in buckets]
    if not values or values != sorted(set(values)):
        raise ValueError(f"buckets={tuple(values)} must rise, at least one of them.")

    def bucketed(clock: Any) -> Any:
        value = schedule(clock)
        if isinstance(value, jax.Array):
            table = jnp.array(values)
            place = jnp.searchsorted(table, value, side="right") - 1
            return table[jnp.maximum(place, 0)]
        if np.ndim(value):
            place = np.searchsorted(values, value, side="right") - 1
            return np.array(values)[np.maximum(place, 0)]
        return values[max(bisect.bisect_right(values, value) - 1, 0)]

    return bucketed
