"""The samples of every step, as a pure function of (index, criteria, seed, step).

References:
  Li et al., "DeepSpeed Data Efficiency", https://arxiv.org/abs/2212.03597, 2022
"""

import functools
import hashlib
import os
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from dataeff_jax.curriculum import _draws, _eligibility, _index, _plan

Draw = Literal["stratified", "parity", "iid"]
_DRAWS = {
    "stratified": _draws.Stratified,
    "parity": _draws.Parity,
    "iid": _draws.Iid,
}


_VERSION = 2  # of the draws: it rises when the same settings give other samples


class SampleOrder:
    """Which samples the batch of a step holds.

    A batch costs O(batch_size), wherever it lies in the run: no permutation is held in
    memory and nothing is written. The pool of a step is what all criteria admit, and
    it only grows; what one change of difficulty adds is a cluster. Within a cluster
    each sample is drawn once before any is drawn again, and a batch is full even when
    the pool is smaller. The step is the only state, whatever the processes.

    Args:
      index: the difficulties.
      criteria: by metric, what is admitted; several admit their intersection. Their
        order is then a plan, a file that is built once.
      batch_size: samples of the global batch, B.
      seed: of the order, not negative.
      draw: how many draws each cluster gives. ``"stratified"``: its share, as exactly
        as whole numbers can. ``"parity"``: multinomial for each batch, the original's
        law; the order may depend on NumPy's version. ``"iid"``: samples are drawn with
        replacement, for comparison.
      step_offset: step t has the difficulties of the schedules at t + step_offset; the
        original counts from 1.
      num_steps: needed for schedules without an end: the step from which on they are
        constant. Later changes are not seen.
      plan_directory: the folder of plans; None puts it beside the index.

    Raises:
      ValueError: an argument out of range, a metric that the index lacks, a schedule
        that falls, or a pool that is empty at step 0.

    Example:
      >>> import tempfile
      >>> from dataeff_jax import curriculum, schedules
      >>> source = [{"tokens": [0] * n} for n in (3, 1, 4, 2)]
      >>> index = curriculum.analyze(
      ...     source, [curriculum.sequence_length()], tempfile.mkdtemp())
      >>> pacing = schedules.fixed_linear_schedule(2, max_difficulty=4, total=4)
      >>> criterion = curriculum.Criterion(pacing, "value")
      >>> order = curriculum.SampleOrder(
      ...     index, {"sequence_length": criterion}, batch_size=4, seed=0)
      >>> sorted(order[0].tolist()), set(order[100].tolist()) <= {0, 1, 2, 3}
      ([1, 1, 3, 3], True)
      >>> order.difficulties(0), order.num_eligible(0), order.num_eligible(100)
      ({'sequence_length': 2}, 2, 4)
    """

    def __init__(
        self,
        index: _index.DifficultyIndex,
        criteria: Mapping[str, _eligibility.Criterion],
        *,
        batch_size: int,
        seed: int,
        draw: Draw = "stratified",
        step_offset: int = 1,
        num_steps: int | None = None,
        plan_directory: str | os.PathLike | None = None,
    ):
        if not 1 <= batch_size <= 2**29:
            raise ValueError(f"batch_size={batch_size} must lie in 1 to 2^29.")
        if seed < 0:
            raise ValueError(f"seed={seed} must not be negative.")
        if draw not in _DRAWS:
            raise ValueError(f"draw={draw!r} must be one of {', '.join(_DRAWS)}.")
        if not criteria:
            raise ValueError("criteria is empty; give at least one metric's.")
        for name in criteria:
            index.values(name)  # an unknown metric is told with the known ones
        self.batch_size, self.seed = batch_size, seed
        self.num_samples = len(index)
        self.stages = _eligibility.make_stages(
            criteria, step_offset=step_offset, num_steps=num_steps
        )
        self._order, self._counts = _plan.open_plan(
            index, criteria, self.stages, plan_directory
        )
        if not self._counts[0]:
            raise ValueError(_nothing(index, criteria, self.stages))
        new = np.flatnonzero(np.diff(self._counts, prepend=0))
        self._ends = self._counts[new]
        sizes = np.diff(self._ends, prepend=0)
        starts = self.stages.starts[new]
        pool = _draws.Pool(starts, sizes, batch_size, seed)
        self._pool, self._draws = pool, _DRAWS[draw](pool)
        self._settings = (index, pool, draw)
        self._start()

    def _start(self) -> None:
        self._batch = functools.lru_cache(maxsize=32)(self._make)

    def __getstate__(self) -> dict[str, Any]:
        # The order is mapped again where the object arrives.
        state = {k: v for k, v in self.__dict__.items() if k != "_batch"}
        return {**state, "_order": _Mapped.of(self._order)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._order = state["_order"].open()
        self._start()

    def __getitem__(self, step: int) -> np.ndarray:
        """Return the samples of a step's global batch, int64[B]; read-only."""
        if step < 0:
            raise IndexError(f"step={step} must not be negative.")
        return self._batch(int(step))

    def difficulties(self, step: int) -> dict[str, Any]:
        """Return the schedules' difficulties at a step, by metric."""
        stage = np.searchsorted(self.stages.starts, step, side="right") - 1
        return {name: d[stage] for name, d in self.stages.difficulties.items()}

    def num_eligible(self, step: int) -> int:
        """Return the samples in the pool of a step."""
        return int(self._ends[self._pool.stage(step)])

    @property
    def fingerprint(self) -> str:
        """Return a sha256 that changes when the samples of any step do."""
        index, pool, draw = self._settings
        told = [_VERSION, index.fingerprint, draw]
        told += [pool.starts.tolist(), pool.sizes.tolist()]
        told += [pool.batch_size, pool.seed, repr(self.stages.difficulties)]
        return hashlib.sha256(repr(told).encode()).hexdigest()

    def state(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint keeps when the steps before ``step`` are drawn.

        Two values that JSON holds: the step, and a fingerprint of all that decided the
        samples so far.
        """
        return {"step": int(step), "order": self._fingerprint_before(step)}

    def resume(self, state: Mapping[str, Any]) -> int:
        """Return the step to go on at, from what ``state`` gave.

        Raises:
          ValueError: a state of another order: index, schedules, seed, batch size or
            draws differ.
        """
        if missing := [key for key in ("step", "order") if key not in state]:
            raise ValueError(f"The state lacks {missing}; it has {sorted(state)}.")
        step, found = int(state["step"]), self._fingerprint_before(int(state["step"]))
        if found != state["order"]:
            raise ValueError(
                f"Up to step {step} the samples came from another order, "
                f"{state['order'][:16]}, than this, {found[:16]}: index, criteria, "
                f"seed, batch size, draws or phases differ. Go on with those of the "
                f"run, or begin a new one."
            )
        return step

    def _fingerprint_before(self, step: int) -> str:
        """Return the fingerprint of what decides the samples before a step."""
        return self.fingerprint

    def __repr__(self) -> str:
        return f"SampleOrder({self.fingerprint[:16]})"

    def _make(self, step: int) -> np.ndarray:
        order = np.asarray(self._order)  # indexed faster than a memmap
        samples = order.take(self._draws.places(step)).astype(np.int64)
        samples.flags.writeable = False  # it is cached
        return samples


class _Mapped:
    """A mapped ``.npy`` file on its way to another process."""

    def __init__(self, path: str | None, array: np.ndarray | None):
        self._path, self._array = path, array

    @classmethod
    def of(cls, array: np.ndarray) -> "_Mapped":
        path = getattr(array, "filename", None)
        return cls(None, array) if path is None else cls(str(path), None)

    def open(self) -> np.ndarray:
        if self._path is None and self._array is not None:
            return self._array
        return np.load(str(self._path), mmap_mode="r")


def _nothing(
    index: _index.DifficultyIndex,
    criteria: Mapping[str, _eligibility.Criterion],
    stages: _eligibility.Stages,
) -> str:
    """Return why no sample may be drawn at step 0."""
    told = []
    for name, criterion in criteria.items():
        difficulty = stages.difficulties[name][0]
        count = criterion.count(difficulty, index.values(name), index.order(name))
        easiest = index.quantile(name, 0)
        told.append(
            f"{name} at {criterion.difficulty_type} {difficulty} admits {count} of "
            f"{len(index)} (the easiest has {easiest})"
        )
    return (
        f"No sample may be drawn at step 0: {'; '.join(told)}. Start with larger "
        f"difficulties; several metrics admit what all of them admit."
    )
