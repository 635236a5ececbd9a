"""Runs a list of trainings one after another, and keeps each one's result as JSON.

An experiment is a list of runs. A run whose result is there is skipped, so a driver
that was stopped goes on with what is missing; every result says how it was made.
"""

import argparse
import datetime
import fnmatch
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dataeff_jax import training
from experiments import command_line, train_lm

ROOT = pathlib.Path(__file__).resolve().parents[1]

# Lines of the training loss that a result keeps; what is computed from all of them is
# computed before.
MAX_POINTS = 100

# A loss that is so much larger than the smallest before is a spike. Losses are means
# over windows of so many tokens: those of small batches alone would be noise.
SPIKE_RATIO = 1.2
WINDOW_TOKENS = 4096


class Run(NamedTuple):
    """One training: a name, a config reference and its overrides."""

    name: str
    config: str  # "configs/file.py:arg"
    overrides: tuple[str, ...] = ()  # "key=value"
    labels: tuple[tuple[str, Any], ...] = ()  # what a table groups by
    max_steps: int | None = None  # None: the whole run

    def command(self, workdir: str = "runs/NAME") -> list[str]:
        """The arguments of ``train_lm`` that make this run."""
        overrides = [f"--config.{override}" for override in self.overrides]
        limit = [f"--max_steps={self.max_steps}"] if self.max_steps else []
        return [f"--config={self.config}", f"--workdir={workdir}", *limit, *overrides]

    @property
    def told(self) -> str:
        """The command as a result tells it."""
        return " ".join(["python -m experiments.train_lm", *self.command()])


def windowed(tokens: Sequence[int], losses: Sequence[float]) -> list[float]:
    """Means of losses over windows of at least ``WINDOW_TOKENS`` tokens.

    Args:
      tokens: fed up to and with each step.
      losses: of the steps, per token.
    """
    means, start, before = [], 0, 0
    for place, after in enumerate(tokens):
        if after - before >= WINDOW_TOKENS:
            fed = np.diff([before, *tokens[start : place + 1]])
            means.append(float(np.average(losses[start : place + 1], weights=fed)))
            start, before = place + 1, after
    return means


def loss_ratios(losses: Sequence[float]) -> list[float]:
    """Each loss over the smallest one before it; 1 for the first."""
    ratios, smallest = [], float("inf")
    for loss in losses:
        ratios.append(loss / smallest if smallest < float("inf") else 1.0)
        smallest = min(smallest, loss)
    return ratios


def run_all(
    runs: Sequence[Run], directory: pathlib.Path, *, only: str = "*"
) -> dict[str, dict[str, Any]]:
    """Makes the runs that are missing, and returns all results that there are.

    Args:
      runs: what to make, with different names.
      directory: of the results, one JSON file a run.
      only: a pattern of names; others are not made.
    """
    wanted = [run for run in runs if fnmatch.fnmatch(run.name, only)]
    missing = [r for r in wanted if not (directory / f"{r.name}.json").exists()]
    print(f"{len(wanted) - len(missing)} of {len(wanted)} runs are there", flush=True)
    progress = training.Progress(len(missing)) if missing else None
    for number, run in enumerate(missing, start=1):
        result = make(run)
        if not result["diverged"] and not _is_whole(result):
            raise SystemExit(f"{run.name} was stopped and is not kept")
        keep(run, directory, result)
        if progress is not None:
            progress.update(number)
    if progress is not None:
        progress.close()
    return results(runs, directory)


def _is_whole(result: Mapping[str, Any]) -> bool:
    """Whether the run came to its end, whose step is evaluated; a stop's is not."""
    return result["validation_curve"][-1][0] == result["steps"]


def keep(run: Run, directory: pathlib.Path, result: Mapping[str, Any]) -> None:
    """Writes a result, whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    new = directory / f".{run.name}.new"
    new.write_text(json.dumps(result) + "\n")
    new.replace(directory / f"{run.name}.json")


def results(runs: Sequence[Run], directory: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The results that there are, by name, in the order of ``runs``."""
    paths = {run.name: directory / f"{run.name}.json" for run in runs}
    return {n: json.loads(p.read_text()) for n, p in paths.items() if p.exists()}


def make(run: Run) -> dict[str, Any]:
    """Trains once and returns what is kept of it."""
    with tempfile.TemporaryDirectory() as workdir:
        flags = [f for f in run.command() if f.startswith("--config")]
        config = command_line.parse(command_line.parser("sweep"), flags).config
        began, cpu = time.monotonic(), time.process_time()
        diverged = ""
        try:
            with _quiet():
                train_lm.train_and_evaluate(config, workdir, max_steps=run.max_steps)
        except FloatingPointError as error:
            diverged = str(error).split(" Its samples")[0]
        records = training.read_log(workdir)
        jax.clear_caches()
        return {
            "run": run.name,
            **dict(run.labels),
            "command": run.told,
            **provenance(),
            "wall_seconds": round(time.monotonic() - began, 1),
            "cpu_seconds": round(time.process_time() - cpu, 1),
            **summary(records, diverged),
        }


def summary(records: Sequence[Mapping[str, Any]], diverged: str) -> dict[str, Any]:
    """The figures and curves of a log."""
    steps = [r for r in records if "loss" in r]
    evaluated = [r for r in records if "validation_loss" in r]
    losses = [r["loss"] for r in steps]
    ratios = loss_ratios(windowed([r["tokens"] for r in steps], losses))
    last = steps[-1] if steps else records[-1]
    stride = -(-len(steps) // MAX_POINTS) or 1
    counts = ("samples", "tokens", "layer_tokens", "flops")
    return {
        "diverged": diverged,
        "steps": last["step"],
        **{name: last[name] for name in counts},
        "train_seconds": round(last["seconds"], 1),
        "validation_loss": None if diverged else evaluated[-1]["validation_loss"],
        "max_loss_ratio": round(max(ratios, default=1.0), 4),
        "spikes": sum(ratio > SPIKE_RATIO for ratio in ratios),
        "validation_curve": [
            [r["step"], r["tokens"], r["flops"], round(r["validation_loss"], 5)]
            for r in evaluated
        ],
        "loss_curve": [[r["tokens"], round(r["loss"], 4)] for r in steps[::stride]],
    }


def provenance() -> dict[str, str]:
    """Commit, date and machine."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    cores = len(os.sched_getaffinity(0))
    return {
        "commit": commit or "unknown",
        "date": datetime.date.today().isoformat(),
        "machine": f"{cores} of {os.cpu_count()} cores, {platform.machine()}, "
        f"Python {platform.python_version()}, jax {jax.__version__}",
    }


class _quiet:
    """Sends what a run prints to nowhere, so that the driver's progress is seen."""

    def __enter__(self):
        self._old = sys.stdout, sys.stderr
        sys.stdout = sys.stderr = open(os.devnull, "w")

    def __exit__(self, *exception):
        sys.stdout.close()
        sys.stdout, sys.stderr = self._old


def main(
    argv: Sequence[str] | None,
    description: str,
    runs: Callable[..., list[Run]],
    directory: pathlib.Path,
    table: Callable[[dict], str],
    plot: Callable[[dict, pathlib.Path], None],
) -> None:
    """The command of an experiment: makes what is missing, then table and plot.

    Args:
      argv: arguments; None takes those of the process.
      description: what the command is about.
      runs: ``runs(quick=bool)``, all there are.
      directory: of the results, if no other is given.
      table: results -> text.
      plot: draws results into a file.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="*", metavar="PATTERN", help="of run names")
    parser.add_argument("--quick", action="store_true", help="few short runs")
    parser.add_argument("--directory", type=pathlib.Path, default=directory)
    flags = parser.parse_args(argv)
    found = run_all(runs(quick=flags.quick), flags.directory, only=flags.only)
    if found:
        text = table(found)
        (flags.directory / "table.md").write_text(text + "\n")
        plot(found, flags.directory / "plot.png")
        print(f"\n{text}\n\nplot: {flags.directory / 'plot.png'}")
