"""Tokenized corpora on disk: memory-mapped, fingerprinted, written atomically.

A cache is a directory of plain ``.npy`` files, readable with NumPy alone:

    tokens.npy     uint16 or uint32 [T]   the documents' tokens, without end_of_text
    offsets.npy    int64 [D + 1]          document i: tokens[offsets[i]:offsets[i + 1]]
    hashes.npy     uint64 [D]             of the documents' text, for splitting
    manifest.json                         counts, sizes, checksums and fingerprints

It is written into a hidden sibling directory and renamed when it is complete.
"""

import collections.abc
import contextlib
import hashlib
import json
import os
import pathlib
from typing import Any

import numpy as np

from dataeff_jax.data import _manifest, _publish, _sources, _tokenizers

FORMAT = "dataeff_jax.tokens"
VERSION = 1
ARRAYS = ("tokens.npy", "offsets.npy", "hashes.npy")
_FIELDS = (
    *("build", "num_documents", "num_tokens", "vocab_size", "end_of_text"),
    *("source", "tokenizer", "files"),
)

# Files up to this size are checked whole, larger ones in blocks spread over them, so
# that opening a cache of a terabyte reads 64 MiB of it.
_CHECKED_BYTES = 64 * 2**20
_BLOCK_BYTES = 2**20

_REBUILD = "Delete the directory, or tokenize with overwrite=True."


def _fingerprint(source: str, tokenizer: str) -> str:
    return hashlib.sha256(f"{source}\n{tokenizer}".encode()).hexdigest()


def content_hash(text: str) -> int:
    """Return the 64-bit hash of a document's text, by which documents are split."""
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class TokenCache:
    """A tokenized corpus; documents are read from disk when they are asked for.

    Opening checks the format, the files' sizes, the counts and the checksums, and keeps
    O(1) in memory. A pickled cache reopens its directory and refuses another build.

    Args:
      directory: what ``tokenize`` has written.

    Raises:
      ValueError: no cache, or one that is cut, damaged or mixed; the message names the
        file with the expected and the actual size or count.

    Example:
      >>> import tempfile
      >>> from dataeff_jax import data
      >>> source = data.MemorySource(["one", "three"])
      >>> cache = data.tokenize(source, data.ByteTokenizer(), tempfile.mkdtemp())
      >>> len(cache), cache.num_tokens, cache.lengths.tolist()
      (2, 8, [3, 5])
      >>> bytes(cache[1].tolist())
      b'three'
    """

    def __init__(self, directory: str | os.PathLike):
        self.directory = pathlib.Path(directory)
        self.manifest, arrays = _publish.open_consistently(
            self.directory, _read_manifest, _open_arrays
        )
        self.tokens: np.ndarray = arrays["tokens.npy"]
        self.offsets: np.ndarray = arrays["offsets.npy"]
        self.hashes: np.ndarray = arrays["hashes.npy"]
        self.num_tokens: int = self.manifest["num_tokens"]
        self.vocab_size: int = self.manifest["vocab_size"]
        self.end_of_text: int = self.manifest["end_of_text"]

    def __len__(self) -> int:
        return self.manifest["num_documents"]

    def __getitem__(self, index: int) -> np.ndarray:
        """Return the tokens of a document, without end_of_text."""
        if not 0 <= index < len(self):
            raise IndexError(f"index={index} is outside {len(self)} documents.")
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each document, int64[D]."""
        return np.diff(self.offsets)

    @property
    def fingerprint(self) -> str:
        """Return the sha256 over the fingerprints of text and tokenizer."""
        return _fingerprint(self.manifest["source"], self.manifest["tokenizer"])

    def __reduce__(self):
        return (_reopen, (str(self.directory.absolute()), self.manifest["build"]))


def _reopen(directory: str, build: str) -> TokenCache:
    cache = TokenCache(directory)
    if cache.manifest["build"] != build:
        raise ValueError(f"{directory} was rebuilt since it was opened; open it again.")
    return cache


def _read_manifest(directory: pathlib.Path) -> dict[str, Any]:
    manifest = _manifest.read(
        directory, kind="token cache", found=(FORMAT, VERSION), rebuild=_REBUILD
    )
    needed = {*_FIELDS, *(f"files/{name}" for name in ARRAYS)}
    present = {*manifest, *(f"files/{name}" for name in manifest.get("files", ()))}
    if missing := sorted(needed - present):
        path = directory / "manifest.json"
        raise ValueError(f"{path} lacks {', '.join(missing)}. {_REBUILD}")
    return manifest


def _open_arrays(
    directory: pathlib.Path, manifest: dict[str, Any]
) -> dict[str, np.ndarray]:
    documents, tokens = manifest["num_documents"], manifest["num_tokens"]
    counts = {"tokens.npy": tokens, "offsets.npy": documents + 1}
    return {
        name: _manifest.open_array(
            directory / name,
            manifest["files"][name],
            count=counts.get(name, documents),
            checksum=_checksum,
            rebuild=_REBUILD,
        )
        for name in ARRAYS
    }


def _checksum(path: pathlib.Path) -> str:
    return _manifest.block_checksum(
        path, checked_bytes=_CHECKED_BYTES, block_bytes=_BLOCK_BYTES
    )


class _ArrayWriter:
    """Appends to a one-dimensional ``.npy`` file whose length is not known yet."""

    def __init__(self, path: pathlib.Path, dtype: Any):
        self.path = path
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._length = 0
        self._stream = open(path, "wb")
        self._write_header()

    def _write_header(self) -> None:
        # NumPy leaves room for 21 digits of length, so the header's size never changes.
        shape = {"shape": (self._length,), "fortran_order": False}
        header = {"descr": self._dtype.str, **shape}
        np.lib.format.write_array_header_1_0(self._stream, header)

    def append(self, values: Any) -> None:
        values = np.asarray(values, self._dtype)
        self._stream.write(values.tobytes())
        self._length += len(values)

    def close(self) -> dict[str, Any]:
        """Finish the file; return its size and checksum for the manifest."""
        self._stream.seek(0)
        self._write_header()
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        size = self.path.stat().st_size
        return {"num_bytes": size, "checksum": _checksum(self.path)}


def _chunks(
    source: Any, num_characters: int = 2**20
) -> collections.abc.Iterator[list[str]]:
    """Yield lists of texts of about ``num_characters``: bounded memory, full cores."""
    texts, size = [], 0
    for index in range(len(source)):
        record = source[index]
        texts.append(_sources.text_of(record, "text", f"Record {index}"))
        size += len(texts[-1])
        if size >= num_characters:
            yield texts
            texts, size = [], 0
    if texts:
        yield texts


def _write(
    directory: pathlib.Path,
    source: Any,
    tokenizer: _tokenizers.Tokenizer,
    source_fingerprint: str,
    progress: collections.abc.Callable[[int, int], None] | None,
) -> None:
    """Write a complete cache into an empty ``directory``."""
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    dtypes = (dtype, np.int64, np.uint64)
    with contextlib.ExitStack() as stack:
        writers = [
            _ArrayWriter(directory / name, dtype)
            for name, dtype in zip(ARRAYS, dtypes, strict=True)
        ]
        for writer in writers:
            stack.callback(writer._stream.close)
        tokens, offsets, hashes = writers
        offsets.append([0])
        num_documents = num_tokens = 0
        for texts in _chunks(source):
            encoded = tokenizer.encode_batch(texts)
            lengths = np.array([len(ids) for ids in encoded], np.int64)
            tokens.append(np.concatenate(encoded))
            offsets.append(num_tokens + np.cumsum(lengths))
            hashes.append(np.array([content_hash(text) for text in texts], np.uint64))
            num_documents += len(texts)
            num_tokens += int(lengths.sum())
            if progress is not None:
                progress(num_documents, len(source))
        files = {writer.path.name: writer.close() for writer in writers}
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "build": os.urandom(16).hex(),
        "num_documents": num_documents,
        "num_tokens": num_tokens,
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "source": source_fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "files": files,
    }
    (directory / "manifest.json").write_text(json.dumps(manifest, indent=2))


def _open_fitting(
    directory: pathlib.Path, source_fingerprint: str, tokenizer_fingerprint: str
) -> TokenCache:
    """Open the cache if it is of this text and tokenizer, else refuse."""
    cache = TokenCache(directory)
    wanted = {"source": source_fingerprint, "tokenizer": tokenizer_fingerprint}
    for name, fingerprint in wanted.items():
        if cache.manifest[name] != fingerprint:
            raise ValueError(
                f"{directory} was made from another {name}: it has fingerprint "
                f"{cache.manifest[name]}, asked for is {fingerprint}. Use another "
                f"directory, or pass overwrite=True to replace it."
            )
    return cache


def cache_directory(
    base: str | os.PathLike, source: Any, tokenizer: _tokenizers.Tokenizer
) -> pathlib.Path:
    """Return a folder of ``base`` whose name tells text and tokenizer apart.

    With it, runs with other texts or tokenizers keep their caches side by side.

    Args:
      base: the folder of all caches.
      source: as for ``tokenize``.
      tokenizer: as for ``tokenize``.

    Returns:
      What to pass to ``tokenize`` as ``directory``.

    Example:
      >>> from dataeff_jax import data
      >>> source = data.MemorySource(["a text"])
      >>> data.cache_directory("base", source, data.ByteTokenizer()).as_posix()
      'base/tokens-33fefa301a878621'
    """
    name = _fingerprint(_sources.texts_fingerprint(source), tokenizer.fingerprint)
    return pathlib.Path(base) / f"tokens-{name[:16]}"


def tokenize(
    source: Any,
    tokenizer: _tokenizers.Tokenizer,
    directory: str | os.PathLike,
    *,
    source_fingerprint: str | None = None,
    overwrite: bool = False,
    progress: collections.abc.Callable[[int, int], None] | None = None,
) -> TokenCache:
    """Tokenize a source into a cache on disk, or open the cache that is there.

    Memory stays bounded by a million characters or the longest document. Several
    processes may call this at once for one directory: one build wins, whole, and the
    others open it. What a killed process has left is never read, and the next call
    removes it.

    Args:
      source: records with ``"text"``; see ``Source``.
      tokenizer: for example ``BPETokenizer.train(...)``.
      directory: of the cache; made by this call.
      source_fingerprint: stands for the text. None takes ``source.fingerprint``, or
        reads all texts; give your own (a version, a date) where that takes too long.
      overwrite: replace a cache of other text or another tokenizer, or a damaged one.
        Readers see the old one or the new one.
      progress: called as ``progress(documents_done, num_documents)`` now and then.

    Returns:
      The cache.

    Raises:
      ValueError: an empty source, or a directory that holds something else: the message
        has both fingerprints.

    Example:
      >>> import tempfile
      >>> from dataeff_jax import data
      >>> directory = tempfile.mkdtemp()
      >>> source = data.MemorySource(["a text"])
      >>> first = data.tokenize(source, data.ByteTokenizer(), directory)
      >>> again = data.tokenize(source, data.ByteTokenizer(), directory)  # reused
      >>> first.manifest["build"] == again.manifest["build"]
      True
    """
    directory = pathlib.Path(directory).resolve()
    if not len(source):
        raise ValueError("The source is empty; there is nothing to tokenize.")
    if source_fingerprint is None:
        source_fingerprint = _sources.texts_fingerprint(source)
    fits = (source_fingerprint, tokenizer.fingerprint)
    _publish.remove_leftovers(directory)
    if directory.exists() and any(directory.iterdir()):
        if not any((directory / name).exists() for name in ("manifest.json", *ARRAYS)):
            raise ValueError(f"{directory} holds other files; name a new directory.")
        try:
            return _open_fitting(directory, *fits)
        except ValueError:
            if not overwrite:
                raise
    with _publish.temporary_directory(directory) as temporary:
        _write(temporary, source, tokenizer, source_fingerprint, progress)
        _publish.publish(temporary, directory, overwrite=overwrite)
    # Another process may have been first; its build serves if it fits.
    return _open_fitting(directory, *fits)
