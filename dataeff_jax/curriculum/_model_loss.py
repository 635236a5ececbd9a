"""Difficulty under a model: its loss or its perplexity, computed on the device."""

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dataeff_jax import distributed, typing
from dataeff_jax.curriculum import _difficulty, _records


class _ModelLoss(_difficulty.Metric):
    def __init__(
        self, function: Any, params: Any, name: str, rows_a_batch: int, version: str
    ):
        if not callable(function):
            raise ValueError(f"{function=!r} must be callable.")
        if not name.isidentifier():
            raise ValueError(f"name={name!r} must be a word: letters, digits and _.")
        if rows_a_batch < 1:
            raise ValueError(f"batch_size={rows_a_batch} must be at least 1.")
        self.name, self.dtype = name, "float32"
        # While the device computes a batch, the next one is read.
        self.batch_size = 4 * rows_a_batch
        self._rows_a_batch = rows_a_batch
        self._function, self._params, self._version = function, params, version
        self._compiled = jax.jit(function)
        self._shapes: dict[str, tuple[int, ...]] | None = None
        self._fingerprint: str | None = None

    @property
    def fingerprint(self) -> str:
        """Return what changes with the parameters, the function or the batch size."""
        if self._fingerprint is None:
            described = _difficulty.described(self._function)
            text = [self.name, self._rows_a_batch, self._version, described]
            text.append(_params_digest(self._params))
            self._fingerprint = hashlib.sha256(repr(text).encode()).hexdigest()
        return self._fingerprint

    def values(self, records: _records.Records, prepared: Any) -> np.ndarray:
        rows, start, stop = list(records), records.start, records.stop
        size, pending = self._rows_a_batch, []
        for begin in range(start - start % size, stop, size):
            # Row i takes place i mod B whatever else is in the batch: a device may
            # round differently at another place, and shards start anywhere.
            places = np.arange(begin, begin + size)
            inside = (places >= start) & (places < stop)
            filled = np.clip(places, start, stop - 1)  # neighbours fill the rest
            batch = self._batch([rows[i - start] for i in filled], filled)
            pending.append((self._compiled(self._params, batch), inside))
        found = [self._checked(losses)[inside] for losses, inside in pending]
        return np.concatenate(found)

    def _batch(self, rows: list[Any], samples: np.ndarray) -> dict[str, np.ndarray]:
        """Stack the fields of some rows, all of one shape."""
        for row, sample in zip(rows, samples, strict=True):
            shapes = self._shapes_of(row, sample)
            self._shapes = shapes if self._shapes is None else self._shapes
            if shapes != self._shapes:
                raise ValueError(
                    f"Sample {sample} has fields of shapes {shapes}, but samples "
                    f"before it {self._shapes}; {self.name} needs one shape: pack the "
                    f"documents into rows, or pad them with weights of 0."
                )
        names = self._shapes or ()
        return {name: np.stack([row[name] for row in rows]) for name in names}

    def _shapes_of(self, row: Any, sample: int) -> dict[str, tuple[int, ...]]:
        if not isinstance(row, dict):
            raise ValueError(
                f"Sample {sample} is {type(row).__name__}; {self.name} needs records "
                f"that are dicts of arrays."
            )
        fields = {k: v for k, v in row.items() if k not in distributed.HOST_KEYS}
        return {name: np.shape(value) for name, value in fields.items()}

    def _checked(self, losses: Any) -> np.ndarray:
        found = np.asarray(losses)
        if found.shape != (self._rows_a_batch,):
            raise ValueError(
                f"The function of {self.name} gave shape {found.shape} for a batch of "
                f"{self._rows_a_batch} rows; it must give one number a row."
            )
        return found.astype(np.float32)

    def __reduce__(self):
        raise TypeError("it computes on this process's devices")


class _ModelPerplexity(_ModelLoss):
    def values(self, records: _records.Records, prepared: Any) -> np.ndarray:
        with np.errstate(over="ignore"):  # the analysis names the sample
            return np.exp(super().values(records, prepared).astype(np.float64))


def _params_digest(params: Any) -> str:
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.asarray(leaf)
        about = f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}"
        digest.update(about.encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def model_loss(
    function: Callable[[Any, typing.Batch], Any],
    *,
    params: Any,
    name: str = "loss",
    batch_size: int = 32,
    version: str = "",
) -> _difficulty.Metric:
    """The loss of a sample under a model, for example one trained on the same data.

    The function is compiled once, for batches of one shape on the default device; the
    last one is filled up. The values do not depend on the analysis's shards. Other
    processes cannot compute it: use ``num_workers=0``.

    Args:
      function: ``(params, batch) -> float[B]``, a loss for each row, which depends on
        that row alone; the batch holds the records' fields as arrays [B, ...]. For
        the models here ``models.GPT.row_losses``, with the model as ``params``.
      params: a tree of arrays, all that the function depends on.
      name: of the metric, a word.
      batch_size: rows on the device at once, B.
      version: change it when the function gives other values and its source code does
        not show it, because of what it calls or captures.

    Returns:
      The metric, float32. Records are dicts of arrays whose shapes are the same for all
      samples.

    Raises:
      ValueError: no function, or a name or a size that is not allowed; in the analysis,
        samples of different shapes.

    Example:
      >>> from dataeff_jax import curriculum
      >>> metric = curriculum.model_loss(
      ...     lambda scale, batch: scale * batch["tokens"].mean(axis=1),
      ...     params=np.float32(2.0), batch_size=2)
      >>> rows = [{"tokens": np.array([i, i + 1])} for i in range(3)]
      >>> metric.values(curriculum.Records(rows, 0, 3), None).tolist()
      [1.0, 3.0, 5.0]
    """
    return _ModelLoss(function, params, name, batch_size, version)


def model_perplexity(
    function: Callable[[Any, typing.Batch], Any],
    *,
    params: Any,
    name: str = "perplexity",
    batch_size: int = 32,
    version: str = "",
) -> _difficulty.Metric:
    """The perplexity of a sample under a model, ``exp(loss)``.

    It orders samples as the loss does, in units that thresholds are often given in.

    Args:
      function: ``(params, batch) -> float[B]``, as of :func:`model_loss`: the loss.
      params: a tree of arrays, all that the function depends on.
      name: of the metric, a word.
      batch_size: rows on the device at once, B.
      version: as of :func:`model_loss`.

    Returns:
      The metric, float32; see :func:`model_loss`.

    Raises:
      ValueError: as :func:`model_loss`; in the analysis, a loss above 88.

    Example:
      >>> from dataeff_jax import curriculum
      >>> metric = curriculum.model_perplexity(
      ...     lambda params, batch: batch["loss"], params=(), batch_size=2)
      >>> rows = [{"loss": np.float32(0.0)}, {"loss": np.log(np.float32(8.0))}]
      >>> metric.values(curriculum.Records(rows, 0, 2), None).round(3).tolist()
      [1.0, 8.0]
    """
    return _ModelPerplexity(function, params, name, batch_size, version)
