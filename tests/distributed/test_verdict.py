"""The judge names the process at fault, and nobody while all is well."""

import pytest

from dataeff_jax.distributed import _verdict

LIMITS = _verdict.Limits(dead=3.0, hang=6.0, stall=20.0, stop=None, interval=1.0)


def beats(tick, *, silent=(), moving=True, **fields):
    """Beats of three processes; the silent ones stay at their first."""
    result = {}
    for index in range(3):
        now = 0 if index in silent else tick
        moves = now if moving else 0
        result[index] = _verdict.Beat(now, moves, now, "step", **fields)
    return result


def verdict_after(ticks, seconds=1.0, **kwargs):
    judge = _verdict.Judge(3, LIMITS)
    said = None
    for tick in range(ticks + 1):
        said = said or judge.look(beats(tick, **kwargs), seconds)
    return said


def test_beats_that_change_are_well():
    assert verdict_after(50) is None


@pytest.mark.parametrize(("state", "limit"), [("runs", 6), ("fails", 3)])
def test_silence_is_named_after_its_limit(state, limit):
    assert verdict_after(limit, silent={2}, state=state) is None
    said = verdict_after(limit + 1, silent={2}, state=state)
    assert said is not None
    assert "process 2 has died" in said
    assert "phase 'step'" in said


def test_processes_of_one_host_are_named_together():
    said = verdict_after(7, silent={1, 2})
    assert said is not None
    assert said.startswith("processes 1, 2 ")


def test_a_judge_that_was_stopped_accuses_nobody():
    assert verdict_after(2, silent={0, 1, 2}, seconds=1000.0) is None


def test_no_progress_lists_all_places():
    said = verdict_after(21, moving=False)
    assert said is not None
    assert "no process made progress for 20 s" in said


def test_a_beat_survives_json():
    beat = _verdict.Beat(3, 4, None, "compile", "fails")
    assert _verdict.Beat.loads(beat.dumps()) == beat
