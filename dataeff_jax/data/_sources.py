"""Random-access sources of text and of arrays: memory, plain text, JSON lines.

A source is any object with ``__len__`` and ``__getitem__(index) -> dict`` that pickles:
what ``grain.MapDataset.source`` takes. Records of text have the key ``"text"``. File
sources keep 16 bytes a record in memory and read the rest when it is asked for.
"""

import collections.abc
import contextlib
import hashlib
import json
import mmap
import os
import pathlib
import re
from typing import Any, Protocol, TypeAlias

import numpy as np

Paths: TypeAlias = str | os.PathLike | collections.abc.Iterable[str | os.PathLike]

# A line that is empty or blank, with the end of the line before it.
_BLANK_LINE = re.compile(rb"\r?\n[ \t]*\r?\n\s*")


class Source(Protocol):
    """Records by position, as ``grain.MapDataset.source`` takes them.

    Your own class needs these two methods and has to pickle. Give it a ``fingerprint``
    (a text that changes when the content does) if reading all of it is slow.

    Example:
      >>> class Numbers:
      ...     def __len__(self):
      ...         return 3
      ...     def __getitem__(self, index):
      ...         return {"text": f"number {index}"}
      >>> import grain
      >>> grain.MapDataset.source(Numbers())[2]
      {'text': 'number 2'}
    """

    def __len__(self) -> int:
        """Return the number of records."""
        ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return record ``index``, from 0 to ``len(self) - 1``."""
        ...


def checked_index(index: int, length: int) -> int:
    """Return ``index`` as a Python int, or raise IndexError when it is outside."""
    index = int(index)
    if not 0 <= index < length:
        raise IndexError(f"index={index} is outside a source of {length} records.")
    return index


def existing_files(paths: Paths, *, suffixes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the files that ``paths`` name; a folder means its files, sorted.

    Args:
      paths: one path or several; blanks in them need no quoting.
      suffixes: endings that count inside a folder, for example ``(".txt",)``.
    """
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    files = []
    for path in map(pathlib.Path, paths):
        if path.is_dir():
            inside = (p for p in sorted(path.rglob("*")) if p.suffix in suffixes)
            files.extend(str(p) for p in inside if p.is_file())
        elif path.is_file():
            files.append(str(path))
        else:
            raise ValueError(f"{path} does not exist; give a file or a folder.")
    if not files:
        raise ValueError(f"No file with ending {suffixes} in {paths}.")
    return tuple(files)


def files_fingerprint(files: collections.abc.Iterable[str], *settings: Any) -> str:
    """Return the sha256 of the files' contents and of the settings that read them."""
    digest = hashlib.sha256(repr(settings).encode())
    for file in files:
        with open(file, "rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


@contextlib.contextmanager
def naming(file: str | os.PathLike) -> collections.abc.Iterator[None]:
    """Turn what a reader says about a damaged file into an error that names it."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def require_field(
    present: collections.abc.Iterable[str], field: str, where: str
) -> None:
    """Raise a ValueError that names the fields there are unless one is ``field``."""
    names = sorted(map(str, present))
    if field not in names:
        raise ValueError(
            f"{where} has no field {field!r}; its fields are: "
            f"{', '.join(names) or 'none'}. Pass field=... with one of them."
        )


def text_of(record: dict[str, Any], field: str, where: str) -> str:
    """Return ``record[field]``, or raise a ValueError naming the fields there are."""
    require_field(record, field, where)
    value = record[field]
    if not isinstance(value, str):
        raise ValueError(
            f"{where}: field {field!r} holds {type(value).__name__}, not text."
        )
    return value


def texts_fingerprint(source: Any) -> str:
    """Return the source's own fingerprint, or the sha256 of all its texts."""
    fingerprint = getattr(source, "fingerprint", None)
    if isinstance(fingerprint, str):
        return fingerprint
    digest = hashlib.sha256()
    for index in range(len(source)):
        text = source[index]["text"].encode("utf-8")
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
    return digest.hexdigest()


class MemorySource:
    """Texts, records, or arrays with a common first axis, held in memory.

    Args:
      records: a sequence of texts, a sequence of dicts, or a dict of arrays whose first
        axis is the record.

    Raises:
      ValueError: no record, or arrays of different lengths.

    Example:
      >>> from dataeff_jax import data
      >>> data.MemorySource(["one text", "another"])[1]
      {'text': 'another'}
      >>> len(data.MemorySource({"images": np.zeros((3, 8, 8)), "labels": np.ones(3)}))
      3
    """

    def __init__(self, records: Any):
        self._arrays = None
        if isinstance(records, collections.abc.Mapping):
            self._arrays = {name: np.asarray(array) for name, array in records.items()}
            lengths = {name: len(array) for name, array in self._arrays.items()}
            if len(set(lengths.values())) > 1:
                raise ValueError(f"Arrays differ in their first axis: {lengths}.")
            self._length = next(iter(lengths.values()), 0)
        else:
            self._records = list(records)
            self._length = len(self._records)
        if not self._length:
            raise ValueError("The source is empty; give at least one record.")

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = checked_index(index, self._length)
        if self._arrays is not None:
            return {name: array[index] for name, array in self._arrays.items()}
        record = self._records[index]
        return {"text": record} if isinstance(record, str) else dict(record)


class _Pieces:
    """Byte ranges of files, found by ``scan(file) -> int64[pieces, 2]``.

    Files are read with ``pread``, which threads may share; descriptors are opened at
    the first use in each process and do not travel when the object is pickled.
    """

    def __init__(self, files: tuple[str, ...], scan: Any):
        self.files = files
        starts, stops, counts = [], [], []
        for file in files:
            ranges = scan(file)  # int64[pieces, 2]
            starts.append(ranges[:, 0])
            stops.append(ranges[:, 1])
            counts.append(len(ranges))
        self._starts = np.concatenate(starts)
        self._stops = np.concatenate(stops)
        self._first_piece = np.cumsum([0, *counts])
        self._descriptors: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> bytes:
        file = int(np.searchsorted(self._first_piece, index, side="right")) - 1
        start, stop = int(self._starts[index]), int(self._stops[index])
        piece = os.pread(self._descriptor(file), stop - start, start)
        if len(piece) != stop - start:
            raise ValueError(
                f"{self.files[file]} changed while it was read: wanted bytes {start} "
                f"to {stop}, got {len(piece)} bytes. Build the source again."
            )
        return piece

    def _descriptor(self, file: int) -> int:
        if file not in self._descriptors:
            descriptor = os.open(self.files[file], os.O_RDONLY)
            if self._descriptors.setdefault(file, descriptor) != descriptor:
                os.close(descriptor)  # another thread was first
        return self._descriptors[file]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_descriptors": {}}

    def __del__(self):
        for descriptor in self.__dict__.get("_descriptors", {}).values():
            os.close(descriptor)


def _mapped(file: str) -> mmap.mmap | bytes:
    """Return the file's bytes without reading them; an empty file cannot be mapped."""
    with open(file, "rb") as stream:
        if not os.fstat(stream.fileno()).st_size:
            return b""
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


def _whole(file: str) -> np.ndarray:
    size = os.path.getsize(file)
    return np.array([[0, size]] if size else [], np.int64).reshape(-1, 2)


def _between(file: str, pattern: re.Pattern) -> np.ndarray:
    """Return the ranges between matches that hold more than blanks, int64[n, 2]."""
    content, ranges, start = _mapped(file), [], 0
    for match in pattern.finditer(content):
        ranges.append((start, match.start()))
        start = match.end()
    ranges.append((start, len(content)))
    filled = [(a, b) for a, b in ranges if a < b and not content[a:b].isspace()]
    return np.array(filled, np.int64).reshape(-1, 2)


class TextSource:
    r"""Plain text files: a document a file, or documents apart by a blank line.

    Args:
      paths: a file, a folder (its ``.txt`` and ``.md`` files, sorted), or several.
      delimiter: what stands between documents: ``"file"`` (each file is a document),
        ``"blank_line"``, or any other string, for example ``"<|endoftext|>"``. Pieces
        that hold only blanks are not documents.
      encoding: of the files.

    Raises:
      ValueError: a missing path, or no document in any of the files.

    Example:
      >>> import pathlib, tempfile
      >>> from dataeff_jax import data
      >>> file = pathlib.Path(tempfile.mkdtemp()) / "two documents.txt"
      >>> _ = file.write_text("first\nline two\n\nsecond\n")
      >>> source = data.TextSource(file, delimiter="blank_line")
      >>> len(source), source[0]["text"]
      (2, 'first\nline two')
    """

    def __init__(
        self, paths: Paths, *, delimiter: str = "file", encoding: str = "utf-8"
    ):
        if not delimiter:
            raise ValueError("delimiter is empty; use 'file', 'blank_line' or a text.")
        files = existing_files(paths, suffixes=(".txt", ".md"))
        self._settings = ("text", delimiter, encoding)
        self._encoding = encoding
        if delimiter == "file":
            self._pieces = _Pieces(files, _whole)
        elif delimiter == "blank_line":
            self._pieces = _Pieces(files, lambda file: _between(file, _BLANK_LINE))
        else:
            pattern = re.compile(re.escape(delimiter.encode(encoding)))
            self._pieces = _Pieces(files, lambda file: _between(file, pattern))
        if not len(self._pieces):
            raise ValueError(f"No text in {', '.join(files)}: the source is empty.")

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = checked_index(index, len(self))
        piece = self._pieces[index]
        with naming(f"Document {index} of {', '.join(self._pieces.files)}"):
            text = piece.decode(self._encoding)
        return {"text": text.removesuffix("\n")}

    @property
    def fingerprint(self) -> str:
        """Return the sha256 of the files and of how they are read."""
        return files_fingerprint(self._pieces.files, *self._settings)


class JsonlSource:
    r"""JSON lines: one object a line, its text under one field.

    Building it scans the files once for the ends of lines; blank lines are skipped.

    Args:
      paths: a file, a folder (its ``.jsonl`` and ``.ndjson`` files), or several.
      field: the key of the text; records keep their other keys.

    Raises:
      ValueError: a missing path, no line, or a first line without ``field``; a broken
        or incomplete later line raises when it is read, with file and line.

    Example:
      >>> import pathlib, tempfile
      >>> from dataeff_jax import data
      >>> file = pathlib.Path(tempfile.mkdtemp()) / "some.jsonl"
      >>> _ = file.write_text('{"body": "Hello.", "id": 7}\n')
      >>> data.JsonlSource(file, field="body")[0]
      {'body': 'Hello.', 'id': 7, 'text': 'Hello.'}
    """

    def __init__(self, paths: Paths, *, field: str = "text"):
        files = existing_files(paths, suffixes=(".jsonl", ".ndjson"))
        self._field = field
        lines = re.compile(rb"\n")
        self._pieces = _Pieces(files, lambda file: _between(file, lines))
        if not len(self._pieces):
            raise ValueError(f"No record in {', '.join(files)}: the source is empty.")
        self[0]  # a wrong field name is reported now, not hours later

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = checked_index(index, len(self))
        where = f"Record {index} of {', '.join(self._pieces.files)}"
        try:
            record = json.loads(self._pieces[index])
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not valid JSON: {error}.") from error
        if not isinstance(record, dict):
            raise ValueError(f"{where} is a {type(record).__name__}, not an object.")
        return {**record, "text": text_of(record, self._field, where)}

    @property
    def fingerprint(self) -> str:
        """Return the sha256 of the files and of how they are read."""
        return files_fingerprint(self._pieces.files, "jsonl", self._field)
