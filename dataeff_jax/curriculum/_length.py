"""Shorter sequences out of full rows: cut, split, or split by the attention mask.

Pure functions of a batch and a length L, for arrays of NumPy [B, S, ...]. A length of S
or more changes nothing: no padding is invented.

References:
  Li et al., "The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup for
    Training GPT Models", https://arxiv.org/abs/2108.06084, 2021
  Li et al., "DeepSpeed Data Efficiency", https://arxiv.org/abs/2212.03597, 2022
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dataeff_jax import typing

Axes = Mapping[str, tuple[int, ...]]


def truncate(
    batch: typing.Batch,
    *,
    length: int,
    field: str = "tokens",
    axes: Axes | None = None,
) -> typing.Batch:
    """Keeps the first ``length`` positions of every row.

    Every field is cut along its sequence axes: axis 1 of [B, S]; the only axis of size
    S of a field with more axes; the last two of [B, H, S, S], an attention bias. Fields
    without an axis of size S stay as they are. What is cut off is not used.

    Args:
      batch: arrays [B, ...].
      length: L, at least 1; S or more leaves the batch as it is.
      field: whose axis 1 tells S.
      axes: sequence axes of fields for which the rule is wrong or not clear; ``()``
        leaves a field alone.

    Returns:
      A batch of the same fields, with L in place of S.

    Raises:
      ValueError: a length below 1, a batch without ``field``, or a field whose axes are
        not clear.

    Example:
      >>> from dataeff_jax import curriculum
      >>> batch = {"tokens": np.arange(8).reshape(2, 4), "sample_id": np.arange(2)}
      >>> short = curriculum.truncate(batch, length=3)
      >>> short["tokens"].tolist(), short["sample_id"].tolist()
      ([[0, 1, 2], [4, 5, 6]], [0, 1])
    """
    size = _checked_size(batch, length, field)
    if length >= size:
        return batch
    return {
        name: _cut(array, _sequence_axes(name, array, size, axes), slice(length))
        for name, array in batch.items()
    }


def reshape(
    batch: typing.Batch,
    *,
    length: int,
    field: str = "tokens",
    axes: Axes | None = None,
) -> typing.Batch:
    """Splits every row into rows of ``length`` positions, without overlap.

    A row of S gives floor(S / L) rows, which follow each other in the batch; the rest,
    the last S mod L positions of each row, is not used. Pieces are told apart as rows
    are: ``positions`` restart at 0 and ``segment_ids`` at 1. Fields without a sequence
    axis are repeated.

    Args:
      batch: arrays [B, ...].
      length: L, at least 1; S or more leaves the batch as it is.
      field: whose axis 1 tells S.
      axes: as for :func:`truncate`; of fields with two sequence axes, the blocks on the
        diagonal are kept.

    Returns:
      A batch of the same fields, of B floor(S / L) rows of L.

    Raises:
      ValueError: as for :func:`truncate`.

    Example:
      >>> from dataeff_jax import curriculum
      >>> batch = {"tokens": np.arange(10).reshape(2, 5), "sample_id": np.arange(2)}
      >>> short = curriculum.reshape(batch, length=2)
      >>> short["tokens"].tolist(), short["sample_id"].tolist()
      ([[0, 1], [2, 3], [5, 6], [7, 8]], [0, 0, 1, 1])
    """
    size = _checked_size(batch, length, field)
    if length >= size:
        return batch
    result = {
        name: _split(array, _sequence_axes(name, array, size, axes), size, length)
        for name, array in batch.items()
    }
    if "positions" in batch:
        result["positions"] = _restarted(result["positions"])
    if "segment_ids" in batch:
        result["segment_ids"] = _renumbered(result["segment_ids"])
    return result


def segment(
    batch: typing.Batch,
    *,
    length: int,
    field: str = "tokens",
    axes: Axes | None = None,
) -> typing.Batch:
    """Splits every row as :func:`reshape` does, by the attention mask alone.

    The shapes stay, so one compilation serves all lengths, at the cost of full rows:
    ``segment_ids`` keep attention inside the pieces, ``positions`` restart in each, and
    the rest has segment 0 and weight 0. The loss is that of :func:`reshape`.

    Args:
      batch: arrays [B, ...].
      length: L, at least 1; S or more leaves the batch as it is.
      field: whose axis 1 tells S.
      axes: as for :func:`truncate`.

    Returns:
      The batch with new ``segment_ids`` and ``positions`` int32[B, S], and ``weights``
      where it has them or there is a rest.

    Raises:
      ValueError: as for :func:`truncate`.

    Example:
      >>> from dataeff_jax import curriculum
      >>> batch = {"tokens": np.arange(5).reshape(1, 5)}
      >>> for name, array in curriculum.segment(batch, length=2).items():
      ...     print(f"{name:11}", array.tolist())
      tokens      [[0, 1, 2, 3, 4]]
      segment_ids [[1, 1, 2, 2, 0]]
      positions   [[0, 1, 0, 1, 0]]
      weights     [[1.0, 1.0, 1.0, 1.0, 0.0]]
    """
    size = _checked_size(batch, length, field)
    if length >= size:
        return batch
    rows = len(batch[field])
    told = {k: batch[k] for k in (field, "segment_ids", "positions") if k in batch}
    pieces = reshape(told, length=length, field=field, axes=axes)
    shape = pieces[field].shape[:2]
    ids = pieces.get("segment_ids", np.ones(shape, np.int32)).reshape(rows, -1, length)
    # Segments of a row count on from piece to piece.
    before = np.cumsum(ids.max(axis=2), axis=1) - ids.max(axis=2)
    ids = np.where(ids > 0, ids + before[..., None], 0)
    positions = pieces.get("positions", np.broadcast_to(np.arange(length), shape))
    result = {**batch, "segment_ids": _filled(ids, rows, size)}
    result["positions"] = _filled(positions, rows, size)
    used = size // length * length
    if "weights" in batch or used < size:
        weights = np.array(batch.get("weights", np.ones((rows, size))), np.float32)
        weights[:, used:] = 0
        result["weights"] = weights
    return result


def _filled(pieces: np.ndarray, rows: int, size: int) -> np.ndarray:
    """Lay pieces side by side again, int32[B, S], with zeros for the rest."""
    flat = pieces.reshape(rows, -1).astype(np.int32)
    return np.pad(flat, ((0, 0), (0, size - flat.shape[1])))


def _checked_size(batch: typing.Batch, length: int, field: str) -> int:
    if field not in batch:
        raise ValueError(
            f"The batch has no field {field!r}, which tells the length; it has: "
            f"{', '.join(sorted(batch)) or 'none'}. Name another with field=..."
        )
    if length < 1:
        raise ValueError(f"length={length} must be at least 1.")
    if np.ndim(batch[field]) < 2:
        raise ValueError(
            f"{field!r} has shape {np.shape(batch[field])}; it must be [B, S, ...]."
        )
    return batch[field].shape[1]


def _sequence_axes(
    name: str, array: Any, size: int, axes: Axes | None
) -> tuple[int, ...]:
    """Return the axes of a field that run along the sequence."""
    shape = np.shape(array)
    if axes is not None and name in axes:
        wrong = [a for a in axes[name] if not 0 < a < len(shape) or shape[a] != size]
        if wrong:
            raise ValueError(
                f"axes[{name!r}]={axes[name]} do not all have {size} positions: the "
                f"shape is {shape}, and axis 0 is the row."
            )
        return tuple(axes[name])
    found = tuple(axis for axis in range(1, len(shape)) if shape[axis] == size)
    if len(found) < 2 or (len(shape) == 4 and found == (2, 3)):
        return found
    raise ValueError(
        f"{name!r} of shape {shape} has several axes of {size}, so it is not clear "
        f"which to cut; pass axes={{{name!r}: (...)}}."
    )


def _cut(array: Any, axes: tuple[int, ...], piece: slice) -> Any:
    if not axes:
        return array
    return array[tuple(piece if a in axes else slice(None) for a in range(array.ndim))]


def _split(array: Any, axes: tuple[int, ...], size: int, length: int) -> np.ndarray:
    """Return the pieces of every row as rows, [B k, ...]."""
    count = size // length
    if not axes:
        return np.repeat(array, count, axis=0)
    pieces = [
        _cut(array, axes, slice(p * length, (p + 1) * length)) for p in range(count)
    ]
    return np.stack(pieces, axis=1).reshape(-1, *pieces[0].shape[1:])


def _restarted(positions: np.ndarray) -> np.ndarray:
    """Let the run that a piece begins with, which may be cut, start at 0."""
    jumps = np.diff(positions, axis=1, prepend=positions[:, :1] - 1) != 1
    first = np.cumsum(jumps, axis=1) == 0
    return np.where(first, positions - positions[:, :1], positions)


def _renumbered(segment_ids: np.ndarray) -> np.ndarray:
    """Let a piece's segments count from 1; 0 stays padding."""
    first = np.maximum(segment_ids[:, :1], 1)
    return np.where(segment_ids > 0, segment_ids - first + 1, 0)
