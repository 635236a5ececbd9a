"""Who is at fault, judged from the heartbeats of all processes."""

import json
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple


class Limits(NamedTuple):
    """Seconds that `dataeff_jax.distributed.guard` allows; None for no limit."""

    dead: float
    hang: float
    stall: float | None
    stop: float | None
    interval: float


class Beat(NamedTuple):
    """What a process says about itself."""

    count: int = 0  # number of the heartbeat
    moves: int = 0  # how often step or phase was reported
    step: int | None = None
    phase: str = "start"
    state: Literal["runs", "fails", "left"] = "runs"

    def dumps(self) -> str:
        """The beat as JSON."""
        return json.dumps(self)

    @classmethod
    def loads(cls, text: str) -> "Beat":
        """A beat from its JSON."""
        return cls(*json.loads(text))

    def where(self) -> str:
        """Phase and step in words."""
        phase = {
            "runs": f"in phase {self.phase!r}",
            "fails": f"in phase {self.phase!r}, where a collective failed",
            "left": f"at its end, after phase {self.phase!r}",
        }[self.state]
        return phase if self.step is None else f"{phase} of step {self.step}"


class Judge:
    """Process 0's view of all processes.

    Time counts only while process 0 itself runs, in portions of at most two intervals:
    when it was stopped for a minute, it must not accuse the others of silence.

    Args:
        count: number of processes.
        limits: seconds allowed.
    """

    def __init__(self, count: int, limits: Limits):
        self._limits = limits
        self._beats: dict[int, Beat] = {}
        self._silent = dict.fromkeys(range(count), 0.0)
        self._still = 0.0

    def look(self, beats: Mapping[int, Beat], seconds: float) -> str | None:
        """Take in the newest beats.

        Args:
            beats: newest beat of each process that has sent one.
            seconds: time since the last look.

        Returns:
            The failure in words, or None while all is well.
        """
        seconds = min(seconds, 2 * self._limits.interval)
        for index in self._silent:
            fresh = beats.get(index) != self._beats.get(index)
            self._silent[index] = 0.0 if fresh else self._silent[index] + seconds
        before = {i: (beat.moves, beat.state) for i, beat in self._beats.items()}
        moved = before != {i: (beat.moves, beat.state) for i, beat in beats.items()}
        self._still = 0.0 if moved else self._still + seconds
        self._beats = dict(beats)
        return self._silence() or self._stall()

    def _silence(self) -> str | None:
        failing = [i for i, beat in self._beats.items() if beat.state == "fails"]
        limit = self._limits.dead if failing else self._limits.hang
        if not any(self._silent[index] > limit for index in self._beats):
            return None
        # Those that fell silent together, such as all of a host, are named together.
        silent = [i for i in self._beats if self._silent[i] > 0.7 * limit]
        places = "; ".join(
            f"process {i} was {self._beats[i].where()}" for i in silent[:8]
        )
        fate = "has died" if failing else "has died or hangs"
        more = f" A collective failed on {_processes(failing)}." if failing else ""
        return (
            f"{_processes(silent)} {fate}: no heartbeat for {limit:g} s. "
            f"Last seen: {places}.{more}"
        )

    def _stall(self) -> str | None:
        limit = self._limits.stall
        if limit is None or self._still <= limit:
            return None
        groups: dict[str, list[int]] = {}
        for index in self._silent:
            beat = self._beats.get(index)
            place = "not yet inside guard" if beat is None else beat.where()
            groups.setdefault(place, []).append(index)
        places = "; ".join(
            f"{_processes(who)}: {place}" for place, who in groups.items()
        )
        return f"no process made progress for {limit:g} s. {places}."


def _processes(indices: Iterable[int]) -> str:
    """`process 3` or `processes 1, 2, 5`."""
    names = [str(index) for index in sorted(indices)]
    shown = ", ".join(names[:16]) + (", ..." if len(names) > 16 else "")
    return f"process{'es' if len(names) > 1 else ''} {shown}"
