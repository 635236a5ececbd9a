"""One run at a time in a work directory."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator

import jax

_LOCK_FILE = ".lock"


@contextlib.contextmanager
def claim(workdir: str | pathlib.Path) -> Iterator[None]:
    """Holds a work directory, so that no second run writes into it.

    Two runs in one directory would remove each other's unfinished checkpoints and mix
    their logs. The operating system lets go of the claim when the process ends, however
    it ends. In a run of several processes only the first claims.

    Args:
      workdir: the directory; made if needed.

    Raises:
      ValueError: if another run holds it.

    Example:
      >>> import tempfile
      >>> with claim(tempfile.mkdtemp()):
      ...     pass  # train
    """
    if jax.process_index() != 0:
        yield
        return
    workdir = pathlib.Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    with (workdir / _LOCK_FILE).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"{workdir} is in use by another run ({file.read().strip()}); wait"
                " for its end, or start in a new work directory."
            ) from None
        except OSError:
            pass  # a file system without locks: nothing can be claimed there
        file.truncate(0)
        file.write(f"process {os.getpid()} of {os.uname().nodename}\n")
        file.flush()
        yield
