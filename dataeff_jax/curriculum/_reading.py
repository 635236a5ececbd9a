"""How a mixture reads its corpora: by the number of a draw within a corpus."""

from typing import Any

import numpy as np

from dataeff_jax.curriculum import _draws, _permutation, _sampler
from dataeff_jax.data import _batches, _splits


class Plain:
    """A corpus in random order, epoch after epoch."""

    def __init__(self, num_samples: int, key: int):
        self.num_samples, self._key = num_samples, np.uint64(key)
        self.told = (num_samples, key)

    def difficulties(self, step: int) -> dict[str, Any]:
        return {}

    def num_eligible(self, step: int) -> int:
        return self.num_samples

    def samples(self, first: int, count: int) -> np.ndarray:
        """Return the samples of draws, int64[count]."""
        draws = np.arange(first, first + count)
        epochs, places = np.divmod(draws, self.num_samples)
        keys = _permutation.mixed(epochs.astype(np.uint64) + self._key)
        sizes = np.full(count, self.num_samples)
        return _permutation.permuted(places, sizes, keys)


class Alone(Plain):
    """The only corpus of a mixture, in the order of ``data.batches``."""

    def samples(self, first: int, count: int) -> np.ndarray:
        size, found = self.num_samples, np.empty(count, np.int64)
        for place, draw in enumerate(range(first, first + count)):
            epoch, position = divmod(draw, size)
            seed = _batches.epoch_seed(int(self._key), epoch)
            found[place] = _splits.permuted(position, size, seed)
        return found


class Paced:
    """An order that is read at the steps of a mixture, but only its share of draws.

    Its stages start with the draws that the mixture has reached at their first steps;
    apart from that it is the order itself, with batches of one.
    """

    def __init__(self, order: _sampler.SampleOrder, starts: np.ndarray):
        self._of = order
        pool = _draws.Pool(starts, order._pool.sizes, 1, order.seed)
        self._pool: _draws.Pool = pool
        self._draws: Any = type(order._draws)(pool)
        self.num_samples = order.num_samples
        self.told = order.fingerprint
        self.difficulties = order.difficulties
        self.num_eligible = order.num_eligible

    def samples(self, first: int, count: int) -> np.ndarray:
        """Return the samples of draws, all of one step of the mixture, int64[count]."""
        if isinstance(self._draws, _draws.Iid):
            draws = range(first, first + count)
            places = np.concatenate([self._draws.places(draw) for draw in draws])
            return self._of._order[places].astype(np.int64)
        places = self._draws._located(*_dealt_range(self._draws, first, count))
        return self._of._order[places].astype(np.int64)


def _dealt_range(
    draws: _draws.Stratified, first: int, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return clusters and numbers of draws of one stage, int64[count] each."""
    stage = draws.pool.stage(first)
    draw = first - int(draws.pool.starts[stage])
    end, block, found = draw + count, draws._block_of(stage, draw), []
    while draw < end:
        start, *columns = draws._made(stage, block)
        found.append([column[draw - start : end - start] for column in columns])
        draw, block = start + len(columns[0]), block + 1
    clusters, numbers = zip(*found, strict=True)
    return np.concatenate(clusters), np.concatenate(numbers)
