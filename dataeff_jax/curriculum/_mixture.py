"""Mixtures of corpora whose weights follow a schedule of the step."""

import bisect
import functools
import hashlib
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from dataeff_jax import typing
from dataeff_jax.curriculum import (
    _draws,
    _mixture_weights,
    _permutation,
    _quotas,
    _reading,
    _sampler,
)


class Mixture(_sampler.SampleOrder):
    """Which samples the batch of a step holds, of several corpora.

    After any number of steps each corpus has had its share of the draws, the sum of its
    weights over all weights' sum, as exactly as whole numbers can: at most 1 draw away
    for up to four corpora, 1.5 for up to eight, and so on by 1/2, where weights stay
    positive. A corpus is not drawn while its weight is 0, and one with a small weight
    is drawn when its share has grown to a draw. Each corpus is read without
    replacement, epoch after epoch, whatever the weights do. A batch is a function of
    (corpora, weights, seed, step), found at once; nothing is kept.

    A mixture is a ``SampleOrder`` over the corpora one after another:
    ``curriculum.batches(mixture.rows(corpora), mixture)``, and what else takes an
    order, works as for a single one. Corpora are numbered in the order of their names.

    Args:
      corpora: by name, the number of samples of a corpus that is read in random order,
        or a ``SampleOrder`` over it, of this ``batch_size``. Its pool at step t is then
        that of its own step t, whatever its share of the draws.
      weights: by name, a number or a schedule ``clock -> weight``, not negative. What
        counts is their ratio.
      batch_size: samples of the global batch, B.
      seed: of the order within batches and of corpora that have no order, not negative.
        A mixture of one such corpus is the order of ``data.batches``.
      step_offset: step t has the weights of the schedules at t + step_offset.
      num_steps: needed for schedules without an end: the step from which on they are
        constant. Later changes are not seen.

    Attributes:
      names: of the corpora, in the order of their numbers.

    Raises:
      ValueError: names that differ, a weight that is negative, infinite or no number,
        a step at which all are 0, or an order that does not fit.

    Example:
      >>> from dataeff_jax import curriculum, data, schedules
      >>> rising = schedules.fixed_linear_schedule(
      ...     0, max_difficulty=1, total=4, difficulty_step=0.25)
      >>> mixture = curriculum.Mixture(
      ...     {"books": 3, "web": 5}, weights={"books": 1, "web": rising},
      ...     batch_size=4, seed=0)
      >>> [mixture.counts(step).tolist() for step in (1, 2, 5, 10**9)]
      [[4, 0], [7, 1], [14, 6], [2000000004, 1999999996]]
      >>> corpora = {
      ...     name: data.MemorySource({"tokens": np.full((size, 2), size)})
      ...     for name, size in (("books", 3), ("web", 5))}
      >>> steps = curriculum.batches(mixture.rows(corpora), mixture)
      >>> steps[1]["tokens"][:, 0].tolist(), steps[1]["corpus"].tolist()
      ([3, 5, 3, 3], [0, 1, 0, 0])
    """

    def __init__(
        self,
        corpora: Mapping[str, int | _sampler.SampleOrder],
        *,
        weights: Mapping[str, float | typing.Schedule],
        batch_size: int,
        seed: int,
        step_offset: int = 0,
        num_steps: int | None = None,
    ):
        if not 1 <= batch_size <= 2**29:
            raise ValueError(f"batch_size={batch_size} must lie in 1 to 2^29.")
        if seed < 0:
            raise ValueError(f"seed={seed} must not be negative.")
        if not corpora or set(corpora) != set(weights):
            raise ValueError(
                f"corpora has {sorted(corpora)} and weights {sorted(weights)}; they "
                f"must name the same corpora, at least one."
            )
        self.batch_size, self.seed = batch_size, seed
        self.names = tuple(sorted(corpora))
        table = _mixture_weights.table(weights, self.names, step_offset, num_steps)
        self._quotas = _quotas.Quotas(*table, batch_size)
        self._corpora = [_read(corpora, name, self) for name in self.names]
        self.sizes = tuple(corpus.num_samples for corpus in self._corpora)
        self.num_samples = sum(self.sizes)
        self._key = np.uint64(_permutation.key_of(seed, 8))
        self._start()

    def _start(self) -> None:
        super()._start()
        self._told = functools.lru_cache(maxsize=32)(self._tell)

    def __getstate__(self) -> dict[str, Any]:
        made = ("_batch", "_told")
        return {k: v for k, v in self.__dict__.items() if k not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def counts(self, step: int) -> np.ndarray:
        """Return the draws of each corpus before a step, int64[K]."""
        if step < 0:
            raise IndexError(f"step={step} must not be negative.")
        return self._quotas.counts(int(step))

    def difficulties(self, step: int) -> dict[str, Any]:
        """Return the shares at a step, and the difficulties of corpora with an order.

        Named ``share_CORPUS`` and ``CORPUS_METRIC``.
        """
        return dict(self._told(int(step)))

    def _tell(self, step: int) -> dict[str, Any]:
        shares = self._quotas.shares(step).tolist()
        told = {f"share_{n}": s for n, s in zip(self.names, shares, strict=True)}
        for name, corpus in zip(self.names, self._corpora, strict=True):
            more = corpus.difficulties(step)
            told |= {f"{name}_{metric}": value for metric, value in more.items()}
        return told

    def num_eligible(self, step: int) -> int:
        """Return the samples that may be drawn at a step."""
        shares = self._quotas.shares(step)
        pools = [corpus.num_eligible(step) for corpus in self._corpora]
        return sum(n for n, share in zip(pools, shares, strict=True) if share > 0)

    @property
    def fingerprint(self) -> str:
        """Return a sha256 that changes when the samples of any step do."""
        told = [self.names, self.batch_size, self.seed, self._quotas.unit]
        told += [corpus.told for corpus in self._corpora]
        tables = self._quotas.starts.tobytes() + self._quotas.rates.tobytes()
        return hashlib.sha256(repr(told).encode() + tables).hexdigest()

    def __repr__(self) -> str:
        return f"Mixture({self.fingerprint[:16]})"

    def rows(self, corpora: Mapping[str, Any]) -> "MixedRows":
        """Return the rows of the corpora, one after another.

        Args:
          corpora: by name, anything with ``__len__`` and ``__getitem__(i) -> dict of
            arrays``; all records have the same fields.

        Returns:
          Rows for ``curriculum.batches``. Their records have the field ``corpus``, its
          number, and ``sample_id``, the number within the corpus.

        Raises:
          ValueError: names or sizes that are not those of the mixture.
        """
        if set(corpora) != set(self.names):
            raise ValueError(
                f"There are rows of {sorted(corpora)}; the mixture is of "
                f"{list(self.names)}."
            )
        for name, size in zip(self.names, self.sizes, strict=True):
            if len(corpora[name]) != size:
                raise ValueError(
                    f"{name!r} has {len(corpora[name])} rows; the mixture counts on "
                    f"{size}."
                )
        return MixedRows([corpora[name] for name in self.names])

    def _make(self, step: int) -> np.ndarray:
        before, after = self.counts(step), self.counts(step + 1)
        slots = np.arange(self.batch_size, dtype=np.uint64)
        key = _permutation.mixed(np.array([step], np.uint64) + self._key)
        order = np.argsort(_permutation.mixed(slots + key), kind="stable")
        drawn, _ = _draws._dealt(before, after - before, order)
        samples = np.empty(self.batch_size, np.int64)
        first = 0
        for number, corpus in enumerate(self._corpora):
            if count := int(after[number] - before[number]):
                found = corpus.samples(int(before[number]), count)
                samples[drawn == number] = first + found
            first += corpus.num_samples
        samples.flags.writeable = False  # it is cached
        return samples


class MixedRows:
    """The rows of several corpora, one after another; see ``Mixture.rows``."""

    def __init__(self, corpora: list[Any]):
        self._corpora = corpora
        self._ends = list(itertools.accumulate(map(len, corpora)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"index={index} is outside {len(self)} rows.")
        number = bisect.bisect_right(self._ends, index)
        rows = self._corpora[number]
        own = int(index) - self._ends[number] + len(rows)
        return {"sample_id": np.int64(own), **rows[own], "corpus": np.int64(number)}


def _read(
    corpora: Mapping[str, Any], name: str, mixture: Mixture
) -> _reading.Plain | _reading.Paced:
    """Return how a corpus is read, or say why it cannot be."""
    corpus = corpora[name]
    if isinstance(corpus, int | np.integer) and corpus > 0:
        if len(corpora) == 1:
            return _reading.Alone(int(corpus), mixture.seed)
        # Another order for each, also where sizes are equal.
        place = mixture.names.index(name)
        return _reading.Plain(int(corpus), _permutation.key_of(mixture.seed, 9, place))
    if not isinstance(corpus, _sampler.SampleOrder) or isinstance(corpus, Mixture):
        raise ValueError(
            f"corpora[{name!r}]={corpus!r} must be its number of samples, at least 1, "
            f"or a SampleOrder over it."
        )
    if corpus.batch_size != mixture.batch_size:
        raise ValueError(
            f"The order of {name!r} has batch_size={corpus.batch_size}; give it that "
            f"of the mixture, {mixture.batch_size}: it is read at the mixture's steps."
        )
    if isinstance(corpus._draws, _draws.Parity):
        raise ValueError(
            f"The order of {name!r} has draw='parity', which counts whole batches of "
            f"its own; use 'stratified' or 'iid'."
        )
    column = mixture.names.index(name)
    starts = [mixture.counts(step)[column] for step in corpus._pool.starts.tolist()]
    return _reading.Paced(corpus, np.array(starts, np.int64))
