"""Stops sampling at random steps and goes on in a new process of another layout.

    python -m benchmarks.sampling_resume [--stops=50] [--batches=1000] [--output=FILE]

A curriculum of two metrics with lengths that grow is read with prefetching as 1, 2 or 4
hosts, each with 0 to 3 worker processes, up to a step: every second time in the middle
of a difficulty change, so that the batches in flight belong to other difficulties. All
that is kept is a line of JSON. A new process with other hosts and workers goes on from
it; ids, steps, lengths, difficulties and tokens of its batches must be those of the
unbroken run, and no file of the index or the plan may have changed.
"""

import argparse
import datetime
import hashlib
import json
import pathlib
import platform
import random
import subprocess
import sys
import tempfile

import numpy as np

from dataeff_jax import curriculum, data, schedules

ROOT = pathlib.Path(__file__).resolve().parents[1]
NUM_SAMPLES, LENGTH, BATCH_SIZE, RAMP = 3000, 32, 16, 100
HOSTS, WORKERS = (1, 2, 4), (0, 1, 2, 3)
FIELDS = ("step", "sample_id", "length", "difficulty_level", "difficulty_noise")


class Rows:
    """Rows that are computed from their number, and pickle small."""

    fingerprint = "rows"

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, sample: int) -> dict:
        return {"tokens": np.arange(sample, sample + LENGTH)}


def level(record) -> int:
    return int(record["tokens"][0]) % 97


def noise(record) -> int:
    return int(record["tokens"][0]) * 7919 % 1009


METRICS = [
    curriculum.function_metric(level, name="level", dtype="int64"),
    curriculum.function_metric(noise, name="noise", dtype="int64"),
]


def make_order(directory: pathlib.Path) -> curriculum.SampleOrder:
    grows = schedules.fixed_root_schedule(10, max_difficulty=96, total=RAMP)
    percent = schedules.fixed_linear_schedule(20, max_difficulty=100, total=RAMP)
    criteria = {
        "level": curriculum.Criterion(grows, "value"),
        "noise": curriculum.Criterion(percent),
    }
    index = curriculum.DifficultyIndex(directory / "index")
    return curriculum.SampleOrder(index, criteria, batch_size=BATCH_SIZE, seed=7)


def read(order, *, start: int, stop: int, hosts: int, workers: int) -> list[str]:
    """Reads steps as some hosts; returns what identifies each step's global batch."""
    lengths = curriculum.LengthCurriculum(
        schedules.fixed_linear_schedule(
            8, max_difficulty=LENGTH, total=RAMP, difficulty_step=8
        )
    )
    parts = []
    for host in range(hosts):
        steps = curriculum.batches(
            Rows(), order, process_index=host, process_count=hosts
        )
        iterator = data.prefetch(
            lengths.batches(steps),
            start_step=start,
            num_workers=workers,
            buffer_size=16,
        )
        # Copied: arrays of worker processes hold shared memory, and open files.
        parts.append([copied(next(iterator)) for _ in range(start, stop)])
        iterator.close()
    return [digest(of_hosts) for of_hosts in zip(*parts, strict=True)]


def copied(batch: dict) -> dict:
    return {name: np.array(batch[name]) for name in (*FIELDS, "tokens")}


def digest(parts: tuple[dict, ...]) -> str:
    """A hash of a batch that came in parts."""
    found = hashlib.sha256()
    for name in (*FIELDS, "tokens"):
        whole = np.concatenate([part[name] for part in parts])
        found.update(f"{name} {whole.dtype} {whole.shape} ".encode())
        found.update(whole.tobytes())
    return found.hexdigest()


def files(directory: pathlib.Path) -> dict[str, tuple[int, str]]:
    """Time of change and hash of every file."""
    return {
        str(path.relative_to(directory)): (
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def layout(random_: random.Random) -> dict[str, int]:
    return {"hosts": random_.choice(HOSTS), "workers": random_.choice(WORKERS)}


def other_layout(random_: random.Random, before: dict[str, int]) -> dict[str, int]:
    """One with other hosts and other workers."""
    while True:
        after = layout(random_)
        if all(after[key] != before[key] for key in before):
            return after


def resume(directory: pathlib.Path, request: dict) -> list[str]:
    """Goes on in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.sampling_resume"]
    done = subprocess.run(
        [*command, "--resume", str(directory)],
        cwd=ROOT,
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout)


def resumed(directory: pathlib.Path, request: dict) -> list[str]:
    """What the new process does: the state tells the step and the order."""
    np.random.random(50)  # must not matter
    order = make_order(directory)
    start = order.resume(json.loads(request["state"]))
    stop = start + request["batches"]
    return read(order, start=start, stop=stop, **request["layout"])


def run(stops: int, *, batches: int = 1000, seed: int = 0, report=print) -> dict:
    """Does all cases; returns the record."""
    random_, cases = random.Random(seed), []
    with tempfile.TemporaryDirectory() as place:
        directory = pathlib.Path(place)
        curriculum.analyze(Rows(), METRICS, directory / "index")
        order = make_order(directory)
        changes = order.stages.starts[1:].tolist()
        last = 2 * RAMP + batches
        unbroken = read(order, start=0, stop=last, hosts=1, workers=0)
        for number in range(stops):
            stop = random_.choice(changes) if number % 2 else random_.randrange(1, RAMP)
            before = layout(random_)
            after = other_layout(random_, before)
            first = read(order, start=0, stop=stop, **before)
            state = json.dumps(order.state(stop))
            there = files(directory)
            request = {"state": state, "batches": batches, "layout": after}
            found = resume(directory, request)
            case = {
                "stop": stop,
                "difficulty_changes": stop in changes,
                "before": before,
                "after": after,
                "state_bytes": len(state),
                "equal": first + found == unbroken[: stop + batches],
                "files_unchanged": files(directory) == there,
            }
            cases.append(case)
            report(f"stop {number + 1} of {stops}: {case}")
    return {
        "stops": stops,
        "batches_after_each": batches,
        "equal": sum(case["equal"] and case["files_unchanged"] for case in cases),
        "at_a_difficulty_change": sum(case["difficulty_changes"] for case in cases),
        "largest_state_bytes": max(case["state_bytes"] for case in cases),
        "cases": cases,
        "date": str(datetime.date.today()),
        "machine": platform.platform(),
    }


def main() -> None:
    """Parses the flags, stops and resumes, and says how many were equal."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stops", type=int, default=50)
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--resume", type=pathlib.Path, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.resume:
        print(json.dumps(resumed(flags.resume, json.load(sys.stdin))))
        return
    record = run(flags.stops, batches=flags.batches, seed=flags.seed)
    print(f"{record['equal']} of {record['stops']} went on as the unbroken run")
    if flags.output:
        flags.output.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(record["equal"] != record["stops"])


if __name__ == "__main__":
    main()
