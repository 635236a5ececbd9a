"""Pacing functions: the difficulty of a curriculum as a function of its clock.

A pacing function rises from ``min_difficulty`` at clock 0 to ``max_difficulty`` at
``total`` along a shape f with f(0) = 0 and f(1) = 1,

    difficulty(t) = min + (max - min) * f(t / total),

rounded down to a multiple of ``difficulty_step``. It has no state, so a run that goes
on at step t has the difficulty of step t.

Numbers of Python and NumPy are computed one by one in float64, and a value that is
within 1e-12 of a multiple of the step counts as that multiple, so a difficulty begins
at the clock at which real numbers say so. JAX arrays are computed in float32, which
differs at a few steps where a difficulty changes.

References:
  Li et al., "DeepSpeed Data Efficiency", https://arxiv.org/abs/2212.03597, 2022
"""

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from dataeff_jax.schedules import _durations

Mode = Literal["strict", "deepspeed", "deepspeed_random_ltd"]
_MODES = ("strict", "deepspeed", "deepspeed_random_ltd")


@dataclasses.dataclass(frozen=True)
class Pacing:
    """A pacing function; made by the ``..._schedule`` functions of this module.

    Call it with a clock: an int or float gives an int, or a float where one of the
    difficulties is a float; an array gives an array of the same shape, int64 or float64
    for NumPy, float32 for JAX.

    Attributes:
      min_difficulty: the smallest value.
      max_difficulty: the largest value.
      total: the clock from which on the value stays, None when that is not known.
      is_monotone: whether the value never falls.

    Example:
      >>> from dataeff_jax import schedules
      >>> pacing = schedules.fixed_linear_schedule(2, max_difficulty=10, total=8)
      >>> pacing(4), pacing.total, pacing.is_monotone
      (6, 8, True)
    """

    value: Callable[[Any, Any], Any]  # (math or jax.numpy, clock) -> difficulty
    min_difficulty: int | float
    max_difficulty: int | float
    total: int | None
    is_monotone: bool = True

    def __call__(self, clock: Any) -> Any:
        """Return the difficulty at a clock, or at each of an array of clocks."""
        if type(clock) is int:  # the common case: a table asks thousands of times
            return self.value(math, clock)
        if isinstance(clock, jax.Array):
            return self.value(jnp, clock.astype(jnp.float32))
        if np.ndim(clock) == 0:
            return self.value(math, _number("clock", clock))
        clocks = np.asarray(clock)
        values = [self.value(math, one) for one in clocks.ravel().tolist()]
        dtype = None if values else np.int64
        return np.array(values, dtype).reshape(clocks.shape)


def _number(name: str, value: Any) -> int | float:
    """Return a Python number, or say what is wrong with it."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name}={value!r} must be a number.")
    value = int(value) if isinstance(value, numbers.Integral) else float(value)
    if not math.isfinite(value):
        raise ValueError(f"{name}={value} must be finite.")
    return value


@dataclasses.dataclass(frozen=True)
class _Range:
    """Checked difficulties, and the rounding to their step."""

    low: int | float
    high: int | float
    step: int | float

    @classmethod
    def checked(cls, low: Any, high: Any, step: Any) -> "_Range":
        low = _number("min_difficulty", low)
        high = _number("max_difficulty", high)
        step = _number("difficulty_step", step)
        if high < low:
            raise ValueError(
                f"max_difficulty={high} must be at least min_difficulty={low}."
            )
        if step <= 0:
            raise ValueError(
                f"difficulty_step={step} must be positive: difficulties are rounded "
                f"down to its multiples; 1 keeps all whole numbers."
            )
        return cls(low, high, step)

    @property
    def exact(self) -> bool:
        return all(isinstance(n, int) for n in (self.low, self.high, self.step))

    def result(self, value: Any) -> int | float:
        return int(value) if self.exact else float(value)

    def rounded(self, module: Any, raw: Any) -> Any:
        """Round down to a multiple of the step, but never out of the range."""
        count = raw / self.step
        if module is jnp:
            return jnp.clip(jnp.floor(count) * self.step, self.low, self.high)
        nearest = round(count)
        if abs(count - nearest) > 1e-12 * max(1, abs(count)):
            nearest = math.floor(count)
        return self.result(min(max(nearest * self.step, self.low), self.high))


def _total(total: Any, run_total: int | None) -> int:
    """Return a length of the ramp in units of the clock, at least 1."""
    is_fraction = isinstance(total, float | np.floating)
    if is_fraction and run_total is None:
        raise ValueError(
            f"total={total!r} is a fraction of the run; pass run_total, the length of "
            f"the run in units of the clock, or give total as an integer."
        )
    length = 0 if run_total is None else run_total
    count = _durations.resolve_duration(total, length)
    if count < 1:
        raise ValueError(
            f"total={total!r} must be at least 1: the clock at which max_difficulty is "
            f"reached. For a constant difficulty set min_difficulty = max_difficulty."
        )
    return count


_Shape = Callable[[Any, Any, int], Any]  # (module, clock, total) -> 0 to 1


def _ramp(
    shape: _Shape, levels: _Range, total: int, is_monotone: bool = True
) -> Pacing:
    """Return the strict pacing function of a shape."""
    low, high = levels.low, levels.high

    def value(module: Any, clock: Any) -> Any:
        if module is jnp:
            raw = low + (high - low) * shape(jnp, jnp.clip(clock, 0, total), total)
            return jnp.where(clock >= total, float(high), levels.rounded(jnp, raw))
        if clock >= total:
            return levels.result(high)
        return levels.rounded(
            math, low + (high - low) * shape(math, max(clock, 0), total)
        )

    return Pacing(value, low, high, total, is_monotone)


def _checked_mode(mode: str) -> None:
    if mode not in _MODES:
        raise ValueError(f"mode={mode!r} must be one of {', '.join(_MODES)}.")


def fixed_root_schedule(
    min_difficulty: int | float,
    *,
    max_difficulty: int | float,
    total: int | float,
    root_degree: int | float = 2,
    difficulty_step: int | float = 1,
    mode: Mode = "strict",
    run_total: int | None = None,
) -> Pacing:
    """Makes a difficulty that rises with a root of the clock: fast first, then slowly.

    ``min + (max - min) * (t / total) ** (1 / root_degree)``, rounded down to a multiple
    of ``difficulty_step``.

    Args:
      min_difficulty: at clock 0.
      max_difficulty: at ``total`` and after it.
      total: length of the ramp: a count in units of the clock, or a fraction of
        ``run_total``.
      root_degree: positive; 1 is linear, 0.5 quadratic.
      difficulty_step: the values are its multiples, or the minimum or the maximum.
      mode: ``"strict"`` never leaves [min, max], never falls and has the maximum from
        ``total`` on. ``"deepspeed"`` is what DeepSpeed 0.19.8 computes for a
        curriculum, where a maximum that is no multiple comes late, and the first value
        is rounded up. ``"deepspeed_random_ltd"`` is what it computes for the kept
        tokens of random-LTD, where the first value may fall below the minimum.
      run_total: length of the run, needed when ``total`` is a fraction.

    Returns:
      ``clock -> difficulty``; see :class:`Pacing`.

    Raises:
      ValueError: if an argument is out of range.

    Example:
      >>> pacing = fixed_root_schedule(1, max_difficulty=100, total=110_000)
      >>> [pacing(t) for t in (1, 12, 45, 102, 110_000)]
      [1, 2, 3, 4, 100]
    """
    _checked_mode(mode)
    levels = _Range.checked(min_difficulty, max_difficulty, difficulty_step)
    total = _total(total, run_total)
    degree = _number("root_degree", root_degree)
    if degree <= 0:
        raise ValueError(f"root_degree={degree} must be positive; 1 is linear.")
    if mode == "strict":
        return _ramp(_power(degree), levels, total)
    return _deepspeed(degree, levels, total, mode)


def _power(degree: float) -> _Shape:
    return lambda module, clock, total: module.pow(clock / total, 1.0 / degree)


def _deepspeed(degree: float, levels: _Range, total: int, mode: Mode) -> Pacing:
    """Return the original's function: floor first, then down to a multiple."""
    low, high, step = levels.low, levels.high, levels.step
    first = math.ceil(low / step) * step if mode == "deepspeed" else -math.inf
    shape = _power(degree)

    def value(module: Any, clock: Any) -> Any:
        if module is math and clock < 0 and degree != 1:
            raise ValueError(f"clock={clock} must be at least 0 for a root.")
        raw = module.floor(shape(module, clock, total) * (high - low) + low)
        rounded = raw - raw % step
        if module is jnp:
            return jnp.minimum(jnp.maximum(rounded, first), high)
        return min(max(rounded, first), high)

    # A maximum that is no multiple is reached by the next one, after the total.
    late = -(-high // step) * step - low
    last = total if high == low else math.ceil(total * late / (high - low)) + 1
    return Pacing(value, low, high, max(last, total))


def fixed_linear_schedule(
    min_difficulty: int | float,
    *,
    max_difficulty: int | float,
    total: int | float,
    difficulty_step: int | float = 1,
    mode: Mode = "strict",
    run_total: int | None = None,
) -> Pacing:
    """Makes a difficulty that rises in proportion to the clock.

    ``min + (max - min) * t / total``, rounded down to a multiple of
    ``difficulty_step``: :func:`fixed_root_schedule` with degree 1.

    Args:
      min_difficulty: at clock 0.
      max_difficulty: at ``total`` and after it.
      total: length of the ramp, a count or a fraction of ``run_total``.
      difficulty_step: the values are its multiples, or the minimum or the maximum.
      mode: as for :func:`fixed_root_schedule`.
      run_total: length of the run, needed when ``total`` is a fraction.

    Returns:
      ``clock -> difficulty``; see :class:`Pacing`.

    Raises:
      ValueError: if an argument is out of range.

    Example:
      >>> pacing = fixed_linear_schedule(
      ...     2, max_difficulty=10, total=8, difficulty_step=2)
      >>> [pacing(t) for t in range(1, 10)]
      [2, 4, 4, 6, 6, 8, 8, 10, 10]
    """
    return fixed_root_schedule(
        min_difficulty,
        max_difficulty=max_difficulty,
        total=total,
        root_degree=1,
        difficulty_step=difficulty_step,
        mode=mode,
        run_total=run_total,
    )


def fixed_discrete_schedule(
    difficulties: Any, *, boundaries: Any, run_total: int | None = None
) -> Pacing:
    """Makes a difficulty that is told step by step.

    ``difficulties[i]`` for the first i with ``t <= boundaries[i]``, and the last one
    after the last boundary.

    Args:
      difficulties: one more than boundaries. They may fall again.
      boundaries: the last clock of each difficulty, rising; counts, or fractions of
        ``run_total``.
      run_total: length of the run, needed when boundaries are fractions.

    Returns:
      ``clock -> difficulty``; see :class:`Pacing`.

    Raises:
      ValueError: if the numbers do not fit, or the boundaries do not rise.

    Example:
      >>> pacing = fixed_discrete_schedule([64, 128, 512], boundaries=[100, 1000])
      >>> [pacing(t) for t in (0, 100, 101, 1000, 1001)]
      [64, 64, 128, 128, 512]
    """
    values = [_number("difficulty", value) for value in difficulties]
    if any(isinstance(value, float) for value in values):
        values = [float(value) for value in values]
    ends = [_total(end, run_total) for end in boundaries]
    if len(values) != len(ends) + 1:
        raise ValueError(
            f"{len(values)} difficulties need {len(values) - 1} boundaries between "
            f"them; got {len(ends)}."
        )
    if ends != sorted(set(ends)):
        raise ValueError(f"boundaries={ends} must rise.")

    def value(module: Any, clock: Any) -> Any:
        if module is jnp:
            ends_of = jnp.array(ends, jnp.float32).reshape((1,) * clock.ndim + (-1,))
            past = (clock[..., None] > ends_of).sum(-1)
            return jnp.array(values, jnp.float32)[past]
        return values[sum(clock > end for end in ends)]

    total = ends[-1] + 1 if ends else 0
    return Pacing(value, min(values), max(values), total, values == sorted(values))
