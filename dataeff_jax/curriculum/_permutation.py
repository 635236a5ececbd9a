"""Keyed permutations of ranges, of many elements at once and without an array of them.

References:
  Black, Rogaway, "Ciphers with arbitrary finite domains", 2002 (the Feistel network
  over a product of two ranges, here the rows and columns of a grid, and walking until
  the result lies inside)
"""

from typing import NamedTuple

import numpy as np

# Any odd numbers with mixed bits; each round shifts rows and columns.
_ROUNDS = (
    (0xBF58476D1CE4E5B9, 0x9E3779B97F4A7C15),
    (0xD6E8FEB86659FD93, 0xA24BAED4963EE407),
    (0x9FB21C651E98DF25, 0xC2B2AE3D27D4EB4F),
)
_FEWER_ROWS = np.arange(64, dtype=np.uint64)


def mixed(values: np.ndarray) -> np.ndarray:
    """Return well-mixed uint64 of uint64 (the finisher of splitmix64)."""
    x = np.array(values, np.uint64)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def key_of(*numbers: int) -> int:
    """Return a 64-bit key of integers that are not negative."""
    state = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return int(state[0])


class Grid(NamedTuple):
    """Ranges laid out as grids that are a few cells larger; arrays of one shape."""

    lengths: np.ndarray  # uint64, of the ranges
    rows: np.ndarray  # uint64
    columns: np.ndarray  # uint64, rows * columns >= lengths

    def take(self, places: np.ndarray) -> "Grid":
        """Return those at some places."""
        return Grid(*(part.take(places) for part in self))


def grid(lengths: np.ndarray) -> Grid:
    """Return nearly square grids for ``range(length)``, lengths [n] up to 2^52.

    Of some shapes the one with the fewest cells too many, because each of them makes
    somebody walk.
    """
    lengths = np.asarray(lengths, np.uint64)[:, None]
    square = np.ceil(np.sqrt(lengths.astype(np.float64))).astype(np.uint64)
    rows = square - np.minimum(square // np.uint64(4), _FEWER_ROWS)
    columns = (lengths + rows - np.uint64(1)) // rows
    best = np.arange(len(rows)), np.argmin(rows * columns, axis=1)
    return Grid(lengths[:, 0], rows[best], columns[best])


def permuted(indices: np.ndarray, lengths: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return where keyed permutations of ``range(length)`` send indices, int64[n].

    Args:
      indices: int[n], index i in ``range(lengths[i])``.
      lengths: int[n], at most 2^52.
      keys: uint64[n], well mixed; one permutation for each (length, key).
    """
    different, which = np.unique(lengths, return_inverse=True)
    return walked(np.asarray(indices, np.uint64), grid(different).take(which), keys)


def walked(indices: np.ndarray, grids: Grid, keys: np.ndarray) -> np.ndarray:
    """Return what :func:`permuted` does, for grids that are known, uint64 indices."""
    result = _network(indices, grids, keys)
    outside = np.flatnonzero(result >= grids.lengths)
    while len(outside):
        there = grids.take(outside)
        again = _network(result[outside], there, keys[outside])
        result[outside] = again
        outside = outside[again >= there.lengths]
    return result.view(np.int64)


def _network(values: np.ndarray, grids: Grid, keys: np.ndarray) -> np.ndarray:
    """Permute the cells of a grid: row and column in turn are shifted by the other."""
    row = values // grids.columns
    column = values - row * grids.columns
    for first, second in _ROUNDS:
        row = _shifted(row, grids.rows, column + keys, first)
        column = _shifted(column, grids.columns, row + keys, second)
    return row * grids.columns + column


def _shifted(
    values: np.ndarray, lengths: np.ndarray, by: np.ndarray, odd: int
) -> np.ndarray:
    """Shift values around in ``range(length)`` by a hash of ``by``, which is used up.

    Neither the hash nor the shift divides, which takes longer than all the rest: the
    hash's upper 32 bits are scaled, and of a sum below twice the length, and that less
    the length, the one in the range is the smaller, as unsigned numbers wrap around.
    """
    by *= np.uint64(odd)
    by ^= by >> np.uint64(32)
    by *= np.uint64(0x94D049BB133111EB)
    by >>= np.uint64(32)
    by *= lengths
    by >>= np.uint64(32)
    by += values
    return np.minimum(by, by - lengths)
