import io

import pytest

from dataeff_jax import training


class FakeClock:
    """A clock that moves when told."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


def progress_of(clock, stream=None, **kwargs):
    return training.Progress(
        1000, stream=stream or io.StringIO(), clock=clock, **kwargs
    )


def test_time_left_counts_the_steps_of_this_session_only():
    clock = FakeClock()
    progress = progress_of(clock, start=700)
    assert progress.seconds_left is None
    assert progress.steps_per_second is None
    clock.now += 50
    progress.update(720)
    assert progress.steps_per_second == 0.4
    assert progress.seconds_left == 700


def test_an_update_without_a_step_knows_no_rate():
    clock, stream = FakeClock(), io.StringIO()
    progress = progress_of(clock, stream, start=700)
    clock.now += 5
    progress.update(700)
    assert progress.seconds_left is None
    assert stream.getvalue() == "step 700/1000  ? steps/s  ? left\n"


def test_plain_lines_come_at_most_so_often_and_at_the_end():
    clock, stream = FakeClock(), io.StringIO()
    with progress_of(clock, stream, start=900, every_seconds=10) as progress:
        for step in range(901, 1001):
            clock.now += 1
            progress.update(step, loss=3.14159)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[0] == "step 901/1000  1 steps/s  0:01:39 left  loss 3.142"
    assert lines[-1] == "step 1000/1000  1 steps/s  0:00:00 left  loss 3.142"


def test_a_terminal_gets_a_bar_that_starts_where_the_run_was_resumed():
    stream = Terminal()
    with progress_of(FakeClock(), stream, start=700) as progress:
        progress.update(710, loss=2.5)
    assert "700/1000" in stream.getvalue()
    assert "710/1000" in stream.getvalue()
    assert "loss=2.5" in stream.getvalue()


def test_a_start_beyond_the_end_is_an_error():
    with pytest.raises(ValueError, match="start=1001"):
        training.Progress(1000, start=1001)
