"""Kills a training run at random moments and compares it with an unbroken one.

    python -m benchmarks.interruptions --kills=20 [--output=FILE.json]

Each case starts a run in a process of its own, kills it with SIGKILL (every second time
in the middle of writing a checkpoint), starts the same command again and lets it end.
All fields of all metric lines but the wall-clock ones must then equal those of the
unbroken run, none missing and none doubled, and so must every bit of the parameters.
"""

import argparse
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np

from dataeff_jax import training

ROOT = pathlib.Path(__file__).resolve().parents[1]


def command(
    workdir: pathlib.Path, *overrides: str, steps: int = 40, save_every: int = 2
) -> list[str]:
    """A run of small steps, by default 40 of which every second is saved."""
    return [
        *(sys.executable, "-m", "experiments.train_lm"),
        "--config=configs/gpt_baseline.py:tiny",
        f"--workdir={workdir}",
        f"--config.train.num_steps={steps}",
        f"--config.checkpoint.every_steps={save_every}",
        "--config.eval.max_rows=8",
        "--config.model.kwargs.dropout_rate=0.1",
        *overrides,
    ]


def environment() -> dict[str, str]:
    """One CPU device, and compilations kept between the runs."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def finish(workdir: pathlib.Path, *overrides: str) -> str:
    """Runs the command to its end; returns what it wrote to standard error."""
    done = subprocess.run(
        command(workdir, *overrides),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}:\n{done.stderr}")
    return done.stderr


def kill_once(workdir: pathlib.Path, *, while_saving: bool, random_: random.Random):
    """Starts the command and kills it; returns what was killed, for the record."""
    process = subprocess.Popen(
        command(workdir),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    metrics = workdir / training.METRICS_FILE
    wanted = random_.randrange(1, 36)
    try:
        while process.poll() is None:
            if _lines(metrics) > wanted:
                if not while_saving:
                    time.sleep(random_.uniform(0, 0.1))
                    break
                if list((workdir / training.CHECKPOINT_DIRECTORY).glob("*tmp*")):
                    break
            time.sleep(0.0005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    half_written = list((workdir / training.CHECKPOINT_DIRECTORY).glob("*tmp*"))
    return {
        "lines_at_kill": _lines(metrics),
        "half_written_checkpoint": bool(half_written),
        "was_running": process.returncode == -signal.SIGKILL,
    }


def _lines(path: pathlib.Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def outcome(workdir: pathlib.Path):
    """The metric lines without wall-clock fields, and the final parameters."""
    lines = [training.without_wall_clock(r) for r in training.read_log(workdir)]
    return lines, parameters(workdir)


def parameters(workdir: pathlib.Path) -> dict[str, np.ndarray]:
    """All parameters of the newest checkpoint, by name."""
    from flax import nnx

    state = nnx.state(training.restore(workdir), nnx.Param)
    return {
        "/".join(map(str, path)): np.asarray(value[...])
        for path, value in nnx.to_flat_state(state)
    }


def same(ours, other) -> bool:
    """Whether two outcomes are equal, bit for bit."""
    (lines, params), (other_lines, other_params) = ours, other
    return (
        lines == other_lines
        and params.keys() == other_params.keys()
        and all(
            np.array_equal(params[k].view(np.uint8), other_params[k].view(np.uint8))
            for k in params
        )
    )


def run(kills: int, *, seed: int = 0, report=print) -> dict:
    """Does all cases; returns the record."""
    random_ = random.Random(seed)
    cases = []
    with tempfile.TemporaryDirectory() as place:
        unbroken = pathlib.Path(place) / "unbroken run"
        finish(unbroken)
        expected = outcome(unbroken)
        for number in range(kills):
            workdir = pathlib.Path(place) / f"run {number}"
            case = kill_once(workdir, while_saving=bool(number % 2), random_=random_)
            said = finish(workdir)
            case["said_incomplete"] = "is incomplete" in said
            case["equal"] = same(outcome(workdir), expected)
            cases.append(case)
            report(f"kill {number + 1} of {kills}: {case}")
    return {
        "kills": kills,
        "equal": sum(case["equal"] for case in cases),
        "killed_while_saving": sum(c["half_written_checkpoint"] for c in cases),
        "metric_lines": len(expected[0]),
        "cases": cases,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=pathlib.Path)
    flags = parser.parse_args()
    record = run(flags.kills, seed=flags.seed)
    print(f"{record['equal']} of {record['kills']} runs equal the unbroken one")
    if flags.output:
        flags.output.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(record["equal"] != record["kills"])


if __name__ == "__main__":
    main()
