"""One process's watch: where it is, whether to stop, and when it has taken too long."""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from dataeff_jax.distributed import _verdict


class Watch:
    """What `guard` yields in a run of one process.

    A thread looks at the clock, so that a stop that takes too long is ended even while
    the main thread is blocked.

    Args:
        limits: seconds allowed.

    Example:
        >>> from dataeff_jax import distributed
        >>> with distributed.guard() as watch:
        ...     before = watch.stop_requested(0)
        ...     watch.request_stop()
        ...     before, watch.stop_requested(1)
        (False, True)
    """

    def __init__(self, limits: _verdict.Limits):
        self._limits = limits
        self._beat = _verdict.Beat()  # written by the main thread only
        self._asked = False  # a plain flag: a signal handler may set it at any moment
        self._closing = threading.Event()
        self._wake: int | None = None  # end of a pipe into which signals are written
        self._threads = [threading.Thread(target=self._watch_clock, daemon=True)]

    def report(self, step: int | None, phase: str) -> None:
        """Say where this process is; cheap enough for several times a step.

        Args:
            step: the current step, None outside the loop.
            phase: a word for what is being done, such as "data" or "evaluate".
        """
        moves = self._beat.moves + 1
        self._beat = self._beat._replace(step=step, phase=phase, moves=moves)

    def request_stop(self) -> None:
        """Ask all processes to stop soon, as SIGTERM does."""
        self._asked = True

    def stop_requested(self, step: int) -> bool:
        """Whether to stop before this step: the same answer in all processes.

        Args:
            step: number of the step about to be taken; all processes ask at each step.

        Returns:
            True from the step on that was agreed, once anybody has asked for a stop.
        """
        del step  # alone there is nobody to agree with
        return self._asked

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind, error, trace):
        self._closing.set()
        for thread in self._threads:
            thread.join()

    def _watch_clock(self) -> None:
        waited, last = 0.0, time.monotonic()
        while not self._closing.is_set():
            self._wait_for_signal(min(self._limits.interval, 0.2))
            now = time.monotonic()
            # While this process was stopped, no time has passed for it.
            awake, last = min(now - last, 2 * self._limits.interval), now
            waited += awake if self._asked else 0.0
            if self._limits.stop is not None and waited > self._limits.stop:
                self._end(
                    f"it did not stop within {self._limits.stop:g} s after it was "
                    f"asked to: it is {self._beat.where()}.",
                    status=128 + signal.SIGTERM,
                )
            self._look(awake)

    def _look(self, seconds: float) -> None:
        """More for the clock thread to look at."""

    def _wait_for_signal(self, seconds: float) -> None:
        # The handler runs in the main thread, which may be blocked in a collective; the
        # byte in the pipe comes at once.
        if self._wake is None:
            self._closing.wait(seconds)
        elif select.select([self._wake], [], [], seconds)[0]:
            if signal.SIGTERM in os.read(self._wake, 64):
                self._asked = True

    def _end(self, cause: str, *, status: int = 1) -> None:
        """Say why and end this process at once, whatever its other threads wait for."""
        briefly(lambda: print(f"\nThis process ends: {cause}", file=sys.stderr))
        briefly(flush)
        os._exit(status)


@contextlib.contextmanager
def stop_signals(watch: Watch) -> Iterator[None]:
    """SIGTERM and a first Ctrl-C ask `watch` to stop; a second Ctrl-C interrupts."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may change handlers
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    previous = signal.signal(signal.SIGTERM, lambda *_: watch.request_stop())

    def interrupted(*_):
        watch.request_stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    previous_interrupt = signal.getsignal(signal.SIGINT)
    if previous_interrupt is not signal.SIG_IGN:  # as shells set it in the background
        signal.signal(signal.SIGINT, interrupted)
    previous_write = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    watch._wake = read
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous_write)
        # None stands for a handler of C++, such as jax's, which cannot be put back.
        signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)
        signal.signal(signal.SIGINT, previous_interrupt or signal.SIG_DFL)
        os.close(read)
        os.close(write)


def briefly(action: Callable[[], object], *, seconds: float = 2.0) -> None:
    """Do something that may fail or block for ever, but wait for it only so long."""

    def attempt():
        with contextlib.suppress(Exception):
            action()

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)


def flush() -> None:
    """Write out what is still buffered."""
    sys.stdout.flush()
    sys.stderr.flush()
