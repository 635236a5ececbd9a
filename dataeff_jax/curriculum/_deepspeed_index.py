"""The index files that DeepSpeed's analyzer wrote, read into an index of this library.

For a metric M it writes two pairs of files, ``.idx`` and ``.bin``. Row j of
``M_index_to_metric`` is the j-th smallest value, row j of ``M_index_to_sample`` holds
the samples that have it. An ``.idx`` file is, all little-endian,

    9 bytes "MMIDIDX" and two zeros, uint64 version 1, uint8 code of the type,
    uint64 rows n, uint64 documents d, int32[n] sizes, int64[n] byte offsets, int64[d]

and the ``.bin`` file holds the rows' numbers end to end.
"""

import hashlib
import os
import pathlib
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from dataeff_jax.curriculum import _analyzer, _difficulty, _index, _records

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<u2", 7: "<u4", 8: "<u8"}


def import_deepspeed_index(
    paths: Mapping[str, tuple[str | os.PathLike, str | os.PathLike]],
    directory: str | os.PathLike,
    *,
    overwrite: bool = False,
) -> _index.DifficultyIndex:
    """Makes an index of the files that DeepSpeed's analyzer wrote.

    Equal difficulties are ordered by sample; the original's percentiles cut them in the
    order of its file, which is the same where it went through the samples in order.
    Memory is 8 bytes a sample and metric.

    Args:
      paths: by metric, ``(index_to_sample, index_to_metric)``, without ``.idx`` and
        ``.bin``: what its configuration calls ``index_to_sample_path`` and
        ``index_to_metric_path``. Not the file that is merged by percentiles, which has
        lost the values.
      directory: of the index; made by this call.
      overwrite: replace an index that is there.

    Returns:
      The index, with the metrics' names of ``paths``, int64.

    Raises:
      ValueError: no metric, a missing, cut or foreign file, or samples that are missing
        or told twice; the message names file and numbers.

    Example:
      >>> import pathlib, struct, tempfile
      >>> from dataeff_jax import curriculum
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> def write(name, rows):  # int64, code 5
      ...     sizes = [len(row) for row in rows]
      ...     head = struct.pack("<9sQBQQ", b"MMIDIDX", 1, 5, len(rows), 0)
      ...     ends = 8 * (np.cumsum(sizes) - sizes)
      ...     body = np.array(sizes, "<i4").tobytes() + ends.astype("<i8").tobytes()
      ...     _ = (folder / f"{name}.idx").write_bytes(head + body)
      ...     _ = (folder / f"{name}.bin").write_bytes(np.concatenate(rows).tobytes())
      >>> write("samples", [[1], [0, 2]])
      >>> write("values", [[5], [8]])
      >>> pair = (folder / "samples", folder / "values")
      >>> index = curriculum.import_deepspeed_index({"seqlen": pair}, folder / "index")
      >>> index.values("seqlen").tolist()
      [8, 5, 8]
    """
    if not paths:
        raise ValueError("paths is empty; give at least one metric's files.")
    columns = {name: _values(*pair) for name, pair in paths.items()}
    sizes = {name: len(values) for name, values in columns.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"The metrics are of different numbers of samples: {sizes}.")
    metrics = [_Column(name) for name in columns]
    return _analyzer.analyze(_Columns(columns), metrics, directory, overwrite=overwrite)


class _Columns:
    """Values by metric as records."""

    def __init__(self, columns: dict[str, np.ndarray]):
        self._columns = columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, sample: int) -> dict[str, Any]:
        return {name: column[sample] for name, column in self._columns.items()}

    def read_range(self, start: int, stop: int) -> dict[str, np.ndarray]:
        return {name: column[start:stop] for name, column in self._columns.items()}

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name in sorted(self._columns):
            digest.update(f"{name} {len(self)} ".encode())
            digest.update(self._columns[name].data)
        return digest.hexdigest()


class _Column(_difficulty.Metric):
    """A value that was computed before."""

    def __init__(self, name: str):
        self.name = name

    def values(self, records: _records.Records, prepared: Any) -> np.ndarray:
        return records.flat(self.name)[0]


def _values(
    sample_path: str | os.PathLike, metric_path: str | os.PathLike
) -> np.ndarray:
    """Return the value of every sample, int64[N]."""
    samples, sizes = read_rows(sample_path)
    values, value_sizes = read_rows(metric_path)
    if (value_sizes != 1).any():
        raise ValueError(f"{metric_path} has rows of several values; each must be one.")
    if len(values) != len(sizes):
        raise ValueError(
            f"{sample_path} has {len(sizes)} rows and {metric_path} {len(values)}, one "
            f"a value: they are not of one metric, or the first is merged by "
            f"percentiles; give the file that is not."
        )
    count = len(samples)
    outside = (samples < 0) | (samples >= count)
    if outside.any():
        raise ValueError(
            f"{sample_path} holds sample {samples[outside][0]} among {count} samples; "
            f"they must be 0 to {count - 1}, each once."
        )
    times = np.bincount(samples.astype(np.int64), minlength=count)
    if count and times.max() > 1:
        raise ValueError(f"{sample_path} holds sample {times.argmax()} twice or more.")
    if values.dtype == np.uint64 and len(values) and values.max() >= 2**63:
        raise ValueError(f"{metric_path} holds {values.max()}, more than int64 does.")
    result = np.empty(count, np.int64)
    result[samples.astype(np.int64)] = np.repeat(values.astype(np.int64), sizes)
    return result


def read_rows(prefix: str | os.PathLike) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of all rows end to end, mapped, and the rows' sizes."""
    prefix = os.fspath(prefix)
    index, content = pathlib.Path(f"{prefix}.idx"), pathlib.Path(f"{prefix}.bin")
    for path in (index, content):
        if not path.is_file():
            raise ValueError(f"{path} does not exist; give the path without .idx.")
    told = index.read_bytes()
    if len(told) < _HEADER.size or told[:9] != _MAGIC:
        raise ValueError(
            f"{index} is no index of DeepSpeed's analyzer: its first bytes are "
            f"{told[:9]!r}, not {_MAGIC!r}."
        )
    _, version, code, num_rows, num_documents = _HEADER.unpack_from(told)
    if version != 1 or code not in _DTYPES:
        raise ValueError(
            f"{index} has version {version} and type {code}; version 1 and the types "
            f"{', '.join(map(str, _DTYPES))} can be read."
        )
    expected = _HEADER.size + 12 * num_rows + 8 * num_documents
    if len(told) != expected:
        raise ValueError(
            f"{index} has {len(told)} bytes, its {num_rows} rows and {num_documents} "
            f"documents need {expected}: it is cut or damaged."
        )
    sizes = np.frombuffer(told, "<i4", num_rows, _HEADER.size).astype(np.int64)
    starts = np.frombuffer(told, "<i8", num_rows, _HEADER.size + 4 * num_rows)
    dtype = np.dtype(_DTYPES[code])
    ends = np.cumsum(sizes)
    if (sizes < 0).any() or (starts != dtype.itemsize * (ends - sizes)).any():
        raise ValueError(f"{index} has rows that do not lie end to end.")
    num_bytes = int(sizes.sum()) * dtype.itemsize
    if content.stat().st_size != num_bytes:
        raise ValueError(
            f"{content} has {content.stat().st_size} bytes, {index} tells {num_bytes}: "
            f"it is cut or foreign."
        )
    if not num_bytes:
        raise ValueError(f"{content} is empty: there is no sample.")
    return np.memmap(content, dtype, mode="r"), sizes
