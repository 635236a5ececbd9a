"""Directories that appear whole or not at all, and the remains of killed writers.

A writer fills ``.NAME.ID.new`` beside its target and holds a lock on ``.NAME.ID.lock``,
which the operating system drops when the process dies, however it dies. So a lock that
can be taken belongs to nobody, and what it covered is rubbish.
"""

import collections.abc
import contextlib
import errno
import fcntl
import os
import pathlib
import shutil
import time
from typing import Any


def _sibling(directory: pathlib.Path, identity: str, kind: str) -> pathlib.Path:
    directory = directory.absolute()
    return directory.with_name(f".{directory.name}.{identity}.{kind}")


def _siblings(
    directory: pathlib.Path, kind: str
) -> collections.abc.Iterator[pathlib.Path]:
    directory = directory.absolute()
    prefix = f".{directory.name}."
    if not directory.parent.is_dir():
        return
    for entry in os.listdir(directory.parent):  # no glob: names may hold brackets
        middle = entry.removeprefix(prefix).removesuffix(f".{kind}")
        if entry == f"{prefix}{middle}.{kind}" and "." not in middle:
            yield directory.parent / entry


def _try_lock(path: pathlib.Path, *, create: bool) -> int | None:
    """Return a descriptor that holds the lock on ``path``, or None."""
    try:
        descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o644)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The file may have been removed between opening and locking.
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None


def remove_leftovers(directory: pathlib.Path) -> None:
    """Remove what killed writers have left beside ``directory``; live ones stay."""
    for lock in _siblings(directory, "lock"):
        descriptor = _try_lock(lock, create=False)
        if descriptor is not None:
            # Killed between its two renames: what it moved away is whole, and returns.
            with contextlib.suppress(OSError):
                os.rename(lock.with_suffix(".old"), directory.absolute())
            for kind in (".new", ".old"):
                shutil.rmtree(lock.with_suffix(kind), ignore_errors=True)
            lock.unlink(missing_ok=True)
            os.close(descriptor)


def _own_lock(directory: pathlib.Path) -> tuple[str, pathlib.Path, int]:
    """A name that no other writer has, its lock file, and the descriptor locked."""
    while True:
        identity = os.urandom(8).hex()
        lock = _sibling(directory, identity, "lock")
        descriptor = _try_lock(lock, create=True)
        if descriptor is not None:
            return identity, lock, descriptor


@contextlib.contextmanager
def temporary_directory(
    directory: pathlib.Path,
) -> collections.abc.Iterator[pathlib.Path]:
    """Give an empty directory beside ``directory``; what is left of it is removed."""
    directory.absolute().parent.mkdir(parents=True, exist_ok=True)
    identity, lock, descriptor = _own_lock(directory)
    temporary = _sibling(directory, identity, "new")
    try:
        temporary.mkdir()
        yield temporary
    finally:
        for kind in ("new", "old"):
            shutil.rmtree(_sibling(directory, identity, kind), ignore_errors=True)
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def publish(
    temporary: pathlib.Path, directory: pathlib.Path, *, overwrite: bool
) -> None:
    """Rename a finished ``temporary`` to ``directory``.

    When ``directory`` is there already it stays, unless ``overwrite``: then it makes
    room first, and readers that fall into the gap wait (``is_being_replaced``).
    """
    while True:
        try:
            os.rename(temporary, directory.absolute())
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if not overwrite:
            return
        old = temporary.with_suffix(".old")
        shutil.rmtree(old, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):  # another writer moved it
            os.rename(directory.absolute(), old)


def is_being_replaced(directory: pathlib.Path) -> bool:
    """Return whether ``directory`` is missing because a live writer swaps it."""
    if directory.exists():
        return False
    for lock in _siblings(directory, "lock"):
        if lock.with_suffix(".old").exists():
            descriptor = _try_lock(lock, create=False)
            if descriptor is None:
                return True
            os.close(descriptor)
    return False


def open_consistently(
    directory: pathlib.Path,
    read_manifest: collections.abc.Callable[[pathlib.Path], dict[str, Any]],
    open_arrays: collections.abc.Callable[[pathlib.Path, dict[str, Any]], Any],
    *,
    patience_seconds: float = 2.0,
) -> tuple[dict[str, Any], Any]:
    """Open the files of one build, even while another one takes its place.

    Args:
      directory: what ``publish`` has put in place.
      read_manifest: of the directory; its ``"build"`` names the build.
      open_arrays: opens what the manifest names.
      patience_seconds: how long to wait for a writer.

    Returns:
      The manifest, and what ``open_arrays`` has returned for it.

    Raises:
      ValueError: whatever the two functions found wrong, or a directory that keeps
        being replaced.
    """
    deadline = time.monotonic() + patience_seconds
    while True:
        build, problem, manifest, arrays = None, None, {}, None
        try:
            manifest = read_manifest(directory)
            build = manifest["build"]
            arrays = open_arrays(directory, manifest)
        except (ValueError, OSError) as error:  # a file can vanish at any moment
            problem = error
        # Between the two renames of a replacement nothing is there for a moment.
        swapping = is_being_replaced(directory)
        if not swapping and build == _build_of(directory, read_manifest):
            break
        if time.monotonic() > deadline:
            raise ValueError(f"{directory} keeps being replaced; wait for its writer.")
        time.sleep(0.005)
    if problem is not None:
        raise problem
    return manifest, arrays


def _build_of(directory: pathlib.Path, read_manifest) -> str | None:
    try:
        return read_manifest(directory)["build"]
    except (ValueError, OSError):
        return None
