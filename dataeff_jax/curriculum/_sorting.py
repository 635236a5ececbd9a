"""Stable sorting of arrays on disk in bounded memory, and what a manifest tells."""

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

# Up to this many values are sorted in memory at once.
IN_MEMORY = 2**23
_NUM_BINS = 64


def order_dtype(num_samples: int) -> type:
    """Return the smaller of uint32 and uint64 that holds all sample numbers."""
    return np.uint32 if num_samples <= 2**32 else np.uint64


def write_order(values: np.ndarray, path: pathlib.Path) -> np.ndarray:
    """Write the stable argsort of ``values`` [N] as ``.npy``; return it, mapped.

    Long arrays are first cut by splitters into ranges of values that fit in memory,
    samples in order within each, and then sorted range by range.
    """
    size, dtype = len(values), order_dtype(len(values))
    out = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(size,))
    if size <= IN_MEMORY:
        out[:] = np.argsort(values, kind="stable")
    else:
        splitters = _splitters(values)
        counts = _partition(values, splitters, out)
        end = 0
        for part, count in enumerate(counts.tolist()):
            start, end = end, end + count
            if part % 2 == 0 and count > 1:  # odd parts hold one value only
                samples = np.array(out[start:end])
                out[start:end] = samples[np.argsort(values[samples], kind="stable")]
    out.flush()
    return out


def _splitters(values: np.ndarray) -> np.ndarray:
    """Return distinct values that cut ``values`` into parts of bounded size."""
    step = max(1, len(values) // 2**16)
    sample = np.sort(values[::step])
    parts = 2 * -(-len(values) // IN_MEMORY)
    return np.unique(sample[np.arange(1, parts) * len(sample) // parts])


def _partition(
    values: np.ndarray, splitters: np.ndarray, out: np.ndarray
) -> np.ndarray:
    """Write the samples grouped by part, in order within each; return the sizes.

    Part 2i lies below splitter i, part 2i + 1 equals it.
    """

    def parts_of(piece: slice) -> np.ndarray:
        left = np.searchsorted(splitters, values[piece], side="left")
        right = np.searchsorted(splitters, values[piece], side="right")
        return (left + right).astype(np.uint16)

    return group_samples(parts_of, len(values), 2 * len(splitters) + 1, out)


def group_sizes(
    groups_of: Callable[[slice], np.ndarray], num_samples: int, num_groups: int
) -> np.ndarray:
    """Return the number of samples in each group, int64[num_groups].

    Args:
      groups_of: the groups of a slice of samples, uint16; larger ones are left out.
      num_samples: samples, N.
      num_groups: groups, at most 2^16 - 1.
    """
    sizes = np.zeros(num_groups + 1, np.int64)
    for piece in _pieces(num_samples):
        groups = np.minimum(groups_of(piece), num_groups)
        sizes += np.bincount(groups, minlength=num_groups + 1)
    return sizes[:-1]


def group_samples(
    groups_of: Callable[[slice], np.ndarray],
    num_samples: int,
    num_groups: int,
    out: np.ndarray,
) -> np.ndarray:
    """Write the samples sorted by group, then by number, into ``out``.

    Returns the groups' sizes, int64[num_groups], whose sum is the length of ``out``
    that is written; see :func:`group_sizes`.
    """
    sizes = group_sizes(groups_of, num_samples, num_groups)
    places = np.cumsum(sizes) - sizes
    for piece in _pieces(num_samples):
        groups = np.minimum(groups_of(piece), num_groups)
        samples = np.argsort(groups, kind="stable")  # a radix sort for 16 bits
        begin = 0
        found = np.bincount(groups, minlength=num_groups)
        for group, count in enumerate(found[:num_groups].tolist()):
            chosen = samples[begin : begin + count]
            out[places[group] : places[group] + count] = chosen + piece.start
            places[group] += count
            begin += count
    return sizes


def _pieces(num_samples: int) -> Iterator[slice]:
    chunk = max(1, IN_MEMORY // 4)
    for start in range(0, num_samples, chunk):
        yield slice(start, min(start + chunk, num_samples))


def summary(values: np.ndarray, order: np.ndarray) -> dict[str, Any]:
    """Return minimum, maximum, quantiles 0 to 100 and a histogram of the values."""
    size = len(values)
    ranks = [max(1, -(-percentile * size // 100)) - 1 for percentile in range(101)]
    quantiles = values[order[ranks]].tolist()
    low, high = values[order[0]].item(), quantiles[-1]
    edges = np.linspace(low, high, _NUM_BINS + 1) if high > low else [low, low + 1]
    counts = np.zeros(len(edges) - 1, np.int64)
    for start in range(0, size, 2**22):
        counts += np.histogram(values[start : start + 2**22], edges)[0]
    return {
        "min": low,
        "max": high,
        "quantiles": quantiles,
        "histogram": {
            "edges": np.asarray(edges, float).tolist(),
            "counts": counts.tolist(),
        },
    }
