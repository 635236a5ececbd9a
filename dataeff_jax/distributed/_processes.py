"""Processes that start together, stop at the same step, and end together.

`jax.distributed` connects them (gloo between CPUs, NCCL between GPUs), but a process
that raises leaves the others waiting in a collective, and one that is killed is noticed
late and not named. `guard` sees to that.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping

import jax

from dataeff_jax.distributed import _group_watch, _store, _verdict, _watch

_VARIABLES = {
    "coordinator": "COORDINATOR",
    "num_processes": "NUM_PROCESSES",
    "process_id": "PROCESS_ID",
}


def initialize(
    coordinator: str | None = None,
    *,
    num_processes: int | None = None,
    process_id: int | None = None,
    heartbeat_seconds: int = 100,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Connect this process to the others of the run, if there are any.

    Each argument that is not given comes from the environment variable COORDINATOR,
    NUM_PROCESSES or PROCESS_ID. With none of them, a cluster that jax knows (Slurm,
    Open MPI, ...) is used; without one, this is the only process and nothing happens.
    Call it before anything else touches jax's devices, and enter `guard` next: only
    then a dead process is noticed quickly.

    Args:
        coordinator: host:port at which process 0 listens and all others find it.
        num_processes: number of processes of the run.
        process_id: index of this process, 0 to num_processes - 1.
        heartbeat_seconds: after this many seconds of silence jax itself aborts the run,
            from C++ and without a name. Keep it above `hang_seconds` of `guard`, which
            comes first and says which process it was.
        environment: where the variables are looked up.

    Raises:
        ValueError: when only some of the three are known or one is no valid number.

    Example:
        >>> initialize(environment={})  # alone: nothing to connect
        >>> jax.process_count()
        1
    """
    given = _settings(coordinator, num_processes, process_id, environment)
    if not given and (jax.distributed.is_initialized() or not _in_cluster(environment)):
        return
    if given.get("num_processes") == 1:
        return
    jax.distributed.initialize(
        given.get("coordinator"),
        given.get("num_processes"),
        given.get("process_id"),
        heartbeat_timeout_seconds=heartbeat_seconds,
    )


def _settings(coordinator, num_processes, process_id, environment) -> dict:
    """What is known of the three; all of them or nothing."""
    given = {
        "coordinator": coordinator,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    for name, variable in _VARIABLES.items():
        if given[name] is None:
            given[name] = environment.get(variable) or None
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return {}
    if missing:
        wanted = " and ".join(f"{name} ({_VARIABLES[name]})" for name in missing)
        raise ValueError(
            "several processes need coordinator, num_processes and process_id; "
            f"{wanted} missing. Give all three as arguments or environment variables, "
            "or none."
        )
    for name in ("num_processes", "process_id"):
        given[name] = _whole_number(given[name], name)
    if not 0 <= given["process_id"] < given["num_processes"]:
        raise ValueError(
            f"process_id={given['process_id']} must lie between 0 and num_processes - "
            f"1 = {given['num_processes'] - 1}."
        )
    if ":" not in given["coordinator"]:
        raise ValueError(
            f"coordinator={given['coordinator']!r} has no port; give host:port, such "
            "as '10.0.0.1:1234'."
        )
    return given


def _whole_number(value, name: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(
            f"{name}={value!r} ({_VARIABLES[name]}) is no whole number."
        ) from None


def _in_cluster(environment: Mapping[str, str]) -> bool:
    """Whether a launcher that jax recognises started more than this process.

    jax would also take one process inside a batch job for a cluster, and warn in every
    Kubernetes pod; a run of one process needs neither.
    """
    if environment.get("JAX_COORDINATOR_ADDRESS"):
        return True
    sizes = {"SLURM_STEP_NODELIST": "SLURM_NTASKS"}
    sizes["OMPI_MCA_orte_hnp_uri"] = "OMPI_COMM_WORLD_SIZE"
    return any(
        mark in environment and int(environment.get(size, 1)) > 1
        for mark, size in sizes.items()
    )


@contextlib.contextmanager
def guard(
    *,
    dead_seconds: float = 10.0,
    hang_seconds: float = 50.0,
    stall_seconds: float | None = 1800.0,
    stop_seconds: float | None = 60.0,
    interval_seconds: float = 1.0,
) -> Iterator[_watch.Watch]:
    """Watch over the processes of a run while its body trains.

    Every process publishes a heartbeat with its step and phase, and looks whether the
    run has failed. The first cause wins, and all processes then end with exit status 1
    and one message that names it, even those which wait in a collective:

    * a process raises: its error and the end of its traceback, at once;
    * a process is killed: a collective fails elsewhere, and after `dead_seconds`
      without a heartbeat that process is named;
    * a process is stopped, or dies unnoticed: named after `hang_seconds` of silence,
      with its last phase and step. One that goes on earlier is left in peace;
    * nobody's step or phase changes for `stall_seconds`: all phases are listed.

    SIGTERM, to one process or to all, and a first Ctrl-C ask for a stop:
    `stop_requested(step)` becomes True at the same step everywhere. When the body has
    not ended `stop_seconds` later, the processes end.

    Leaving the body waits until all processes have left theirs. In a run of one process
    errors simply pass and only SIGTERM is handled.

    Args:
        dead_seconds: silence that makes a process dead once a collective has failed.
        hang_seconds: silence that makes a process dead or hanging at any time; below
            `heartbeat_seconds` of `initialize`.
        stall_seconds: longest time without any progress, longer than the longest
            compilation or evaluation that reports none; None for no limit.
        stop_seconds: longest time from SIGTERM to the end of the body; None for no
            limit.
        interval_seconds: time between two heartbeats.

    Yields:
        A `Watch` with `report(step, phase)` and `stop_requested(step)`.

    Raises:
        ValueError: when the limits are not interval < dead <= hang.

    Example:
        >>> with guard() as watch:
        ...     for step in range(3):
        ...         watch.report(step, "train")
        ...         if watch.stop_requested(step):
        ...             break
        >>> step
        2
    """
    if not 0 < interval_seconds < dead_seconds <= hang_seconds:
        raise ValueError(
            f"interval_seconds={interval_seconds}, dead_seconds={dead_seconds}, "
            f"hang_seconds={hang_seconds}: each must be positive and at most the next."
        )
    limits = _verdict.Limits(
        dead_seconds, hang_seconds, stall_seconds, stop_seconds, interval_seconds
    )
    watch = _join(limits) if jax.distributed.is_initialized() else _watch.Watch(limits)
    with _watch.stop_signals(watch), watch:
        yield watch


def _join(limits: _verdict.Limits) -> _group_watch.GroupWatch:
    """A watch with a fresh prefix: all processes enter the same number of guards."""
    index, count = _store.place()
    entered = _store.KeyValueStore("dataeff_jax/guards").increment(str(index))
    store = _store.KeyValueStore(f"dataeff_jax/guard_{entered}")
    return _group_watch.GroupWatch(limits, store, index, count)
