"""Ctrl-C asks a run to stop; pressed again it interrupts."""

import os
import signal

import pytest

from dataeff_jax import distributed


def test_a_first_interrupt_asks_for_a_stop_and_a_second_one_interrupts():
    with pytest.raises(KeyboardInterrupt), distributed.guard() as watch:
        assert not watch.stop_requested(0)
        os.kill(os.getpid(), signal.SIGINT)
        assert watch.stop_requested(1)
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
