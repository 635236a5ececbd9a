"""The records of a batch by tokens, of one length and with rows of padding."""

from collections.abc import Callable
from typing import Any

import numpy as np

from dataeff_jax.data import _batches


class Batch:
    """Maps a step to the local part of its batch; pickles."""

    def __init__(
        self,
        budget: Any,
        rows: Any,
        process_index: int,
        process_count: int,
        transform: Callable[[dict, int], dict] | None,
        field: str,
    ):
        self._budget, self._rows, self._field = budget, rows, field
        self._process = process_index, process_count
        self._transform = transform

    def __call__(self, step: int) -> dict[str, np.ndarray]:
        samples, length = self._budget[step], self._budget.length_at(step)
        slots = _batches._slots(len(samples), *self._process)
        told = {"step": np.int64(step), "length": np.int64(length)}
        records = [self._record(samples, slot, length, step) for slot in slots]
        return _batches.stack([{**record, **told} for record in records])

    def _record(
        self, samples: np.ndarray, slot: int, length: int, step: int
    ) -> dict[str, Any]:
        sample = int(samples[slot])
        row = int(samples[0]) if sample < 0 else sample
        record = {"sample_id": np.int64(row), **self._rows[row]}
        if self._transform is not None:
            record = self._transform(record, step)
        if "weights" not in record:
            ones = np.ones(np.shape(_batches._targets(record)), np.float32)
            record = {**record, "weights": ones}
        size = np.shape(record[self._field])[0]
        record = {name: _fitted(array, size, length) for name, array in record.items()}
        if sample < 0:
            record["sample_id"] = np.int64(-1)
            record["weights"] = np.zeros_like(record["weights"])
        return record


def _fitted(array: Any, size: int, length: int) -> Any:
    """Cut the first axis to a length, or fill it up with 0, if it is of ``size``."""
    if np.ndim(array) == 0 or len(array) != size:
        return array
    array = np.asarray(array)[:length]
    rest = [(0, length - len(array)), *[(0, 0)] * (array.ndim - 1)]
    return np.pad(array, rest) if len(array) < length else array
