"""Programs by shape, compiled in the background before they are needed."""

import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any


class Executables(contextlib.AbstractContextManager):
    """Compiled programs of a run whose shapes are known, in the order of their use.

    While one program runs the next ones compile in one other thread, so that a change
    of shape that was foreseen never waits for a compilation, as long as a shape is used
    for longer than the next one compiles. Nothing else is ever compiled.

    Args:
      compile: ``key -> program``; called in another thread, so it enters the mesh and
        whatever else is set by thread.
      keys: all there will be, in the order of their first use.
      ahead: how many programs are compiled before they are used.

    Attributes:
      seconds: by key, how long it took to compile.
      waited_seconds: by key, how long :meth:`get` waited for it.

    Raises:
      ValueError: keys that repeat, or ``ahead`` below 0.

    Example:
      >>> import jax
      >>> jitted = jax.jit(lambda x: 2 * x)
      >>> shape = lambda n: jax.ShapeDtypeStruct((n,), "float32")
      >>> with Executables(
      ...     lambda n: jitted.lower(shape(n)).compile(), [1, 2, 3]) as programs:
      ...     [programs.get(n)(jax.numpy.ones(n)).sum().item() for n in (1, 1, 2)]
      [2.0, 2.0, 4.0]
    """

    def __init__(
        self,
        compile: Callable[[Any], Any],
        keys: Sequence[Hashable],
        *,
        ahead: int = 2,
    ):
        if len(set(keys)) < len(keys):
            raise ValueError(f"keys={list(keys)} must be different.")
        if ahead < 0:
            raise ValueError(f"ahead={ahead} must not be negative.")
        self._compile, self._ahead = compile, ahead
        self._places = {key: place for place, key in enumerate(keys)}
        self._keys = list(keys)
        self._submitted = 0
        self._futures: dict[Any, concurrent.futures.Future] = {}
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "compile")
        self.seconds: dict[Any, float] = {}
        self.waited_seconds: dict[Any, float] = {}

    def get(self, key: Any) -> Any:
        """Return the program of a key, and let those that follow it compile.

        Raises:
          KeyError: a key that was not announced.
          Exception: what its compilation raised.
        """
        if key not in self._places:
            raise KeyError(f"{key} is none of the shapes announced: {self._keys}")
        last = min(self._places[key] + self._ahead, len(self._keys) - 1)
        while self._submitted <= last:
            following = self._keys[self._submitted]
            self._futures[following] = self._thread.submit(self._timed, following)
            self._submitted += 1
        future = self._futures.get(key)
        if future is None:
            raise KeyError(f"the program of {key} was discarded")
        if not future.done() or key not in self.waited_seconds:
            began = time.monotonic()
            future.exception()  # waits
            waited = self.waited_seconds.get(key, 0.0)
            self.waited_seconds[key] = waited + time.monotonic() - began
        return future.result()

    @property
    def is_compiling(self) -> bool:
        """Whether a compilation runs or waits to."""
        return any(not future.done() for future in list(self._futures.values()))

    def discard(self, key: Any) -> None:
        """Free the program of a key that is not used any more."""
        self._futures.pop(key, None)

    def _timed(self, key: Any) -> Any:
        began = time.monotonic()
        program = self._compile(key)
        self.seconds[key] = time.monotonic() - began
        return program

    def __exit__(self, *exception: Any) -> None:
        """Wait for the compilation that runs, and drop the others."""
        self._thread.shutdown(wait=True, cancel_futures=True)
