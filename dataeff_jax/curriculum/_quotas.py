"""How many draws each corpus of a mixture has had before a step, in closed form.

A run is cut into *segments* of constant weights. What a corpus is due before step t,
W_c(t), is then linear within a segment, and a table at the segments' starts gives it at
any step. Whole numbers C_c(t) have to follow it, add up to t B, and never fall.
Rounding each W_c(t) does neither. Rounding one of two does both, so corpora are halved
again and again: of the first L draws of a group, which are due at the time at which the
group is due L, its left half gets what it is due then, rounded to the nearest.

Every halving adds at most 1/2 to the distance from W: it is at most 1 for up to four
corpora and 1.5 for up to eight. Weights are whole numbers of a small unit, and all is
computed with integers, so nothing drifts.

References:
  Tijdeman, "The chairman assignment problem", 1980 (the problem)
"""

import bisect
import functools
from typing import Any

import numpy as np


class Quotas:
    """Counts of draws by corpus, with random access.

    A corpus of weight 0 gets no draw in that segment, not even one that it is due from
    before. Where a weight becomes 0, or stops being it, the halving starts anew, with
    what each corpus is still due.

    Args:
      starts: the first step of each segment, rising; starts[0] is 0. The last segment
        never ends.
      weights: float64[J, K], finite, not negative, a positive sum in each row.
      batch_size: draws a step, B.
    """

    def __init__(self, starts: np.ndarray, weights: np.ndarray, batch_size: int):
        self.starts, self.batch_size = np.asarray(starts, np.int64), batch_size
        draws = (int(self.starts[-1]) + 1) * batch_size
        bits = min(40, 61 - draws.bit_length(), 51 - batch_size.bit_length())
        if bits < 8:
            raise ValueError(
                f"The weights change at step {starts[-1]}, after {draws} draws; that "
                f"is too late to be counted."
            )
        self.unit = 1 << bits
        self.rates = _whole_rates(weights, batch_size * self.unit)
        steps = np.diff(self.starts)[:, None]
        due = np.cumsum(self.rates[:-1] * steps, axis=0)
        self.due = np.concatenate([np.zeros_like(self.rates[:1]), due])
        positive = self.rates > 0
        changed = (positive[1:] != positive[:-1]).any(1)
        self._firsts = [0, *(np.flatnonzero(changed) + 1).tolist()]
        self._eras: list[_Era] = []
        for number in range(len(self._firsts)):
            self._eras.append(self._era(number))
        self._start()

    def _start(self) -> None:
        self.counts = functools.lru_cache(maxsize=64)(self._counts)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "counts"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def _counts(self, step: int) -> np.ndarray:
        """Return the draws of each corpus before a step, int64[K]."""
        starts = self.starts[self._firsts]
        number = int(np.searchsorted(starts, step, side="right")) - 1
        return self._eras[max(number, 0)].counts(step)

    def shares(self, step: int) -> np.ndarray:
        """Return each corpus's share of the draws of a step, float64[K]."""
        segment = int(np.searchsorted(self.starts, step, side="right")) - 1
        return self.rates[segment] / (self.batch_size * self.unit)

    def _era(self, number: int) -> "_Era":
        """Return the era after those before it: where it starts, and what is due."""
        first = self._firsts[number]
        last = [*self._firsts, len(self.starts)][number + 1]
        had = np.zeros(self.rates.shape[1], np.int64)
        if number:
            had = self._eras[number - 1].counts(int(self.starts[first]))
        part = slice(first, last)
        return _Era(self, part, had)


class _Era:
    """Segments in which the same corpora have a weight."""

    def __init__(self, quotas: Quotas, part: slice, had: np.ndarray):
        self._size, self._unit = quotas.batch_size, quotas.unit
        self._starts = quotas.starts[part]
        self._had = had
        self._members = np.flatnonzero(quotas.rates[part][0])
        debts = (quotas.due[part][0] - had * self._unit)[self._members]
        # Those of weight 0 may be owed something, or have had too much: all share it.
        share, rest = divmod(int(debts.sum()), len(debts))
        debts -= share
        debts[:rest] -= 1
        due = quotas.due[part][:, self._members]
        before = [np.zeros((len(due), 1), np.int64)]
        self._due = np.cumsum(np.hstack([*before, due - due[0]]), axis=1)
        rates = quotas.rates[part][:, self._members]
        self._rates = np.cumsum(np.hstack([*before, rates]), axis=1)
        self._debts = np.concatenate([[0], np.cumsum(debts)])
        self._groups: dict[tuple[int, int], np.ndarray] = {}
        self._add_groups(0, len(self._members))

    def _add_groups(self, low: int, high: int) -> None:
        """Tabulate what groups are due, to find when they are due a draw."""
        if high - low > 1 and len(self._starts) > 1:
            self._groups[low, high] = self._due[:, high] - self._due[:, low]
        if high - low > 1:
            middle = (low + high) // 2
            self._add_groups(low, middle)
            self._add_groups(middle, high)

    def counts(self, step: int) -> np.ndarray:
        segment = bisect.bisect_right(self._starts, step) - 1
        draws = (step - int(self._starts[0])) * self._size
        time = (segment, step - int(self._starts[segment]), 1)
        counts = self._had.copy()
        todo = [(0, len(self._members), draws, time)]
        while todo:
            low, high, draws, time = todo.pop()
            if high == low + 1:
                counts[self._members[low]] += draws
                continue
            middle = (low + high) // 2
            left = self._rounded(low, middle, time, draws)
            todo.append((low, middle, left, self._time(low, middle, left)))
            right = draws - left
            todo.append((middle, high, right, self._time(middle, high, right)))
        counts.flags.writeable = False  # it is cached
        return counts

    def _time(self, low: int, high: int, draws: int) -> tuple[int, int, int]:
        """Return when a group is due so many draws: segment, and steps as n / d."""
        if high == low + 1:
            return 0, 0, 1  # not asked for
        due = draws * self._unit - int(self._debts[high] - self._debts[low])
        if due <= 0:
            return 0, 0, 1
        segment, before = 0, 0
        if (table := self._groups.get((low, high))) is not None:
            segment = len(table) - 1
            if due < int(table[-1]):
                segment = int(np.searchsorted(table, due, side="right")) - 1
            before = int(table[segment])
        rates = self._rates[segment]
        return segment, due - before, int(rates[high] - rates[low])

    def _rounded(
        self, low: int, high: int, time: tuple[int, int, int], draws: int
    ) -> int:
        """Return the draws of a left half: what it is due at a time, to the nearest."""
        segment, above, below = time
        due = int(self._due[segment][high] - self._due[segment][low])
        due += int(self._debts[high] - self._debts[low])
        rate = int(self._rates[segment][high] - self._rates[segment][low])
        whole = 2 * below * self._unit
        count = (2 * (below * due + rate * above) + below * self._unit) // whole
        return min(max(count, 0), draws)


def _whole_rates(weights: np.ndarray, total: int) -> np.ndarray:
    """Return integers in proportion to the weights, each row of sum ``total``."""
    scaled = weights / weights.max(axis=1, keepdims=True)  # the sum may be infinite
    edges = np.cumsum(scaled, axis=1)
    edges = np.rint(edges / edges[:, -1:] * total).astype(np.int64)
    rates = np.diff(edges, axis=1, prepend=0)
    lost = (weights > 0) & (rates == 0)  # whatever is positive is drawn some day
    rows = np.arange(len(rates))
    rates[rows, rates.argmax(axis=1)] -= lost.sum(axis=1)
    return rates + lost
