"""Processes are connected from the environment, end together and stop together."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
import pytest

from dataeff_jax import distributed

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIMITS = {"interval_seconds": 0.2, "dead_seconds": 2.0, "hang_seconds": 6.0}
ALL = {"COORDINATOR": "10.0.0.1:1234", "NUM_PROCESSES": "2", "PROCESS_ID": "1"}


def start(fault, *, count=2, limits=LIMITS):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    script = ROOT / "tests" / "distributed" / "one_of_several.py"
    arguments = [sys.executable, str(script), fault, address, str(count)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return [
        subprocess.Popen(
            [*arguments, str(index), json.dumps(limits)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for index in range(count)
    ]


def wait_until_they_train(processes):
    for process in processes:
        assert any("trains" in line for line in process.stdout)


def ends(processes):
    """(status, stdout, stderr) of each; a hang becomes an error after a minute."""
    try:
        said = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        (process.returncode, *texts)
        for process, texts in zip(processes, said, strict=True)
    ]


def test_an_error_ends_all_and_is_shown_by_all():
    for status, _, stderr in ends(start("raise")):
        assert status == 1
        assert "process 1 failed in phase 'data' of step 3" in stderr
        assert "LookupError: a bad record" in stderr
        assert "Traceback" in stderr


def test_a_refusal_ends_all_with_its_reason_and_no_traceback():
    (_, _, other), (status, _, stderr) = ends(start("refuse"))
    assert status == 2
    for text in (other, stderr):
        assert "process 1 failed in phase 'data' of step 3: LookupError: a" in text
        assert "Traceback" not in text


def test_processes_with_different_configs_end():
    for status, _, stderr in ends(start("disagree")):
        assert status == 1
        assert "the config of process 1 is not that of process 0" in stderr


def test_a_killed_process_is_named():
    processes = start("run")
    wait_until_they_train(processes)
    processes[1].kill()
    (status, _, stderr), (_, _, own) = ends(processes)
    assert status == 1
    assert "process 1 has died: no heartbeat for 2 s" in stderr
    assert "Process 1 of 2 died in phase" in own


def test_sigterm_to_one_stops_all_before_the_same_step():
    processes = start("run")
    wait_until_they_train(processes)
    processes[1].terminate()
    results = ends(processes)
    assert [status for status, _, _ in results] == [0, 0]
    first, second = (out.strip().splitlines()[-1] for _, out, _ in results)
    assert first == second
    assert first.startswith("stops before step")


@pytest.mark.slow
def test_a_killed_coordinator_ends_all_and_is_named():
    processes = start("run")
    wait_until_they_train(processes)
    processes[0].kill()
    (_, _, own), (status, _, stderr) = ends(processes)
    assert status != 0
    assert "It was the coordinator" in own
    assert "process 0, the coordinator, died" in stderr


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_process_is_named_with_its_phase(stopped):
    processes = start("run")
    wait_until_they_train(processes)
    processes[stopped].send_signal(signal.SIGSTOP)
    _, stderr = processes[1 - stopped].communicate(timeout=60)
    processes[stopped].kill()
    processes[stopped].communicate()
    assert f"process {stopped}" in stderr
    assert "has died or hangs" in stderr
    assert "in phase" in stderr


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_process_that_goes_on_in_time_is_left_in_peace(stopped):
    processes = start("run")
    wait_until_they_train(processes)
    processes[stopped].send_signal(signal.SIGSTOP)
    time.sleep(3)  # a collective waits, but nobody is silent for `hang_seconds`
    processes[stopped].send_signal(signal.SIGCONT)
    time.sleep(1)
    assert [process.poll() for process in processes] == [None, None]
    processes[0].terminate()
    assert [status for status, _, _ in ends(processes)] == [0, 0]


def test_alone_initialize_does_nothing():
    distributed.initialize(environment={})
    assert not jax.distributed.is_initialized()


@pytest.mark.parametrize("missing", ALL)
def test_a_missing_variable_is_named(missing):
    environment = {name: value for name, value in ALL.items() if name != missing}
    with pytest.raises(ValueError, match=missing):
        distributed.initialize(environment=environment)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("PROCESS_ID", "2", "process_id=2"),
        ("NUM_PROCESSES", "two", "no whole number"),
        ("COORDINATOR", "somewhere", "has no port"),
    ],
)
def test_a_wrong_variable_is_named(variable, value, message):
    with pytest.raises(ValueError, match=message):
        distributed.initialize(environment={**ALL, variable: value})


def test_limits_must_be_in_order():
    with (
        pytest.raises(ValueError, match="dead_seconds"),
        distributed.guard(dead_seconds=60.0),
    ):
        pass


def test_alone_an_error_passes_and_sigterm_asks_for_a_stop():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(LookupError), distributed.guard() as watch:
        assert not watch.stop_requested(0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert watch.stop_requested(1)
        raise LookupError
    assert signal.getsignal(signal.SIGTERM) == before
