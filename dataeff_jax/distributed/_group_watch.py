"""A process's watch among several: heartbeats, first cause, a common last step."""

import os
import re
import sys
import threading
import time
import traceback

import jax

from dataeff_jax.distributed import _obituary, _store, _verdict, _watch

_TRACEBACK_CHARACTERS = 4000
# A collective that lost its peer raises JaxRuntimeError or, seen with gloo, ValueError.
_LOST_PEER = re.compile(
    r"gloo|nccl|UNAVAILABLE|ABORTED|DEADLINE_EXCEEDED|connection (closed|reset)",
    re.IGNORECASE,
)


class GroupWatch(_watch.Watch):
    """What `guard` yields in a run of several processes.

    A second thread talks to the coordination service. A coordinator that hangs blocks
    that thread, so the clock thread, which talks to nobody, notices it.

    Args:
        limits: seconds allowed.
        store: where the processes leave word for each other.
        index: index of this process.
        count: number of processes.
    """

    def __init__(
        self,
        limits: _verdict.Limits,
        store: _store.KeyValueStore,
        index: int,
        count: int,
    ):
        super().__init__(limits)
        self._store, self._index, self._count = store, index, count
        self._threads.append(threading.Thread(target=self._talk, daemon=True))
        self._judge = _verdict.Judge(count, limits)
        self._coordinator = _verdict.Beat()  # the last one seen
        self._beats = 0  # exchanged with the coordination service
        self._beats_seen, self._silent = 0, 0.0  # by the clock thread
        self._turn = threading.Lock()  # held while all agree on the step to stop at
        self._has_turn = False  # the talking thread holds it
        self._polled = -1
        self._last_step: int | None = None
        self._all_left = threading.Event()
        self._ending = threading.Lock()
        self._obituary = _obituary.Obituary()

    def stop_requested(self, step: int) -> bool:
        """Whether to stop before this step: the same answer in all processes."""
        with self._turn:
            self._polled = step
            return self._last_step is not None and step >= self._last_step

    def __exit__(self, kind, error, trace):
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self._beat = self._beat._replace(state="left")
            self._all_left.wait()
        else:
            self._fail(error)
        super().__exit__(kind, error, trace)
        self._obituary.close()

    # The end.

    def _fail(self, error: BaseException) -> None:
        """Publish an error as the cause, unless another process is to blame; end."""
        if _may_come_from_a_peer(error):
            # Most likely a collective that lost its peer: leave time for the peer's own
            # report, or for its silence to be noticed.
            self._beat = self._beat._replace(state="fails")
            time.sleep(self._limits.dead + 5 * self._limits.interval)
        trace = "".join(traceback.format_exception(error))[-_TRACEBACK_CHARACTERS:]
        reason = error
        if isinstance(error, SystemExit):  # the program's own choice, and no surprise
            reason, trace = error.__context__ or error, ""
        summary = "".join(traceback.format_exception_only(reason)).strip()
        cause = f"process {self._index} failed {self._beat.where()}: {summary}"
        self._blame(f"{cause}\n{trace}".rstrip(), status=_status(error))

    def _blame(self, cause: str, *, status: int = 1) -> None:
        """Make this the cause for all processes, unless there is one already; end."""
        _watch.briefly(lambda: self._store.set_once("failure", cause))
        self._end(cause, status=status)

    def _end(self, cause: str, *, status: int = 1) -> None:
        with self._ending:  # the first thread to come never lets go
            words = f"\nProcess {self._index} of {self._count} ends: {cause}"
            _watch.briefly(lambda: print(words, file=sys.stderr))
            _watch.briefly(self._take_leave, seconds=3 * self._limits.interval + 1)
            _watch.briefly(_watch.flush)
            _watch.briefly(self._obituary.close)
            # Not sys.exit: the main thread may be blocked in a collective, and jax's
            # shutdown would wait minutes for processes that no longer exist.
            os._exit(status)

    def _take_leave(self) -> None:
        """Process 0 hosts the store, so it goes last, when the others have read why."""
        self._store.set(f"ended/{self._index}", "")
        while self._index == 0 and len(self._store.items("ended")) < self._count:
            time.sleep(0.05)

    # In the clock thread.

    def _look(self, seconds: float) -> None:
        answered, self._beats_seen = self._beats != self._beats_seen, self._beats
        self._silent = 0.0 if answered else self._silent + seconds
        if self._silent > self._limits.hang:
            self._end(
                "process 0, the coordinator, has died or hangs: no answer for "
                f"{self._limits.hang:g} s. Last seen: {self._coordinator.where()}."
            )

    # In the talking thread.

    def _talk(self) -> None:
        last = time.monotonic()
        try:
            while not (self._closing.is_set() or self._all_left.is_set()):
                now = time.monotonic()
                self._exchange(now - last)
                last = now
                self._agree_on_stop()
                waits = self._limits.interval / (10 if self._has_turn else 1)
                self._closing.wait(waits)
        except jax.errors.JaxRuntimeError as error:
            self._end(f"process 0, the coordinator, is gone: {error}")
        if self._has_turn:
            self._turn.release()

    def _exchange(self, seconds: float) -> None:
        """One heartbeat: publish, read the news, and as process 0 judge."""
        beat = self._beat._replace(count=self._beats)
        self._store.set(f"beat/{self._index}", beat.dumps())
        self._obituary.write(self._sudden_end())
        if (cause := self._store.get("failure")) is not None:
            self._end(cause)
        if self._index == 0:
            self._judge_all(seconds)
        else:
            self._coordinator = _verdict.Beat.loads(self._store.get("beat/0") or "[]")
            if self._store.get("all_left") is not None:
                self._all_left.set()
        self._beats += 1

    def _sudden_end(self) -> str:
        """What to say if this process ends right now without a word of its own."""
        place = f"Process {self._index} of {self._count} died {self._beat.where()}: it"
        if self._index == 0:
            return f"{place} was killed or crashed. It was the coordinator."
        return (
            f"{place} was killed or crashed, or jax aborted it because process 0, the "
            f"coordinator, died (last seen {self._coordinator.where()})."
        )

    def _judge_all(self, seconds: float) -> None:
        texts = self._store.items("beat")
        beats = {int(i): _verdict.Beat.loads(text) for i, text in texts.items()}
        if (verdict := self._judge.look(beats, seconds)) is not None:
            self._blame(verdict)
        if [beat.state for beat in beats.values()].count("left") == self._count:
            self._store.set("all_left", "")
            self._all_left.set()

    def _agree_on_stop(self) -> None:
        """Stop before the step after the furthest one that any process has begun.

        From publishing its step until all have published theirs, a process is kept from
        beginning a new one by the lock; so nobody has passed the step agreed on.
        """
        if self._last_step is not None:
            return
        if self._asked:
            self._store.set("stop", "")
        elif self._store.get("stop") is None:
            return
        self._asked = True
        if not self._has_turn:
            self._has_turn = self._turn.acquire()
            self._store.set(f"stop_at/{self._index}", str(self._polled))
        steps = self._store.items("stop_at")
        if len(steps) == self._count:
            self._last_step = max(map(int, steps.values())) + 1
            self._turn.release()
            self._has_turn = False


def _may_come_from_a_peer(error: BaseException | None) -> bool:
    """Whether this error, or one that led to it, may be the echo of another process."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError):
            return True
        if _LOST_PEER.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _status(error: BaseException) -> int:
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return 1
