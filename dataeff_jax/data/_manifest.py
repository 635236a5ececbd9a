"""Directories of ``.npy`` files with a JSON manifest, checked when they are opened."""

import collections.abc
import hashlib
import json
import pathlib
from typing import Any

import numpy as np


def read(
    directory: pathlib.Path, *, kind: str, found: tuple[str, int], rebuild: str
) -> dict[str, Any]:
    """Read ``manifest.json`` and check its format and version.

    Args:
      directory: where it lies.
      kind: what the directory should be, for the message.
      found: the format and the version that can be read.
      rebuild: the sentence that says how to make the directory anew.

    Returns:
      The manifest; which fields it has is not checked.

    Raises:
      ValueError: a manifest that is missing, damaged or of another version.
    """
    path = directory / "manifest.json"
    if not path.is_file():
        raise ValueError(f"{directory} is no {kind}: it has no manifest.json.")
    content = path.read_bytes()
    try:
        manifest = json.loads(content)
    except ValueError:
        manifest = None
    if not isinstance(manifest, dict):
        raise ValueError(
            f"{path} is damaged ({len(content)} bytes, no JSON object). {rebuild}"
        )
    actual = (manifest.get("format"), manifest.get("version"))
    if actual != found:
        raise ValueError(
            f"{path} has format {actual}, this version reads {found}. {rebuild}"
        )
    return manifest


def open_array(
    path: pathlib.Path,
    expected: dict[str, Any],
    *,
    count: int,
    checksum: collections.abc.Callable[[pathlib.Path], str],
    rebuild: str,
) -> np.ndarray:
    """Map an array after checking its size, its count and its checksum.

    Args:
      path: of the ``.npy`` file.
      expected: ``num_bytes`` and ``checksum`` of the manifest.
      count: entries that the array has.
      checksum: computes the checksum of a file.
      rebuild: the sentence that says how to make the directory anew.

    Returns:
      The array, [count].

    Raises:
      ValueError: naming the file, and what was expected and found.
    """
    actual_bytes = path.stat().st_size if path.is_file() else 0
    if actual_bytes != expected["num_bytes"]:
        raise ValueError(
            f"{path} has {actual_bytes} bytes, the manifest says "
            f"{expected['num_bytes']}: the file is cut or foreign. {rebuild}"
        )
    try:
        # An empty array cannot be mapped.
        array = np.load(path, mmap_mode="r" if count else None, allow_pickle=False)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}. {rebuild}") from error
    if array.shape != (count,):
        raise ValueError(
            f"{path} holds {len(array)} entries, the manifest says {count}. {rebuild}"
        )
    if (actual := checksum(path)) != expected["checksum"]:
        raise ValueError(
            f"{path} has checksum {actual}, the manifest says "
            f"{expected['checksum']}: the file is damaged or foreign. {rebuild}"
        )
    return array


def block_checksum(path: pathlib.Path, *, checked_bytes: int, block_bytes: int) -> str:
    """Return the sha256 of a file, or of evenly spaced blocks of a large one.

    Args:
      path: of the file.
      checked_bytes: a file up to this size is read whole, of a larger one this much.
      block_bytes: size of a block.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    num_blocks = checked_bytes // block_bytes
    with open(path, "rb") as stream:
        if size <= checked_bytes:
            digest.update(stream.read())
        else:
            for block in range(num_blocks):
                stream.seek(block * (size - block_bytes) // (num_blocks - 1))
                digest.update(stream.read(block_bytes))
    return digest.hexdigest()
