"""Keyed permutations of ranges, of many elements at once and without an array of them.

References:
  Black, Rogaway, "Ciphers with arbitrary finite domains", 2002 (the Feistel network
  over a product of two ranges, and walking until the result lies inside)
"""

import numpy as np

_ROUNDS = 3  # each shifts both halves


def mixed(values: np.ndarray) -> np.ndarray:
    """Return well-mixed uint64 of uint64 (the finisher of splitmix64)."""
    x = np.asarray(values, np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key_of(*numbers: int) -> int:
    """Return a 64-bit key of integers that are not negative."""
    state = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return int(state[0])


def permuted(indices: np.ndarray, lengths: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return where keyed permutations of ``range(length)`` send indices, int64[n].

    Args:
      indices: int64[n], index i in ``range(lengths[i])``.
      lengths: int64[n], at most 2^52.
      keys: uint64[n]; one permutation for each (length, key).
    """
    lengths = np.asarray(lengths, np.uint64)
    left = np.ceil(np.sqrt(lengths.astype(np.float64))).astype(np.uint64)
    right = (lengths + left - np.uint64(1)) // left
    result = _network(np.asarray(indices, np.uint64), left, right, keys)
    # The domain left * right is hardly larger than the range: few walk, and not long.
    outside = np.flatnonzero(result >= lengths)
    while len(outside):
        walked = _network(result[outside], left[outside], right[outside], keys[outside])
        result[outside] = walked
        outside = outside[walked >= lengths[outside]]
    return result.astype(np.int64)


def _network(
    values: np.ndarray, left: np.ndarray, right: np.ndarray, keys: np.ndarray
) -> np.ndarray:
    """Permute ``range(left * right)``: each half in turn is shifted by the other."""
    high, low = values // right, values % right
    for number in range(_ROUNDS):
        salt = keys + np.uint64((number + 1) * 0x9E3779B97F4A7C15 % 2**64)
        high = (high + mixed(low + salt) % left) % left
        low = (low + mixed(high ^ ~salt) % right) % right
    return high * right + low
