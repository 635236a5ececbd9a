"""Random-access sources in table and record formats, and ``open_source`` by name.

The packages that read them are optional: ``pip install '.[parquet]'`` and
``'.[huggingface]'``; array_record comes with grain where it has wheels.
"""

import importlib
import json
import os
import pathlib
import threading
from typing import Any, Literal

import grain
import numpy as np

from dataeff_jax.data import _sources

FORMATS = ("text", "jsonl", "parquet", "array_record", "huggingface")


def _optional(module: str, package: str) -> Any:
    """Import an optional package, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"Reading this needs {module.partition('.')[0]}; install it with: "
            f"pip install '{package}'"
        ) from error


class ParquetSource:
    """Parquet files: the text of one column, read a row group at a time.

    The row group that was read last stays in memory, so reading in order decodes each
    group once. Shuffled reading decodes a group a record: tokenize first.

    Args:
      paths: a file, a folder (its ``.parquet`` files), or several.
      field: the column of the text; other columns are not read.

    Raises:
      ValueError: a missing path, package or column, or no row.

    Example:
      >>> import pathlib, tempfile
      >>> import pyarrow, pyarrow.parquet
      >>> from dataeff_jax import data
      >>> file = pathlib.Path(tempfile.mkdtemp()) / "table.parquet"
      >>> pyarrow.parquet.write_table(pyarrow.table({"body": ["a", "b"]}), file)
      >>> data.ParquetSource(file, field="body")[1]
      {'text': 'b'}
    """

    def __init__(self, paths: _sources.Paths, *, field: str = "text"):
        parquet = _optional("pyarrow.parquet", ".[parquet]")
        self._files = _sources.existing_files(paths, suffixes=(".parquet",))
        self._field = field
        self._groups, sizes = [], []
        for file in self._files:
            with _sources.naming(file):
                metadata = parquet.read_metadata(file)
            columns = metadata.schema.to_arrow_schema().names
            _sources.require_field(columns, field, file)
            for group in range(metadata.num_row_groups):
                self._groups.append((file, group))
                sizes.append(metadata.row_group(group).num_rows)
        self._starts = np.cumsum([0, *sizes])
        if not len(self):
            raise ValueError(f"No row in {', '.join(self._files)}: it is empty.")
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._last: tuple[int, list[Any]] = (-1, [])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = _sources.checked_index(index, len(self))
        group = int(np.searchsorted(self._starts, index, side="right")) - 1
        with self._lock:
            if self._last[0] != group:
                self._last = (group, self._read(group))
            text = self._last[1][index - int(self._starts[group])]
        where = f"Row {index} of {', '.join(self._files)}"
        return {"text": _sources.text_of({self._field: text}, self._field, where)}

    def _read(self, group: int) -> list[Any]:
        file, number = self._groups[group]
        parquet = _optional("pyarrow.parquet", ".[parquet]")
        with parquet.ParquetFile(file) as opened:
            table = opened.read_row_group(number, columns=[self._field])
        return table.column(self._field).to_pylist()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_lock", "_last")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @property
    def fingerprint(self) -> str:
        """Return the sha256 of the files and of how they are read."""
        return _sources.files_fingerprint(self._files, "parquet", self._field)


class ArrayRecordSource:
    """ArrayRecord files: each record a UTF-8 text or a JSON object.

    Args:
      paths: a file, a folder (its ``.array_record`` and ``.arrayrecord`` files), or
        several.
      field: the key of the text in JSON records; None: the record is the text.

    Raises:
      ValueError: a missing path or package, no record, or a first record without
        ``field``.

    Example:
      >>> import pathlib, tempfile
      >>> from array_record.python.array_record_module import ArrayRecordWriter
      >>> from dataeff_jax import data
      >>> file = pathlib.Path(tempfile.mkdtemp()) / "some.array_record"
      >>> writer = ArrayRecordWriter(str(file), "group_size:1")
      >>> _ = writer.write(b"Hello."), writer.close()
      >>> data.ArrayRecordSource(file)[0]
      {'text': 'Hello.'}
    """

    def __init__(self, paths: _sources.Paths, *, field: str | None = None):
        _optional("array_record.python.array_record_data_source", "array_record")
        suffixes = (".array_record", ".arrayrecord")
        self._files = _sources.existing_files(paths, suffixes=suffixes)
        self._field = field
        # Typed as Any: grain's wrapper gets its __len__ when it is instantiated.
        with _sources.naming(", ".join(self._files)):
            self._records: Any = grain.sources.ArrayRecordDataSource(list(self._files))
        if not len(self._records):
            raise ValueError(f"No record in {', '.join(self._files)}: it is empty.")
        self[0]  # a wrong field name is reported now, not hours later

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = _sources.checked_index(index, len(self))
        content = self._records[index].decode("utf-8")
        if self._field is None:
            return {"text": content}
        where = f"Record {index} of {', '.join(self._files)}"
        try:
            record = json.loads(content)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{where} is not JSON: {error}. Pass field=None if records are texts."
            ) from error
        return {**record, "text": _sources.text_of(record, self._field, where)}

    @property
    def fingerprint(self) -> str:
        """Return the sha256 of the files and of how they are read."""
        return _sources.files_fingerprint(self._files, "array_record", self._field)


class HuggingFaceSource:
    """A Hugging Face dataset that ``save_to_disk`` has written.

    Args:
      path: the folder.
      split: which split, when the folder holds several.
      field: the column of the text; records keep their other columns.

    Raises:
      ValueError: a missing folder, package, split or column, or no row.

    Example:
      >>> import tempfile
      >>> import datasets
      >>> from dataeff_jax import data
      >>> datasets.disable_progress_bars()
      >>> folder = tempfile.mkdtemp()
      >>> datasets.Dataset.from_dict({"text": ["Hello."]}).save_to_disk(folder)
      >>> data.HuggingFaceSource(folder)[0]
      {'text': 'Hello.'}
    """

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        split: str | None = None,
        field: str = "text",
    ):
        self._path, self._split, self._field = str(path), split, field
        self._open()
        if not len(self):
            raise ValueError(f"No row in {path}: the source is empty.")

    def _open(self) -> None:
        datasets = _optional("datasets", ".[huggingface]")
        if not pathlib.Path(self._path).is_dir():
            raise ValueError(f"{self._path} does not exist; give a saved dataset.")
        with _sources.naming(self._path):
            found = datasets.load_from_disk(self._path)
        if isinstance(found, datasets.DatasetDict):
            if self._split not in found:
                raise ValueError(
                    f"{self._path} has the splits {sorted(found)}; pass split=... with "
                    f"one of them (got {self._split!r})."
                )
            found = found[self._split]
        _sources.require_field(found.column_names, self._field, self._path)
        self._rows = found

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = _sources.checked_index(index, len(self))
        record = self._rows[index]
        where = f"Row {index} of {self._path}"
        return {**record, "text": _sources.text_of(record, self._field, where)}

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_rows"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    @property
    def fingerprint(self) -> str:
        """Return the sha256 of the folder's files and of how they are read."""
        files = sorted(str(p) for p in pathlib.Path(self._path).rglob("*.arrow"))
        settings = ("huggingface", self._split, self._field)
        return _sources.files_fingerprint(files, *settings)


def open_source(
    name: Literal["text", "jsonl", "parquet", "array_record", "huggingface"],
    path: str | os.PathLike,
    *,
    field: str | None = "text",
    delimiter: str = "file",
    split: str | None = None,
) -> _sources.Source:
    r"""Open a source by the name of its format; what configurations use.

    Args:
      name: the format.
      path: a file or a folder.
      field: key or column of the text, where the format has such.
      delimiter: for ``"text"``, see ``TextSource``.
      split: for ``"huggingface"``.

    Returns:
      The source.

    Raises:
      ValueError: an unknown format, no path, or what the source itself refuses.

    Example:
      >>> import pathlib, tempfile
      >>> from dataeff_jax import data
      >>> file = pathlib.Path(tempfile.mkdtemp()) / "some.jsonl"
      >>> _ = file.write_text('{"text": "Hello."}\n')
      >>> len(data.open_source("jsonl", file))
      1
    """
    if name not in FORMATS:
        raise ValueError(f"No format is called {name!r}; there are {FORMATS}.")
    if not str(path):
        raise ValueError(f"The format {name!r} needs a path; it is empty.")
    if name == "text":
        return _sources.TextSource(path, delimiter=delimiter)
    if name == "array_record":
        return ArrayRecordSource(path, field=field)
    if name == "huggingface":
        return HuggingFaceSource(path, split=split, field=field or "text")
    kinds = {"jsonl": _sources.JsonlSource, "parquet": ParquetSource}
    return kinds[name](path, field=field or "text")
