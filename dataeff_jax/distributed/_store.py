"""Short texts that all processes of a run can read: jax's coordination service."""

from typing import Any

import jax
from jax._src import distributed as _private

# jax offers no public way to the key-value store of its coordination service. This is
# the one file that reaches for it, so that a change in jax is mended here.


class KeyValueStore:
    """Keys under one prefix in the coordination service's key-value store.

    Values survive until process 0, which hosts them, ends.

    Args:
        prefix: put before every key, with a slash.

    Raises:
        RuntimeError: when the processes are not connected.
    """

    def __init__(self, prefix: str):
        if _private.global_state.client is None:
            raise RuntimeError(
                "the processes are not connected; call "
                "dataeff_jax.distributed.initialize() first."
            )
        self._client: Any = _private.global_state.client
        self._prefix = prefix

    def set(self, key: str, value: str) -> None:
        """Write a value; the last writer wins."""
        self._client.key_value_set(self._path(key), value, allow_overwrite=True)

    def set_once(self, key: str, value: str) -> bool:
        """Write a value unless there is one; True for the writer that was first."""
        try:
            self._client.key_value_set(self._path(key), value)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" in str(error):
                return False
            raise
        return True

    def get(self, key: str) -> str | None:
        """The value of a key, None where there is none yet."""
        try:
            return self._client.key_value_try_get(self._path(key))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def items(self, directory: str) -> dict[str, str]:
        """All keys below a directory, without its name, and their values."""
        path = self._path(directory) + "/"
        found = self._client.key_value_dir_get(path)
        return {key.removeprefix(path): value for key, value in found}

    def increment(self, key: str) -> int:
        """Add one to a counter that starts at 0; its new value."""
        return self._client.key_value_increment(self._path(key), 1)

    def _path(self, key: str) -> str:
        return f"{self._prefix}/{key}"


def place() -> tuple[int, int]:
    """Index of this process and number of processes, without starting the backends.

    `jax.process_index()` would start them, and with several processes that waits for
    all others.
    """
    state = _private.global_state
    return (state.process_id, state.num_processes) if state.client else (0, 1)
