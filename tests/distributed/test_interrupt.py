"""Ctrl-C asks a run to stop; pressed again it interrupts."""

import os
import signal

import pytest

from dataeff_jax import distributed


@pytest.fixture
def interrupts():
    """Sets how SIGINT is handled before a run, and restores it after the test."""
    before = signal.getsignal(signal.SIGINT)
    yield lambda handler: signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGINT, before)


def test_a_first_interrupt_asks_for_a_stop_and_a_second_one_interrupts(interrupts):
    interrupts(signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), distributed.guard() as watch:
        assert not watch.stop_requested(0)
        os.kill(os.getpid(), signal.SIGINT)
        assert watch.stop_requested(1)
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupts_that_the_shell_lets_pass_are_still_let_pass(interrupts):
    interrupts(signal.SIG_IGN)
    with distributed.guard() as watch:
        os.kill(os.getpid(), signal.SIGINT)
        assert not watch.stop_requested(0)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
