"""Learning rates: a linear warm-up, then a decay, over any clock.

The clock is whatever the caller counts: steps, or tokens seen so far. A schedule is
called with the clock *before* the step whose rate it gives, so the first step with a
warm-up has rate 0.

Numbers of Python and NumPy are computed in float64 and a Python float is returned, so a
clock of 2**40 tokens is exact. Traced values and JAX arrays are computed in float32:
they agree to about 1e-6, and int32 overflows at 2**31 tokens, so token clocks belong on
the host.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dataeff_jax import typing


def _check(peak_value: float, warmup: int) -> None:
    if not (math.isfinite(peak_value) and peak_value >= 0):
        raise ValueError(
            f"peak_value={peak_value} must be a finite number, at least 0."
        )
    if warmup < 0:
        raise ValueError(
            f"warmup={warmup} must be at least 0 (0 means no warm-up); give it in units"
            " of the clock."
        )


def _check_decay(warmup: int, total: int, final_ratio: float) -> None:
    if not total > warmup:
        raise ValueError(
            f"total={total} must exceed warmup={warmup}: the rate decays between them,"
            " both in units of the clock."
        )
    if not 0 <= final_ratio <= 1:
        raise ValueError(
            f"final_ratio={final_ratio} must lie in [0, 1]; it is the last rate over"
            " the peak."
        )


def _schedule(
    peak_value: float, warmup: int, after: Callable[[Any, Any], Any]
) -> typing.Schedule:
    """Warm-up to the peak, then ``peak * after(numpy module, clock)``."""

    def schedule(clock):
        if isinstance(clock, jax.Array):
            xp, clock = jnp, jnp.asarray(clock, jnp.float32)
        else:
            xp, clock = np, np.asarray(clock, np.float64)
        ratio = xp.where(clock < warmup, clock / max(warmup, 1), after(xp, clock))
        value = peak_value * ratio
        return float(value) if xp is np and value.ndim == 0 else value

    return schedule


def _progress(xp, clock, warmup: int, total: int):
    """0 at the end of the warm-up, 1 at the end of the run and after it."""
    return xp.clip((clock - warmup) / (total - warmup), 0, 1)


def warmup_cosine_schedule(
    peak_value: float, *, warmup: int, total: int, final_ratio: float = 0.1
) -> typing.Schedule:
    """Makes a schedule that rises linearly and falls along half a cosine.

    ``peak * clock / warmup`` until the warm-up ends, then
    ``peak * (r + (1 - r) * (1 + cos(pi * p)) / 2)`` with r the final ratio and p the
    part of the decay that is done; constant after ``total``.

    Args:
      peak_value: the rate at the end of the warm-up.
      warmup: length of the warm-up, in units of the clock; 0 means none.
      total: length of the run, in units of the clock.
      final_ratio: the last rate over the peak.

    Returns:
      ``clock -> rate``: a float for a number, an array of the same shape for arrays
      (float64 for NumPy, float32 for JAX).

    Raises:
      ValueError: if an argument is out of range.

    Example:
      >>> schedule = warmup_cosine_schedule(1.0, warmup=0, total=1000, final_ratio=0)
      >>> round(schedule(501), 4)
      0.4984

    References:
      Loshchilov, Hutter, "SGDR: stochastic gradient descent with warm restarts",
      https://arxiv.org/abs/1608.03983, 2016
    """
    _check(peak_value, warmup)
    _check_decay(warmup, total, final_ratio)

    def after(xp, clock):
        cosine = (1 + xp.cos(np.pi * _progress(xp, clock, warmup, total))) / 2
        return final_ratio + (1 - final_ratio) * cosine

    return _schedule(peak_value, warmup, after)


def warmup_linear_schedule(
    peak_value: float, *, warmup: int, total: int, final_ratio: float = 0.0
) -> typing.Schedule:
    """Makes a schedule that rises linearly and falls linearly.

    Args:
      peak_value: the rate at the end of the warm-up.
      warmup: length of the warm-up, in units of the clock; 0 means none.
      total: length of the run, in units of the clock; constant after it.
      final_ratio: the last rate over the peak.

    Returns:
      ``clock -> rate``, as :func:`warmup_cosine_schedule` gives it.

    Raises:
      ValueError: if an argument is out of range.

    Example:
      >>> schedule = warmup_linear_schedule(1.0, warmup=1_000, total=21_000)
      >>> schedule(500), schedule(6_000), schedule(21_000)
      (0.5, 0.75, 0.0)
    """
    _check(peak_value, warmup)
    _check_decay(warmup, total, final_ratio)

    def after(xp, clock):
        return 1 - (1 - final_ratio) * _progress(xp, clock, warmup, total)

    return _schedule(peak_value, warmup, after)


def warmup_constant_schedule(peak_value: float, *, warmup: int) -> typing.Schedule:
    """Makes a schedule that rises linearly and stays.

    Args:
      peak_value: the rate after the warm-up.
      warmup: length of the warm-up, in units of the clock; 0 means none.

    Returns:
      ``clock -> rate``, as :func:`warmup_cosine_schedule` gives it.

    Raises:
      ValueError: if an argument is out of range.

    Example:
      >>> schedule = warmup_constant_schedule(2.0, warmup=10)
      >>> schedule(5), schedule(100)
      (1.0, 2.0)
    """
    _check(peak_value, warmup)
    return _schedule(peak_value, warmup, lambda xp, clock: xp.ones_like(clock))


def warmup_inverse_sqrt_schedule(peak_value: float, *, warmup: int) -> typing.Schedule:
    """Makes a schedule that rises linearly and falls as ``sqrt(warmup / clock)``.

    Needs no length of the run.

    Args:
      peak_value: the rate at the end of the warm-up.
      warmup: length of the warm-up, in units of the clock, at least 1.

    Returns:
      ``clock -> rate``, as :func:`warmup_cosine_schedule` gives it.

    Raises:
      ValueError: if an argument is out of range.

    Example:
      >>> schedule = warmup_inverse_sqrt_schedule(1.0, warmup=100)
      >>> schedule(50), schedule(400)
      (0.5, 0.5)

    References:
      Vaswani et al., "Attention is all you need", https://arxiv.org/abs/1706.03762,
      section 5.3, 2017
    """
    _check(peak_value, warmup)
    if warmup < 1:
        raise ValueError(
            f"warmup={warmup} must be at least 1: the decay is measured in warm-ups."
        )

    def after(xp, clock):
        return xp.sqrt(warmup / xp.maximum(clock, warmup))

    return _schedule(peak_value, warmup, after)
