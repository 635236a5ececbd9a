"""Further shapes of pacing functions, and functions of the user."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from dataeff_jax.schedules import _pacing


def _shape_schedule(
    shape: _pacing._Shape,
    low: int | float,
    high: int | float,
    total: int | float,
    step: int | float,
    run_total: int | None,
    is_monotone: bool = True,
) -> _pacing.Pacing:
    levels = _pacing._Range.checked(low, high, step)
    length = _pacing._total(total, run_total)
    return _pacing._ramp(shape, levels, length, is_monotone=is_monotone)


def sine_schedule(
    min_difficulty: int | float,
    *,
    max_difficulty: int | float,
    total: int | float,
    difficulty_step: int | float = 1,
    run_total: int | None = None,
) -> _pacing.Pacing:
    """Makes a difficulty that rises along a quarter of a sine: fast, then slowly.

    ``min + (max - min) * sin(pi / 2 * t / total)``, rounded down to the step.

    Args:
      min_difficulty: at clock 0.
      max_difficulty: at ``total`` and after it.
      total: length of the ramp, a count or a fraction of ``run_total``.
      difficulty_step: the values are its multiples, or the minimum or the maximum.
      run_total: length of the run, needed when ``total`` is a fraction.

    Returns:
      ``clock -> difficulty``; see :class:`Pacing`.

    Raises:
      ValueError: if an argument is out of range.

    Example:
      >>> pacing = sine_schedule(0, max_difficulty=100, total=90)
      >>> [pacing(t) for t in (0, 29, 31, 90)]
      [0, 48, 51, 100]

    References:
      Zhu et al., "SkyLadder: Better and Faster Pretraining via Context Window
      Scheduling", https://arxiv.org/abs/2503.15450, 2025
    """
    return _shape_schedule(
        lambda module, t, total: module.sin(math.pi / 2 * t / total),
        *(min_difficulty, max_difficulty, total, difficulty_step, run_total),
    )


def cosine_schedule(
    min_difficulty: int | float,
    *,
    max_difficulty: int | float,
    total: int | float,
    difficulty_step: int | float = 1,
    run_total: int | None = None,
) -> _pacing.Pacing:
    """Makes a difficulty that rises along a quarter of a cosine: slowly, then fast.

    ``min + (max - min) * (1 - cos(pi / 2 * t / total))``, rounded down to the step.

    Args:
      min_difficulty: at clock 0.
      max_difficulty: at ``total`` and after it.
      total: length of the ramp, a count or a fraction of ``run_total``.
      difficulty_step: the values are its multiples, or the minimum or the maximum.
      run_total: length of the run, needed when ``total`` is a fraction.

    Returns:
      ``clock -> difficulty``; see :class:`Pacing`.

    Raises:
      ValueError: if an argument is out of range.

    Example:
      >>> pacing = cosine_schedule(0, max_difficulty=100, total=90)
      >>> [pacing(t) for t in (0, 29, 61, 90)]
      [0, 12, 51, 100]

    References:
      Zhu et al., "SkyLadder", https://arxiv.org/abs/2503.15450, 2025
    """
    return _shape_schedule(
        lambda module, t, total: 1 - module.cos(math.pi / 2 * t / total),
        *(min_difficulty, max_difficulty, total, difficulty_step, run_total),
    )


def exponential_schedule(
    min_difficulty: int | float,
    *,
    max_difficulty: int | float,
    total: int | float,
    difficulty_step: int | float = 1,
    run_total: int | None = None,
) -> _pacing.Pacing:
    """Makes a difficulty that grows by the same factor in equal times.

    ``min * (max / min) ** (t / total)``, rounded down to the step.

    Args:
      min_difficulty: at clock 0, positive.
      max_difficulty: at ``total`` and after it.
      total: length of the ramp, a count or a fraction of ``run_total``.
      difficulty_step: the values are its multiples, or the minimum or the maximum.
      run_total: length of the run, needed when ``total`` is a fraction.

    Returns:
      ``clock -> difficulty``; see :class:`Pacing`.

    Raises:
      ValueError: if an argument is out of range.

    Example:
      >>> pacing = exponential_schedule(8, max_difficulty=512, total=60)
      >>> [pacing(t) for t in (0, 31, 41, 60)]
      [8, 68, 137, 512]

    References:
      Zhu et al., "SkyLadder", https://arxiv.org/abs/2503.15450, 2025
    """
    if not min_difficulty > 0:
        raise ValueError(
            f"min_difficulty={min_difficulty} must be positive for a growth by factors."
        )
    ratio = max_difficulty / min_difficulty

    def shape(module: Any, clock: Any, length: int) -> Any:
        return (module.pow(ratio, clock / length) - 1) / max(ratio - 1, 1e-300)

    return _shape_schedule(
        shape, min_difficulty, max_difficulty, total, difficulty_step, run_total
    )


def logarithmic_schedule(
    min_difficulty: int | float,
    *,
    max_difficulty: int | float,
    total: int | float,
    difficulty_step: int | float = 1,
    run_total: int | None = None,
) -> _pacing.Pacing:
    """Makes a difficulty that rises along a logarithm: fast, then slowly.

    ``min + (max - min) * ln(1 + (e - 1) * t / total)``, rounded down to the step.

    Args:
      min_difficulty: at clock 0.
      max_difficulty: at ``total`` and after it.
      total: length of the ramp, a count or a fraction of ``run_total``.
      difficulty_step: the values are its multiples, or the minimum or the maximum.
      run_total: length of the run, needed when ``total`` is a fraction.

    Returns:
      ``clock -> difficulty``; see :class:`Pacing`.

    Raises:
      ValueError: if an argument is out of range.

    Example:
      >>> pacing = logarithmic_schedule(0, max_difficulty=100, total=90)
      >>> [pacing(t) for t in (0, 30, 60, 90)]
      [0, 45, 76, 100]
    """
    return _shape_schedule(
        lambda module, t, total: module.log(1 + (math.e - 1) * t / total),
        *(min_difficulty, max_difficulty, total, difficulty_step, run_total),
    )


def stepwise_schedule(
    min_difficulty: int | float,
    *,
    max_difficulty: int | float,
    total: int | float,
    num_stages: int,
    difficulty_step: int | float = 1,
    run_total: int | None = None,
) -> _pacing.Pacing:
    """Makes a difficulty that rises in equal stairs of equal length.

    ``min + (max - min) * floor(n * t / total) / n``, with n stairs below the maximum;
    with tokens as the clock, the batch or length ramp of large-model recipes.

    Args:
      min_difficulty: on the first stair.
      max_difficulty: from ``total`` on.
      total: length of the ramp, a count or a fraction of ``run_total``.
      num_stages: stairs before the maximum, n, at least 1.
      difficulty_step: the values are its multiples, or the minimum or the maximum.
      run_total: length of the run, needed when ``total`` is a fraction.

    Returns:
      ``clock -> difficulty``; see :class:`Pacing`.

    Raises:
      ValueError: if an argument is out of range.

    Example:
      >>> pacing = stepwise_schedule(64, max_difficulty=256, total=300, num_stages=3)
      >>> [pacing(t) for t in (0, 99, 100, 200, 300)]
      [64, 64, 128, 192, 256]
    """
    stages = _count("num_stages", num_stages)
    return _shape_schedule(
        lambda module, t, length: module.floor(t * stages / length) / stages,
        *(min_difficulty, max_difficulty, total, difficulty_step, run_total),
    )


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name}={value!r} must be an integer, at least 1.")
    return int(value)


def cyclic_schedule(
    min_difficulty: int | float,
    *,
    max_difficulty: int | float,
    total: int | float,
    num_cycles: int,
    difficulty_step: int | float = 1,
    run_total: int | None = None,
) -> _pacing.Pacing:
    """Makes a difficulty that rises in proportion to the clock, again and again.

    ``min + (max - min) * frac(n * t / total)`` for n cycles, rounded down to the step;
    the maximum from ``total`` on. It falls at the end of each cycle.

    Args:
      min_difficulty: at the start of each cycle.
      max_difficulty: at ``total`` and after it.
      total: length of all cycles, a count or a fraction of ``run_total``.
      num_cycles: cycles, n, at least 1.
      difficulty_step: the values are its multiples, or the minimum or the maximum.
      run_total: length of the run, needed when ``total`` is a fraction.

    Returns:
      ``clock -> difficulty``; see :class:`Pacing`.

    Raises:
      ValueError: if an argument is out of range.

    Example:
      >>> pacing = cyclic_schedule(0, max_difficulty=100, total=200, num_cycles=2)
      >>> [pacing(t) for t in (0, 50, 99, 100, 150, 200)]
      [0, 50, 99, 0, 50, 100]

    References:
      Pouransari et al., "Dataset Decomposition: Faster LLM Training with Variable
      Sequence Length Curriculum", https://arxiv.org/abs/2405.13226, 2024
    """
    cycles = _count("num_cycles", num_cycles)
    return _shape_schedule(
        lambda module, t, length: (t * cycles % length) / length,
        *(min_difficulty, max_difficulty, total, difficulty_step, run_total),
        is_monotone=cycles == 1,
    )


def power_of_two_schedule(
    min_difficulty: int,
    *,
    max_difficulty: int,
    total: int | float,
    run_total: int | None = None,
) -> _pacing.Pacing:
    """Makes a difficulty that doubles after equal times.

    ``min * 2 ** floor(n * t / total)`` with n doublings between minimum and maximum:
    few lengths, each of which divides the next.

    Args:
      min_difficulty: at clock 0, at least 1.
      max_difficulty: from ``total`` on; the minimum times a power of two.
      total: length of the ramp, a count or a fraction of ``run_total``.
      run_total: length of the run, needed when ``total`` is a fraction.

    Returns:
      ``clock -> difficulty``; see :class:`Pacing`.

    Raises:
      ValueError: if an argument is out of range.

    Example:
      >>> pacing = power_of_two_schedule(256, max_difficulty=2048, total=300)
      >>> [pacing(t) for t in (0, 99, 100, 200, 300)]
      [256, 256, 512, 1024, 2048]

    References:
      Pouransari et al., "Dataset Decomposition", https://arxiv.org/abs/2405.13226, 2024
    """
    low, high = _count("min_difficulty", min_difficulty), max_difficulty
    doublings = max(0, round(math.log2(_count("max_difficulty", high) / low)))
    if low * 2**doublings != high:
        raise ValueError(
            f"max_difficulty={high} must be min_difficulty={low} times a power of two; "
            f"the nearest: {low * 2**doublings}."
        )

    def shape(module: Any, clock: Any, length: int) -> Any:
        stair = module.floor(clock * doublings / length)
        return (module.pow(2.0, stair) - 1) / max(2**doublings - 1, 1)

    return _shape_schedule(shape, low, high, total, 1, run_total)


def function_schedule(
    function: Callable[[Any], Any],
    *,
    min_difficulty: int | float,
    max_difficulty: int | float,
    difficulty_step: int | float = 1,
    total: int | float | None = None,
    run_total: int | None = None,
    is_monotone: bool = False,
) -> _pacing.Pacing:
    """Makes a difficulty of a function of yours, rounded and kept in its range.

    Args:
      function: ``clock -> difficulty``; called with Python numbers, and with JAX
        arrays where the schedule is.
      min_difficulty: smaller values are raised to it.
      max_difficulty: larger values are lowered to it.
      difficulty_step: the values are its multiples, or the minimum or the maximum.
      total: the maximum holds from here on, a count or a fraction of ``run_total``;
        None leaves it to the function.
      run_total: length of the run, needed when ``total`` is a fraction.
      is_monotone: promise that the function never falls, which makes tables of its
        changes cheap.

    Returns:
      ``clock -> difficulty``; see :class:`Pacing`.

    Raises:
      ValueError: if an argument is out of range.

    Example:
      >>> pacing = function_schedule(
      ...     lambda t: 3 * t, min_difficulty=8, max_difficulty=64, difficulty_step=8)
      >>> [pacing(t) for t in (0, 5, 8, 100)]
      [8, 8, 24, 64]
    """
    if not callable(function):
        raise ValueError(f"function={function!r} must be callable.")
    levels = _pacing._Range.checked(min_difficulty, max_difficulty, difficulty_step)
    length = None if total is None else _pacing._total(total, run_total)

    def value(module: Any, clock: Any) -> Any:
        end = math.inf if length is None else length
        if module is jnp:
            inside = levels.rounded(jnp, jnp.asarray(function(clock), jnp.float32))
            return jnp.where(clock >= end, float(levels.high), inside)
        if clock >= end:
            return levels.result(levels.high)
        raw = _pacing._number("the function's difficulty", function(clock))
        return levels.rounded(math, raw)

    return _pacing.Pacing(value, levels.low, levels.high, length, is_monotone)
