"""Kills an analysis at random moments and compares its index with an unbroken one's.

    python -m benchmarks.analysis_interruptions --kills=10 [--output=FILE.json]

The rows of a real corpus (that of configs/gpt_baseline.py) are analyzed by sequence
length, vocabulary rarity and their product, in a process of its own. It is killed with
SIGKILL when a random number of results is there, the last time while it writes the
index, and the same command is started again each time. Every second time it has worker
processes, which must end with it. At last it comes to its end: the index must have
every byte of an unbroken run's, and nothing may lie beside it.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
METRICS = (
    "sequence_length",
    "vocabulary_rarity",
    "sequence_length_vocabulary_rarity",
)
REAL = ("--config=configs/gpt_baseline.py", "--shard_size=500")


def command(output: pathlib.Path, flags: tuple[str, ...], num_workers: int = 0):
    return [
        *(sys.executable, "-m", "experiments.analyze", *flags),
        *(f"--metric={metric}" for metric in METRICS),
        f"--output={output}",
        f"--num_workers={num_workers}",
    ]


def start(output: pathlib.Path, flags: tuple[str, ...], num_workers: int = 0):
    return subprocess.Popen(
        command(output, flags, num_workers),
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a group of its own: see has_ended
    )


def finish(output: pathlib.Path, flags: tuple[str, ...]) -> dict[str, bytes]:
    """Runs the command to its end; returns the files of the index."""
    process = start(output, flags)
    if process.wait():
        raise RuntimeError(f"exit status {process.returncode}")
    return {path.name: path.read_bytes() for path in output.iterdir()}


def num_parts(output: pathlib.Path) -> int:
    """Results of shards that are there."""
    return len(list(output.parent.glob(f".{output.name}.*.parts/*-*-????????.npy")))


def is_writing(output: pathlib.Path) -> bool:
    return bool(list(output.parent.glob(f".{output.name}.*.new/*.npy")))


def kill_once(
    output: pathlib.Path,
    flags: tuple[str, ...],
    *,
    wanted: float,
    num_workers: int,
) -> dict:
    """Kills the command when ``wanted`` results are there, or while it writes."""
    process = start(output, flags, num_workers)
    while process.poll() is None:
        if num_parts(output) >= wanted or is_writing(output):
            break
        time.sleep(0.0005)
    writing = is_writing(output)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return {
        "parts_at_kill": num_parts(output),
        "while_writing_the_index": writing,
        "num_workers": num_workers,
        "was_running": process.returncode == -signal.SIGKILL,
        "workers_ended": has_ended(process.pid),
    }


def has_ended(group: int, patience_seconds: float = 30.0) -> bool:
    """Whether all processes of a group end, without being killed."""
    deadline = time.monotonic() + patience_seconds
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)  # only asks
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def run(
    kills: int,
    place: pathlib.Path,
    *,
    flags: tuple[str, ...] = REAL,
    seed: int = 0,
    report=print,
) -> dict:
    """Does it all in the folder ``place``; returns the record."""
    expected = finish(place / "unbroken index", flags)
    manifest = json.loads(expected["manifest.json"])
    size = next(int(f.split("=")[1]) for f in flags if f.startswith("--shard_size"))
    # A count (one metric has some) and a value for each metric.
    in_all = -(-manifest["num_samples"] // size) * (1 + len(METRICS))
    random_ = random.Random(seed)
    moments = sorted(random_.sample(range(1, in_all), kills - 1))
    output, cases = place / "killed index", []
    for number, wanted in enumerate([*moments, float("inf")]):
        workers = 2 * (number % 2)
        cases.append(kill_once(output, flags, wanted=wanted, num_workers=workers))
        report(f"kill {number + 1} of {kills}: {cases[-1]}")
    found = finish(output, flags)
    return {
        "equal": found == expected,
        "workers_ended": all(case["workers_ended"] for case in cases),
        "left_over": sorted(p.name for p in place.glob(".*")),
        "killed": sum(case["was_running"] for case in cases),
        "killed_while_writing_the_index": sum(
            case["was_running"] and case["while_writing_the_index"] for case in cases
        ),
        "num_samples": manifest["num_samples"],
        "parts_in_all": in_all,
        "cases": cases,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=pathlib.Path)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        record = run(flags.kills, pathlib.Path(place), seed=flags.seed)
    record |= {"date": str(datetime.date.today()), "machine": platform.platform()}
    print(f"equal: {record['equal']} after {record['killed']} kills")
    if flags.output:
        flags.output.write_text(json.dumps(record, indent=1) + "\n")
    well = record["equal"] and record["workers_ended"] and not record["left_over"]
    sys.exit(not well)


if __name__ == "__main__":
    main()
