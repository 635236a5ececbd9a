"""Metrics as JSON lines and TensorBoard events, the same after any interruption."""

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIRECTORY = "tensorboard"

# What a clock measured; all other fields of a line are the same in every repetition.
WALL_CLOCK_FIELDS = (
    "seconds",
    "seconds_left",
    "steps_per_second",
    "tokens_per_second",
    "data_seconds",
)


def _plain(value: Any) -> Any:
    """A Python number; what JSON cannot hold (nan, inf) becomes null."""
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _complete_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """Parses a log; a torn last line is left out."""
    *lines, torn = path.read_bytes().split(b"\n")
    del torn  # b"" where the last line is whole
    try:
        records = [json.loads(line) for line in lines]
        for record in records:
            if not isinstance(record, dict) or "step" not in record:
                raise ValueError(f"{record!r} is no object with a step")
    except ValueError as error:
        raise ValueError(
            f"{path} holds a line that is no JSON of a step ({error}); repair or remove"
            " the file."
        ) from None
    return records


def _keep_until(path: pathlib.Path, step: int | None) -> None:
    """Rewrites a log without lines after a step (all, if None), atomically."""
    lines = [] if step is None else _complete_lines(path)
    kept = [line for line in lines if line["step"] <= (step or 0)]
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class MetricsLogger:
    """Writes one JSON line a call, and the same numbers for TensorBoard.

    A run that goes on from a checkpoint keeps the lines up to its step and drops later
    ones, which it writes again: after any interruption the file holds every line once.
    For that, log a step *before* saving its checkpoint. In a run of several processes
    only the first writes.

    Args:
      workdir: directory of ``metrics.jsonl`` and ``tensorboard``; made if needed.
      restored_step: step of the checkpoint that the run goes on from; None means it
        starts from nothing, and an old log is replaced.
      tensorboard: whether to write TensorBoard events.

    Example:
      >>> import tempfile
      >>> workdir = tempfile.mkdtemp()
      >>> with MetricsLogger(workdir, tensorboard=False) as logger:
      ...     logger.log(10, {"loss": 2.5, "tokens": 2**40})
      >>> read_log(workdir)
      [{'step': 10, 'loss': 2.5, 'tokens': 1099511627776}]
    """

    def __init__(
        self,
        workdir: str | pathlib.Path,
        *,
        restored_step: int | None = None,
        tensorboard: bool = True,
    ):
        self._file = self._events = None
        if jax.process_index() != 0:
            return
        workdir = pathlib.Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        path = workdir / METRICS_FILE
        if path.exists():
            _keep_until(path, restored_step)
        self._file = path.open("a")
        if tensorboard:
            import tensorboardX

            self._events = tensorboardX.SummaryWriter(
                str(workdir / TENSORBOARD_DIRECTORY),
                purge_step=0 if restored_step is None else restored_step + 1,
                flush_secs=10,
            )

    def __enter__(self) -> "MetricsLogger":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes one line; when it returns the line is on the disk.

        Args:
          step: optimizer steps done.
          values: numbers (or texts) by name.
        """
        if self._file is None:
            return
        line = {"step": int(step)} | {k: _plain(v) for k, v in values.items()}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._events is not None:
            for name, value in line.items():
                if isinstance(value, int | float) and name != "step":
                    self._events.add_scalar(name, value, step)

    def close(self) -> None:
        """Closes the files."""
        for file in (self._file, self._events):
            if file is not None:
                file.close()
        self._file = self._events = None


def read_log(workdir: str | pathlib.Path) -> list[dict[str, Any]]:
    """Reads the metrics of a run, also while it is going on.

    Args:
      workdir: its work directory.

    Returns:
      One dict a line, oldest first.

    Raises:
      ValueError: if there is no log, or it is damaged.

    Example:
      >>> read_log("/nowhere")
      Traceback (most recent call last):
      ...
      ValueError: /nowhere has no metrics.jsonl; give the work directory of a run.
    """
    path = pathlib.Path(workdir) / METRICS_FILE
    if not path.is_file():
        raise ValueError(
            f"{workdir} has no {METRICS_FILE}; give the work directory of a run."
        )
    return _complete_lines(path)


def without_wall_clock(line: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves out what a clock measured, so that two runs can be compared.

    Args:
      line: one line of a log.

    Returns:
      The fields that do not depend on the machine's speed.

    Example:
      >>> without_wall_clock({"step": 1, "loss": 2.0, "seconds": 0.3})
      {'step': 1, 'loss': 2.0}
    """
    return {k: v for k, v in line.items() if k not in WALL_CLOCK_FIELDS}
