"""When 0/1 Adam updates its variance and when devices synchronise.

Yucheng Lu et al., "Maximizing communication efficiency for large-scale training via
0/1 Adam", https://arxiv.org/abs/2202.06009, section 4.
"""

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

FULL, ONEBIT, LOCAL, SYNC = KINDS = ("full", "onebit", "local", "sync")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroOneSchedule:
    """The kind of every update of 0/1 Adam, a pure function of its number.

    Update t counts from 1. Up to ``var_freeze_step`` every update averages gradients:
    exactly, and with an update of the variance, where t is a multiple of an interval
    that doubles after each ``var_update_scaler`` of them; else as one bit. After that
    devices go on by themselves and synchronise where t is a multiple of another
    interval, which starts at 1 and doubles up to ``local_step_clipper``.

    Attributes:
      var_freeze_step: the last update that may change the variance.
      var_update_scaler: updates of the variance at one interval.
      local_step_scaler: updates until the interval between synchronisations doubles.
      local_step_clipper: largest interval between synchronisations.
      local_step_policy: ``"steps"``, doubling by ``local_step_scaler``; or
        ``"learning_rate"``, doubling whenever the rate has halved since the variance
        froze, counted from the last synchronisation.
      learning_rate: the schedule, a function of the number of updates done, for the
        latter.
      parity: ``"deepspeed"``, whose first phase is one update longer and whose first
        update does nothing.

    Raises:
      ValueError: if a value is out of its range, or the rate is missing.

    Example:
      >>> schedule = ZeroOneSchedule(
      ...     var_freeze_step=6, var_update_scaler=2, local_step_scaler=3)
      >>> [schedule.kind(step) for step in range(12)]  # doctest: +NORMALIZE_WHITESPACE
      ['full', 'full', 'onebit', 'full', 'onebit', 'full',
       'sync', 'sync', 'sync', 'sync', 'local', 'sync']
    """

    var_freeze_step: int
    var_update_scaler: int = 16
    local_step_scaler: int = 32768
    local_step_clipper: int = 16
    local_step_policy: Literal["steps", "learning_rate"] = "steps"
    learning_rate: Callable[[Any], Any] | None = None
    parity: Literal["deepspeed"] | None = None

    def __post_init__(self):
        if self.var_freeze_step < 1:
            raise ValueError(
                f"var_freeze_step={self.var_freeze_step} must be at least 1: without"
                " an update of the variance there is nothing to divide by."
            )
        for name in ("var_update_scaler", "local_step_scaler", "local_step_clipper"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.local_step_policy not in ("steps", "learning_rate"):
            raise ValueError(
                f"local_step_policy={self.local_step_policy!r} must be 'steps' or"
                " 'learning_rate'."
            )
        if self.local_step_policy == "learning_rate" and self.learning_rate is None:
            raise ValueError(
                "local_step_policy='learning_rate' needs learning_rate=, a function of"
                " the number of updates done."
            )

    @property
    def last_averaged(self) -> int:
        """The last update before local steps begin."""
        return self.var_freeze_step + (self.parity is not None)

    @functools.cached_property
    def _variance_starts(self) -> tuple[int, ...]:
        """Entry k: the first update at which the variance's interval is 2**k."""
        starts, start, interval = [], 2 if self.parity else 1, 1
        while start <= self.last_averaged:
            starts.append(start)
            first = math.ceil(start / interval) * interval
            start = first + (self.var_update_scaler - 1) * interval + 1
            interval *= 2
        return tuple(starts) or (1,)

    def kind(self, step: int) -> str:
        """Returns the kind of an update, given the number of updates done before."""
        if self.local_step_policy == "learning_rate" and step >= self.last_averaged:
            return self._by_rate(step)
        return KINDS[int(self._index(np, np.int64(step)))]

    def kind_on_device(self, count: jax.Array) -> jax.Array:
        """Returns an index into ``KINDS``, of a traced number of updates done."""
        if self.local_step_policy == "learning_rate":
            raise ValueError(
                "local_step_policy='learning_rate' is worked out on the host; pass"
                " stage=schedule.kind(step) to update."
            )
        return self._index(jnp, count)

    def _index(self, xp, step):
        t = step + 1
        starts = xp.asarray(self._variance_starts, dtype=step.dtype)
        doublings = xp.maximum(xp.sum(starts <= t) - 1, 0).astype(step.dtype)
        full = t % xp.left_shift(xp.ones_like(t), doublings) == 0
        doublings = (t - self.last_averaged - 1) // self.local_step_scaler
        doublings = xp.clip(doublings, 0, self._most_doublings).astype(step.dtype)
        interval = xp.left_shift(xp.ones_like(t), doublings)
        interval = xp.minimum(interval, self.local_step_clipper)
        averaged = xp.where(full, 0, 1)
        local = xp.where(t % interval == 0, 3, 2)
        return xp.where(t <= self.last_averaged, averaged, local)

    @property
    def _most_doublings(self) -> int:
        return min(math.ceil(math.log2(self.local_step_clipper)), 30)

    @functools.cached_property
    def _synced(self) -> list[int]:
        """Synchronising updates found so far (a cache), oldest first."""
        return [self.last_averaged]

    def _by_rate(self, step: int) -> str:
        """Steps on from the last synchronisation known."""
        t, synced = step + 1, self._synced
        while synced[-1] < t:
            last = synced[-1]
            following = last + 1
            while following - last < self._rate_interval(following - 1):
                following += 1
            synced.append(following)
        return SYNC if synced[bisect.bisect_left(synced, t)] == t else LOCAL

    def _rate_interval(self, step: int) -> int:
        if self.learning_rate is None:  # refused when built
            return self.local_step_clipper
        rate = float(self.learning_rate(step))
        reference = float(self.learning_rate(self.last_averaged))
        if rate <= 0 or reference <= 0:
            return self.local_step_clipper
        doublings = max(math.floor(math.log2(reference / rate) + 1e-9), 0)
        return min(2 ** min(doublings, 62), self.local_step_clipper)
