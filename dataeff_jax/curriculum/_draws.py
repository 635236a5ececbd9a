"""Which place of which cluster each draw of a step takes, with random access.

A run is cut into stages of constant pool; stage k draws from the clusters 0 to k, whose
sizes n_c add up to its pool E. A draw takes a cluster, and the next place of the
cluster's endless sequence, in which every pass holds each place once. So a draw is a
pair (cluster, number of the draw within the cluster), and what is needed at a step is
how many draws each cluster has had before: a closed form within a stage, and one vector
at the start of each.

Every sample of a pool should have the same rate. ``Stratified`` shuffles within blocks
and keeps each cluster's draws, at the ends of blocks, within about two of the sum of
n_c * draws / E. ``Parity`` draws the counts of each batch from a multinomial
distribution, as the original does. ``Iid`` draws each sample anew.
"""

import functools
import threading
from typing import Any, NamedTuple

import numpy as np

from dataeff_jax.curriculum import _permutation

# Draws in a block of the stratified order: it is cheap to shuffle, and a sample waits
# no longer than about a block for its share of draws.
_BLOCK = 8192

# Places of so many draws are found at once, which costs less for each, but of so few
# steps, as one that is asked for alone waits for all of them.
_GROUP_DRAWS, _GROUP_STEPS = 4096, 8

# NumPy draws hypergeometric numbers from fewer than 10^9.
_MAX_SEGMENT = 2**29


class Pool(NamedTuple):
    """The clusters and when they come; cluster after cluster, the places 0 to N - 1."""

    starts: np.ndarray  # int64[K], the first step of each stage; starts[0] is 0
    sizes: np.ndarray  # int64[K], of the clusters, all positive
    batch_size: int
    seed: int

    def stage(self, step: int) -> int:
        """Return the stage of a step."""
        return int(np.searchsorted(self.starts, step, side="right")) - 1

    def num_steps(self, stage: int) -> int | None:
        """Return the steps of a stage, None for the last."""
        if stage + 1 == len(self.starts):
            return None
        return int(self.starts[stage + 1] - self.starts[stage])


class _Cached:
    """Remembers the last results of ``_make``; pickles without them."""

    def __init__(self, pool: Pool):
        self.pool = pool
        self._start()

    def draws(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the clusters and numbers of a step's draws, int64[B] each."""
        raise NotImplementedError

    def places(self, step: int) -> np.ndarray:
        """Return the places of a step's draws, int64[B]."""
        group, place = divmod(step, self._group_steps)
        return self._grouped(group)[place]

    def _group(self, group: int) -> np.ndarray:
        """Return the places of some consecutive steps, int64[steps, B]."""
        first = group * self._group_steps
        steps = range(first, first + self._group_steps)
        clusters, numbers = zip(*map(self.draws, steps), strict=True)
        places = self._located(np.concatenate(clusters), np.concatenate(numbers))
        return places.reshape(len(steps), -1)

    def _located(self, clusters: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return the places of draws: each pass over a cluster has another order."""
        grids = self._grids.take(clusters)
        numbers = numbers.view(np.uint64)  # none is negative
        passes = numbers // grids.lengths
        inside = numbers - passes * grids.lengths
        # Far apart, so that pass 1 of one cluster is not pass 0 of another.
        keys = self._keys.take(clusters) + passes * np.uint64(0xD1342543DE82EF95)
        return self._firsts.take(clusters) + _permutation.walked(inside, grids, keys)

    def _start(self) -> None:
        base = np.uint64(_permutation.key_of(self.pool.seed, 5))
        clusters = np.arange(len(self.pool.sizes), dtype=np.uint64)
        self._keys = _permutation.mixed(clusters + base)
        size = self.pool.batch_size
        self._group_steps = min(max(_GROUP_DRAWS // size, 1), _GROUP_STEPS)
        self._grouped = functools.lru_cache(maxsize=16)(self._group)
        self._grids = _permutation.grid(self.pool.sizes)
        self._ends = np.cumsum(self.pool.sizes)
        self._firsts = self._ends - self.pool.sizes
        self._lock = threading.RLock()
        self._states: list[Any] = [self._first_state()]  # at the starts of stages
        self._made = functools.lru_cache(maxsize=128)(self._make)

    def _first_state(self) -> Any:
        raise NotImplementedError

    def _next_state(self, stage: int, state: Any) -> Any:
        raise NotImplementedError

    def _make(self, *which: int) -> Any:
        """Return what the numbers name; the last ones are remembered."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {"pool": self.pool}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.pool = state["pool"]
        self._start()

    def _state(self, stage: int) -> Any:
        """Return what holds at the start of a stage, from that of the one before."""
        with self._lock:
            while len(self._states) <= stage:
                last = len(self._states) - 1
                self._states.append(self._next_state(last, self._states[last]))
            return self._states[stage]

    def _shuffled(self, size: int, *numbers: int) -> np.ndarray:
        """Return a random order of ``range(size)``; numbers and seed decide it."""
        key = np.uint64(_permutation.key_of(self.pool.seed, *numbers))
        places = np.arange(size, dtype=np.uint64)
        # The place in the low bits: sorting is ten times as fast as argsort.
        low = np.uint64((1 << max(1, (size - 1).bit_length())) - 1)
        tagged = (_permutation.mixed(places + key) & ~low) | places
        tagged.sort()
        return (tagged & low).astype(np.int64)


def _dealt(
    before: np.ndarray, counts: np.ndarray, order: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Deal ``counts`` draws in a random order; return clusters and numbers.

    Each cluster goes on where it was, with number ``before``, so that its numbers come
    in their order and a pass over a cluster is over before the next one begins.
    """
    clusters = np.repeat(np.arange(len(counts), dtype=np.uint16), counts)
    first = np.repeat(before - (np.cumsum(counts) - counts), counts)
    numbers = np.empty(len(clusters), np.int64)
    shuffled = clusters.take(order)
    numbers[np.argsort(shuffled, kind="stable")] = first + np.arange(len(clusters))
    return shuffled.astype(np.int64), numbers


class Stratified(_Cached):
    """Counts that follow the sizes as closely as whole numbers can.

    The state of a stage is what each cluster has had, and what it should have had
    beyond that: n_c * draws / E added up over the stages, a number around 0.
    """

    def _start(self) -> None:
        super()._start()
        self._counted = functools.lru_cache(maxsize=8)(self._counts)

    def _first_state(self) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros(1, np.int64), np.zeros(1)

    def _shape(self, stage: int) -> tuple[float, int | None]:
        """Return passes over the pool in a block, and the number of blocks."""
        steps = self.pool.num_steps(stage)
        pool_size = int(self._ends[stage])
        block = max(_BLOCK, 4 * (stage + 1))
        if steps is None:
            return block / pool_size, None
        draws = steps * self.pool.batch_size
        num_blocks = max(1, round(draws / block))
        return draws / num_blocks / pool_size, num_blocks

    def _counts(self, stage: int, block: int) -> np.ndarray:
        """Return each cluster's draws in a stage before a block, int64[k + 1]."""
        state = self._state(stage)
        passes, num_blocks = self._shape(stage)
        counts = self._rounded(stage, state, block * passes, block)
        if block != num_blocks:
            return counts
        before = self._rounded(stage, state, (block - 1) * passes, block - 1)
        steps = self.pool.num_steps(stage)
        draws = (steps or 0) * self.pool.batch_size
        wanted = self.pool.sizes[: stage + 1] * (block * passes) + state[1]
        return _with_sum(counts, before, wanted, draws)

    def _rounded(
        self, stage: int, state: tuple, passes: float, block: int
    ) -> np.ndarray:
        if block == 0:
            return np.zeros(stage + 1, np.int64)
        wanted = self.pool.sizes[: stage + 1] * passes + state[1]
        return np.maximum(np.floor(wanted + 0.5), 0).astype(np.int64)

    def _next_state(self, stage: int, state: tuple) -> tuple[np.ndarray, np.ndarray]:
        passes, num_blocks = self._shape(stage)
        drawn = self._counted(stage, num_blocks or 0)
        wanted = self.pool.sizes[: stage + 1] * (passes * (num_blocks or 0))
        debt = state[1] + wanted - drawn
        return np.append(state[0] + drawn, 0), np.append(debt, 0.0)

    def _make(self, *which: int) -> tuple[int, np.ndarray, np.ndarray]:
        """Return a block: its first draw, and clusters and numbers of its draws."""
        stage, block = which
        before = self._counted(stage, block)
        counts = self._counted(stage, block + 1) - before
        order = self._shuffled(int(counts.sum()), 1, stage, block)
        dealt = _dealt(self._state(stage)[0] + before, counts, order)
        return int(before.sum()), *dealt

    def _block_of(self, stage: int, draw: int) -> int:
        """Return the block of a stage that holds a draw."""
        passes, num_blocks = self._shape(stage)
        pool_size = int(self._ends[stage])
        block = int(draw / (passes * pool_size))  # right up to rounding
        if num_blocks is not None:
            block = min(block, num_blocks - 1)
        while draw < self._made(stage, block)[0]:
            block -= 1
        while draw >= self._made(stage, block)[0] + len(self._made(stage, block)[1]):
            block += 1
        return block

    def draws(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the clusters and numbers of a step's draws, int64[B] each."""
        stage, size = self.pool.stage(step), self.pool.batch_size
        draw = (step - int(self.pool.starts[stage])) * size
        end, found = draw + size, []
        block = self._block_of(stage, draw)
        while draw < end:
            start, *columns = self._made(stage, block)
            found.append([column[draw - start : end - start] for column in columns])
            draw = start + len(columns[0])
            block += 1
        clusters, numbers = zip(*found, strict=True)
        return np.concatenate(clusters), np.concatenate(numbers)


def _with_sum(
    counts: np.ndarray, lowest: np.ndarray, wanted: np.ndarray, total: int
) -> np.ndarray:
    """Move counts by ones until they add up to ``total``, nearest to ``wanted``."""
    counts = counts.copy()
    while (excess := int(counts.sum()) - total) != 0:
        debt = wanted - counts
        if excess > 0:
            able = np.flatnonzero(counts > lowest)
            counts[able[_smallest(debt[able], excess)]] -= 1
        else:
            counts[_smallest(-debt, -excess)] += 1
    return counts


def _smallest(values: np.ndarray, count: int) -> np.ndarray:
    """Return where the smallest values are, of equal ones the first; not in order."""
    if count >= len(values):
        return np.arange(len(values))
    last = np.partition(values, count - 1)[count - 1]  # sorting takes ten times as long
    below = np.flatnonzero(values < last)
    equal = np.flatnonzero(values == last)[: count - len(below)]
    return np.concatenate([below, equal])


class Parity(_Cached):
    """Counts with the original's law: each batch's are multinomial.

    A stage is cut into segments, their counts are drawn, and split in halves down to
    steps with the law of a half given the whole. The numbers come from NumPy's
    distributions, which a later version of NumPy may draw otherwise.
    """

    def _first_state(self) -> np.ndarray:
        return np.zeros(1, np.int64)

    def _next_state(self, stage: int, state: np.ndarray) -> np.ndarray:
        steps, length = self.pool.num_steps(stage) or 0, self._segment_steps()
        return np.append(state + self._earlier(stage, -(-steps // length)), 0)

    def _start(self) -> None:
        super()._start()
        self._sums: dict[int, list[np.ndarray]] = {}

    def _segment_steps(self) -> int:
        return 1 << (max(1, _MAX_SEGMENT // self.pool.batch_size).bit_length() - 1)

    def _earlier(self, stage: int, segment: int) -> np.ndarray:
        """Return the counts of the segments of a stage before one of them, [k + 1]."""
        with self._lock:
            sums = self._sums.setdefault(stage, [np.zeros(stage + 1, np.int64)])
            while len(sums) <= segment:
                sums.append(sums[-1] + self._made(stage, len(sums) - 1))
            return sums[segment]

    def _span(self, stage: int, segment: int, path: tuple[int, ...]) -> tuple[int, int]:
        """Return the steps of a segment that a path of halvings leads to."""
        low, high = 0, self._segment_steps()
        if (steps := self.pool.num_steps(stage)) is not None:
            high = min(high, steps - segment * high)
        for half in path:
            middle = (low + high) // 2
            low, high = (middle, high) if half else (low, middle)
        return low, high

    def _make(self, *which: int) -> np.ndarray:
        """Return the counts of a segment, or of the part that a path leads to."""
        stage, segment, *path = which
        low, high = self._span(stage, segment, tuple(path))
        size = (high - low) * self.pool.batch_size
        if path and path[-1]:
            whole = self._made(stage, segment, *path[:-1])
            return whole - self._made(stage, segment, *path[:-1], 0)
        seeds = np.random.SeedSequence([self.pool.seed, 3, stage, segment, low, high])
        random = np.random.Generator(np.random.Philox(seeds))
        if path:
            whole = self._made(stage, segment, *path[:-1])
            return random.multivariate_hypergeometric(whole, size)
        sizes = self.pool.sizes[: stage + 1]
        return random.multinomial(size, sizes / sizes.sum())

    def draws(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the clusters and numbers of a step's draws, int64[B] each."""
        stage = self.pool.stage(step)
        place = step - int(self.pool.starts[stage])
        segment, place = divmod(place, self._segment_steps())
        before = self._state(stage) + self._earlier(stage, segment)
        path, (low, high) = (), self._span(stage, segment, ())
        while high - low > 1:
            half = int(place >= (low + high) // 2)
            if half:
                before = before + self._made(stage, segment, *path, 0)
            path = (*path, half)
            low, high = self._span(stage, segment, path)
        order = self._shuffled(self.pool.batch_size, 4, step)
        return _dealt(before, self._made(stage, segment, *path), order)


class Iid:
    """Every draw is of the whole pool, with replacement; for comparison."""

    def __init__(self, pool: Pool):
        self.pool, self._ends = pool, np.cumsum(pool.sizes)

    def places(self, step: int) -> np.ndarray:
        """Return the draws' places in the pool's order, int64[B]."""
        stage, size = self.pool.stage(step), self.pool.batch_size
        pool_size = np.uint64(self._ends[stage])
        draws = np.arange(step * size, (step + 1) * size).astype(np.uint64)
        key = np.uint64(_permutation.key_of(self.pool.seed, 2))
        return (_permutation.mixed(_permutation.mixed(draws) + key) % pool_size).astype(
            np.int64
        )
