"""Records for the analysis, read in batches: flat tokens and their lengths."""

import hashlib
import os
import pathlib
from typing import Any

import numpy as np

from dataeff_jax import data


class ArraySource:
    """Records of equal length in one memory-mapped ``.npy`` file.

    Args:
      path: a file with an array [N, ...]; row i is the record of sample i.
      field: the records' only key.

    Raises:
      ValueError: a missing file, or one without rows.

    Example:
      >>> import pathlib, tempfile
      >>> from dataeff_jax import curriculum
      >>> file = pathlib.Path(tempfile.mkdtemp()) / "tokens.npy"
      >>> np.save(file, np.arange(6).reshape(2, 3))
      >>> curriculum.ArraySource(file)[1]["tokens"].tolist()
      [3, 4, 5]
    """

    def __init__(self, path: str | os.PathLike, *, field: str = "tokens"):
        self._path = pathlib.Path(path).absolute()
        self._field = field
        if not self._path.is_file():
            raise ValueError(f"{self._path} does not exist; give a .npy file.")
        if not self._path.stat().st_size:
            raise ValueError(f"{self._path} is empty; it holds no array.")
        self._array = np.load(self._path, mmap_mode="r", allow_pickle=False)
        if not self._array.ndim:
            raise ValueError(f"{self._path} holds one number, not an array of rows.")

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"index={index} is outside {len(self)} rows.")
        return {self._field: self._array[index]}

    def read_range(self, start: int, stop: int) -> dict[str, Any]:
        """Return rows ``start`` to ``stop - 1`` as arrays [n, ...]."""
        return {self._field: self._array[start:stop]}

    @property
    def fingerprint(self) -> str:
        """Return the sha256 of the file and the field."""
        with open(self._path, "rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        return hashlib.sha256(f"{content} {self._field}".encode()).hexdigest()

    def __reduce__(self):
        return (_reopened, (str(self._path), self._field))


def _reopened(path: str, field: str) -> ArraySource:
    return ArraySource(path, field=field)


class Records:
    """Neighbouring records of a source, as a metric sees them.

    Made by the analysis. A record is a dict, a tuple (its fields are numbers), or an
    array (the only field). Sources that have ``read_range(start, stop) -> dict of
    arrays [n, ...]``, and token caches, are read without touching single records.

    Attributes:
      start: number of the first sample.
      stop: the number after the last.

    Example:
      >>> from dataeff_jax import curriculum
      >>> records = curriculum.Records([{"tokens": [1, 2]}, {"tokens": [3]}], 0, 2)
      >>> [array.tolist() for array in records.flat("tokens")]
      [[1, 2, 3], [2, 1]]
    """

    def __init__(self, source: Any, start: int, stop: int):
        self.start, self.stop = start, stop
        self._source = source
        self._columns: dict[str, Any] | None = None
        self._records: list[Any] | None = None
        self._flat: dict[Any, tuple[np.ndarray, np.ndarray]] = {}  # by field
        if hasattr(source, "read_range"):
            columns = self._columns = source.read_range(start, stop)
            for name, column in columns.items():
                if len(column) != len(self):
                    raise ValueError(
                        f"read_range({start}, {stop}) gave {len(column)} rows of "
                        f"{name!r}."
                    )

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self):
        """Yield the records one by one, as the source gives them."""
        if self._records is None:
            self._records = [self._source[i] for i in range(self.start, self.stop)]
        return iter(self._records)

    def flat(self, field: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return a field of all records end to end, and its length in each, int64[n].

        Args:
          field: a key of dicts, a place in tuples; records that are arrays have one.
        """
        if field not in self._flat:
            self._flat[field] = self._flattened(field)
        return self._flat[field]

    def _flattened(self, field: Any) -> tuple[np.ndarray, np.ndarray]:
        if self._columns is not None:
            _field_of(self._columns, field, self.start)
            column = np.asarray(self._columns[field])
            width = int(np.prod(column.shape[1:], dtype=np.int64))
            return column.reshape(-1), np.full(len(self), width, np.int64)
        if isinstance(self._source, data.TokenCache):
            offsets = self._source.offsets[self.start : self.stop + 1]
            return self._source.tokens[offsets[0] : offsets[-1]], np.diff(offsets)
        pieces = [
            np.asarray(_field_of(record, field, self.start + i)).reshape(-1)
            for i, record in enumerate(self)
        ]
        lengths = np.array([len(piece) for piece in pieces], np.int64)
        # An empty list becomes floats, which would spread to the others.
        filled = [piece for piece in pieces if len(piece)]
        return np.concatenate(filled or [np.zeros(0, np.int64)]), lengths


def _field_of(record: Any, field: Any, sample: int) -> Any:
    if isinstance(record, dict):
        if field not in record:
            raise ValueError(
                f"Sample {sample} has no field {field!r}; its fields are: "
                f"{', '.join(map(str, sorted(record))) or 'none'}."
            )
        return record[field]
    if isinstance(record, tuple):
        if not isinstance(field, int) or not -len(record) <= field < len(record):
            raise ValueError(
                f"Sample {sample} is a tuple of {len(record)}: field={field!r} must be "
                f"a place in it."
            )
        return record[field]
    return record


def row_sums(flat: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the sum of each record's integers, int64[n]; records may be empty."""
    if len(lengths) and lengths[0] and (lengths == lengths[0]).all():
        rows = flat.reshape(len(lengths), -1)
        if flat.dtype == bool and lengths[0] < 2**16:  # three times as fast
            return rows.view(np.uint8).sum(axis=1, dtype=np.uint16).astype(np.int64)
        return rows.sum(axis=1, dtype=np.int64)
    ends = np.cumsum(lengths)
    sums = np.concatenate([[0], np.cumsum(flat, dtype=np.int64)])
    return sums[ends] - sums[ends - lengths]


def records_fingerprint(source: Any) -> str:
    """Return the source's own fingerprint, or the sha256 of all its records."""
    fingerprint = getattr(source, "fingerprint", None)
    if isinstance(fingerprint, str):
        return fingerprint
    digest = hashlib.sha256(str(len(source)).encode())
    for index in range(len(source)):
        _update(digest, source[index])
    return digest.hexdigest()


def _update(digest: Any, value: Any) -> None:
    """Feed a record, in a form that does not depend on how it is held."""
    if isinstance(value, dict):
        for name in sorted(value):
            digest.update(f"{name}:".encode())
            _update(digest, value[name])
    elif isinstance(value, tuple | list) and not all(np.isscalar(v) for v in value):
        digest.update(f"({len(value)}".encode())
        for one in value:
            _update(digest, one)
    elif isinstance(value, str | bytes):
        content = value.encode() if isinstance(value, str) else value
        digest.update(f"{len(content)}".encode() + content)
    else:
        array = np.asarray(value)
        digest.update(f"{array.dtype.str}{array.shape}".encode() + array.tobytes())
