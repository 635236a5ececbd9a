"""Parts of a data set by difficulty: what a mixture weighs against each other."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from dataeff_jax.curriculum import _eligibility, _index


def percentile_buckets(
    index: _index.DifficultyIndex, name: str, *, borders: Sequence[float]
) -> dict[str, np.ndarray]:
    """Cuts a data set into parts of rising difficulty.

    Args:
      index: the difficulties.
      name: of the metric.
      borders: percentiles between 0 and 100 at which to cut, rising.

    Returns:
      By name, ``METRIC_LOW_HIGH``, the samples of each part from easy to hard, int64.
      Equal values are told apart by their position in the data set.

    Raises:
      ValueError: an unknown metric, borders that do not rise, or an empty part.

    Example:
      >>> import tempfile
      >>> from dataeff_jax import curriculum
      >>> metric = curriculum.function_metric(
      ...     lambda record: record, name="loss", dtype="int64")
      >>> index = curriculum.analyze([5, 1, 9, 2], [metric], tempfile.mkdtemp())
      >>> parts = curriculum.percentile_buckets(index, "loss", borders=(50,))
      >>> {name: samples.tolist() for name, samples in parts.items()}
      {'loss_0_50': [1, 3], 'loss_50_100': [0, 2]}
    """
    order = index.order(name)
    edges = [0, *borders, 100]
    counts = [_eligibility.percentile_count(edge, len(order)) for edge in edges]
    counts[0] = 0
    if not all(low < high for low, high in itertools.pairwise(edges)):
        raise ValueError(f"borders={tuple(borders)} must rise between 0 and 100.")
    if (np.diff(counts) < 1).any():
        raise ValueError(
            f"borders={tuple(borders)} leave a part of {len(order)} samples empty; use "
            f"fewer."
        )
    return {
        f"{name}_{edges[i]:g}_{edges[i + 1]:g}": order[
            counts[i] : counts[i + 1]
        ].astype(np.int64)
        for i in range(len(edges) - 1)
    }


class PickedRows:
    """Some samples of any rows, as rows.

    Args:
      rows: the whole.
      samples: which of them, integers [n].

    Raises:
      ValueError: no samples, or samples that are not in the rows.

    Example:
      >>> from dataeff_jax import curriculum
      >>> rows = [{"tokens": np.full(2, i)} for i in range(9)]
      >>> picked = curriculum.PickedRows(rows, [7, 3])
      >>> len(picked), picked[1]["tokens"].tolist(), int(picked[1]["sample_id"])
      (2, [3, 3], 3)
    """

    def __init__(self, rows: Any, samples: Any):
        self._rows, self._samples = rows, np.asarray(samples)
        found = self._samples
        if found.ndim != 1 or not len(found) or found.dtype.kind not in "iu":
            raise ValueError("samples must be integers [n], at least one.")
        if found.min() < 0 or found.max() >= len(rows):
            raise ValueError(
                f"samples must lie in 0 to {len(rows) - 1}; they are from "
                f"{found.min()} to {found.max()}."
            )

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the record, with the ``sample_id`` that it has in the whole."""
        if not 0 <= index < len(self):
            raise IndexError(f"index={index} is outside {len(self)} rows.")
        sample = int(self._samples[index])
        return {"sample_id": np.int64(sample), **self._rows[sample]}
