"""Curricula that are planned anew at declared steps, by other difficulties or easier.

References:
  Kumar et al., "Self-Paced Learning for Latent Variable Models", 2010 (the difficulty
  that the present model sees)
"""

import bisect
import hashlib
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dataeff_jax.curriculum import (
    _eligibility,
    _index,
    _permutation,
    _sampler,
)


class PhasedOrder(_sampler.SampleOrder):
    """Orders one after another, each from a declared step on.

    For difficulties that are computed anew from the model in the middle of a run, and
    for those that fall. Each phase is an order of its own whose step 0 is the phase's
    first step, so any step is still found at once, and a step is all that a checkpoint
    needs. An order that goes on with the schedules of the run has
    ``step_offset=first_step + 1``. A phase may be added while the run goes on, at a
    step that was not drawn yet; ``state`` and ``resume`` see to it that a run that goes
    on has the phases it was drawn from.

    Args:
      phases: pairs ``(first step, order)``, the first at step 0, steps rising; orders
        of the same samples and batch size. Seeds differ, so that no phase repeats
        another.

    Raises:
      ValueError: steps that do not rise from 0, or orders that do not fit together.

    Example:
      >>> import tempfile
      >>> from dataeff_jax import curriculum, schedules
      >>> def order_by(losses, seed):
      ...     metric = curriculum.function_metric(
      ...         lambda record: losses[record["row"]], name="loss", dtype="float32")
      ...     rows = [{"row": row} for row in range(len(losses))]
      ...     index = curriculum.analyze(rows, [metric], tempfile.mkdtemp())
      ...     half = curriculum.Criterion(
      ...         schedules.fixed_linear_schedule(50, max_difficulty=50, total=1))
      ...     return curriculum.SampleOrder(
      ...         index, {"loss": half}, batch_size=2, seed=seed)
      >>> first, second = order_by([1, 9, 8, 2], 0), order_by([3, 1, 1, 3], 1)
      >>> order = curriculum.PhasedOrder([(0, first), (100, second)])
      >>> sorted(order[99].tolist()), sorted(order[100].tolist())
      ([0, 3], [1, 2])
      >>> order.resume(curriculum.PhasedOrder([(0, first)]).state(100))
      100
    """

    def __init__(self, phases: Sequence[tuple[int, _sampler.SampleOrder]]):
        self._starts = [int(start) for start, _ in phases]
        self._orders = [order for _, order in phases]
        _check(self._starts, self._orders)
        first = self._orders[0]
        self.batch_size, self.seed = first.batch_size, first.seed
        self.num_samples = first.num_samples

    @classmethod
    def at_falls(
        cls,
        index: _index.DifficultyIndex,
        criteria: Mapping[str, _eligibility.Criterion],
        *,
        batch_size: int,
        seed: int,
        draw: _sampler.Draw = "stratified",
        step_offset: int = 1,
        num_steps: int | None = None,
        plan_directory: str | os.PathLike | None = None,
    ) -> "PhasedOrder":
        """Make an order by schedules that fall: a new phase begins at every fall.

        Args:
          index: as for :class:`SampleOrder`, as are all others.
          criteria: by metric; the schedules may fall.
          batch_size: samples of the global batch, B.
          seed: of the first phase; those of the others come from it.
          draw: how many draws each cluster gives.
          step_offset: step t has the schedules' difficulties at t + step_offset.
          num_steps: needed for schedules without an end.
          plan_directory: the folder of plans.

        Returns:
          The order.

        Raises:
          ValueError: what :class:`SampleOrder` refuses; the phase is named.

        Example:
          >>> import tempfile
          >>> from dataeff_jax import curriculum, schedules
          >>> source = [{"tokens": [0] * n} for n in (3, 1, 4, 2)]
          >>> index = curriculum.analyze(
          ...     source, [curriculum.sequence_length()], tempfile.mkdtemp())
          >>> pacing = schedules.cyclic_schedule(
          ...     1, max_difficulty=4, total=20, num_cycles=2)
          >>> criteria = {"sequence_length": curriculum.Criterion(pacing, "value")}
          >>> order = curriculum.PhasedOrder.at_falls(
          ...     index, criteria, batch_size=2, seed=0, step_offset=0)
          >>> [order.num_eligible(step) for step in (0, 9, 10, 19, 20)]
          [1, 3, 1, 3, 4]
        """
        starts, last = _falls(criteria, step_offset, num_steps)
        phases = []
        for number, (start, end) in enumerate(itertools.pairwise([*starts, last + 1])):
            own_seed = _permutation.key_of(seed, 6, number) if number else seed
            try:
                order = _sampler.SampleOrder(
                    index,
                    criteria,
                    batch_size=batch_size,
                    seed=own_seed,
                    draw=draw,
                    step_offset=step_offset + start,
                    num_steps=end - 1 - start,
                    plan_directory=plan_directory,
                )
            except ValueError as error:
                raise ValueError(
                    f"Phase {number}, from step {start}: {error}"
                ) from None
            phases.append((start, order))
        return cls(phases)

    def __getitem__(self, step: int) -> np.ndarray:
        """Return the samples of a step's global batch, int64[B]; read-only."""
        if step < 0:
            raise IndexError(f"step={step} must not be negative.")
        order, own_step = self._at(step)
        return order[own_step]

    def difficulties(self, step: int) -> dict[str, Any]:
        """Return the schedules' difficulties at a step, by metric of its phase."""
        order, own_step = self._at(step)
        return order.difficulties(own_step)

    def num_eligible(self, step: int) -> int:
        """Return the samples in the pool of a step."""
        order, own_step = self._at(step)
        return order.num_eligible(own_step)

    @property
    def fingerprint(self) -> str:
        """Return a sha256 that changes when the samples of any step do."""
        return self._fingerprint(len(self._starts))

    def __repr__(self) -> str:
        return f"PhasedOrder({self.fingerprint[:16]})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def _at(self, step: int) -> tuple[_sampler.SampleOrder, int]:
        """Return the order of a step's phase, and the step in it."""
        phase = max(bisect.bisect_right(self._starts, step) - 1, 0)
        return self._orders[phase], int(step) - self._starts[phase]

    def _fingerprint(self, num_phases: int) -> str:
        told = [order.fingerprint for order in self._orders[:num_phases]]
        return hashlib.sha256(
            repr([self._starts[:num_phases], told]).encode()
        ).hexdigest()

    def _fingerprint_before(self, step: int) -> str:
        return self._fingerprint(max(bisect.bisect_left(self._starts, step), 1))


def _check(starts: list[int], orders: list[_sampler.SampleOrder]) -> None:
    if not starts or starts[0] != 0 or (np.diff(starts) <= 0).any():
        raise ValueError(
            f"The phases begin at {starts}; the first must begin at 0, and each later "
            f"than the one before."
        )
    for what in ("batch_size", "num_samples"):
        found = [getattr(order, what) for order in orders]
        if len(set(found)) > 1:
            raise ValueError(f"The phases have {what} {found}; it must not change.")
    seeds = [order.seed for order in orders]
    if len(set(seeds)) < len(seeds):
        raise ValueError(
            f"The phases have the seeds {seeds}; give each a seed of its own, or one "
            f"phase repeats the order of another."
        )


def _falls(
    criteria: Mapping[str, _eligibility.Criterion],
    step_offset: int,
    num_steps: int | None,
) -> tuple[list[int], int]:
    """Return 0 and the steps at which a schedule falls, and where all are constant."""
    starts, last = {0}, 0
    for name, criterion in criteria.items():
        end = _eligibility.last_step(name, criterion, step_offset, num_steps)
        last = max(last, end)
        points = _eligibility._change_points(criterion.schedule, step_offset, end)
        for (_, before), (step, after) in itertools.pairwise(points):
            if after < before:
                starts.add(step)
    return sorted(starts), last
