"""The order of a curriculum, in time and memory, beside DeepSpeed's sampler.

    python -m benchmarks.sampler --peer_python=PATH/bin/python [--rounds=5]
        [--sizes 100000 100000000] [--output=FILE.json]

Both draw from the same values under the same schedules (difficulties by a square root
over the first 100 steps), in turn, DeepSpeed in a child process with an environment of
its own. Also measured, for each of the sizes: what a batch costs, how long the plan of
two metrics takes to build, how long it takes to go on at step 1,000,000, and memory
beyond the mapped files. 100 million samples need 3 GB of disk and some minutes.
"""

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

from dataeff_jax import curriculum, schedules

HIGHEST = {"length": 512, "rarity": 1000}
RAMP = 100


def metric(name: str, difficulty_type: str) -> dict:
    top = 100 if difficulty_type == "percentile" else HIGHEST[name]
    return {
        "difficulty_type": difficulty_type,
        "min_difficulty": 10,
        "max_difficulty": top,
        "total": RAMP,
    }


CASES = {
    "value": {"length": metric("length", "value")},
    "percentile": {"length": metric("length", "percentile")},
    "value + value": {
        "length": metric("length", "value"),
        "rarity": metric("rarity", "value"),
    },
    "value + percentile": {
        "length": metric("length", "value"),
        "rarity": metric("rarity", "percentile"),
    },
}


class Columns:
    """Difficulties that are there already, as an analyzed data set."""

    fingerprint = "columns"

    def __init__(self, folder: pathlib.Path):
        self._columns = {p.stem: np.load(p, "r") for p in folder.glob("*.npy")}

    def __len__(self) -> int:
        return len(self._columns["length"])

    def __getitem__(self, sample: int) -> dict:
        return {name: column[sample] for name, column in self._columns.items()}

    def read_range(self, start: int, stop: int) -> dict:
        return {name: column[start:stop] for name, column in self._columns.items()}


class Column(curriculum.Metric):
    dtype = "int32"

    def __init__(self, name: str):
        self.name = name

    def values(self, records, prepared):
        return records.flat(self.name)[0]


def write_columns(folder: pathlib.Path, num_samples: int) -> None:
    """Writes random difficulties, a piece at a time."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name, top in HIGHEST.items():
        column = np.lib.format.open_memmap(
            folder / f"{name}.npy", mode="w+", dtype=np.int32, shape=(num_samples,)
        )
        for start in range(0, num_samples, 2**22):
            stop = min(start + 2**22, num_samples)
            column[start:stop] = random.integers(1, top + 1, stop - start)
        column.flush()


def make_index(folder: pathlib.Path, num_samples: int) -> None:
    write_columns(folder / "columns", num_samples)
    curriculum.analyze(
        Columns(folder / "columns"),
        [Column(name) for name in HIGHEST],
        folder / "index",
        shard_size=2**22,
    )


def criteria(case: str) -> dict[str, curriculum.Criterion]:
    kinds = {"value": "value", "percentile": "deepspeed_percentile"}
    return {
        name: curriculum.Criterion(
            schedules.fixed_root_schedule(
                told["min_difficulty"],
                max_difficulty=told["max_difficulty"],
                total=told["total"],
                mode="deepspeed",
            ),
            kinds[told["difficulty_type"]],
        )
        for name, told in CASES[case].items()
    }


def open_order(folder: pathlib.Path, case: str, batch_size: int):
    index = curriculum.DifficultyIndex(folder / "index")
    return curriculum.SampleOrder(index, criteria(case), batch_size=batch_size, seed=0)


def clocks() -> np.ndarray:
    return np.array([time.perf_counter(), time.process_time()])


def run(folder: pathlib.Path, request: dict) -> dict:
    """Seconds by the wall and the CPU clock: first batch, each other one, the rest."""
    began = clocks()
    order = open_order(folder, request["case"], request["batch_size"])
    order[0]
    first, others = clocks() - began, []
    ramp, steady = request["num_ramp"], request["num_steady"]
    for step in range(1, ramp):
        began = clocks()
        order[step]
        others.append(clocks() - began)
    began = clocks()
    for step in range(ramp, ramp + steady):
        order[step]
    return {"first": first, "ramp": others, "steady": (clocks() - began) / steady}


class Peer:
    """The child process, driven through its standard input and output."""

    def __init__(self, python: str, folder: pathlib.Path):
        script = pathlib.Path(__file__).with_name("_deepspeed_sampler.py")
        self.process = subprocess.Popen(
            [python, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        )
        self.version = self.ask({"folder": str(folder)})["version"]

    def ask(self, request: dict) -> dict:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("DeepSpeed's process ended; its message is above.")
        return json.loads(line)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def summary(runs: list[dict]) -> dict:
    """Medians over the rounds, in milliseconds."""
    middle = statistics.median
    ramps = [np.array([*run["ramp"], run["first"]]) for run in runs]
    result = {}
    for clock, name in enumerate(("wall", "cpu")):
        result[name] = {
            "first_batch_ms": 1e3 * middle(run["first"][clock] for run in runs),
            "mean_of_ramp_ms": 1e3 * middle(ramp[:, clock].mean() for ramp in ramps),
            "worst_after_first_ms": 1e3
            * middle(np.array(run["ramp"])[:, clock].max() for run in runs),
            "steady_ms": 1e3 * middle(run["steady"][clock] for run in runs),
        }
    result["steady_batches_per_second"] = 1e3 / result["wall"]["steady_ms"]
    return result


def compare(folder: pathlib.Path, options, peer: Peer | None) -> dict:
    """Runs all cases in turn; returns the record of each."""
    result = {}
    for case, metrics in CASES.items():
        request = {
            "case": case,
            "metrics": metrics,
            "batch_size": options.batch_size,
            "num_ramp": 2 * RAMP,
            "num_steady": options.steady,
        }
        run(folder, request)  # builds the plan, which is timed apart
        ours, theirs = [], []
        for _ in range(options.rounds):
            ours.append(run(folder, request))
            if peer:
                theirs.append(peer.ask(request))
        result[case] = {"ours": summary(ours)}
        if peer:
            told = {"ours": summary(ours), "deepspeed": summary(theirs)}
            told["deepspeed_over_ours"] = {
                f"{name}, {clock}": told["deepspeed"][clock][name] / value
                for clock in ("wall", "cpu")
                for name, value in told["ours"][clock].items()
            }
            result[case] = told
        print(f"{case}: {json.dumps(rounded(result[case]))}", file=sys.stderr)
    return result


def anonymous_bytes() -> int:
    """Memory of this process that is no mapped file (Linux)."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("/proc/self/status tells no RssAnon.")


@contextlib.contextmanager
def peak_memory():
    """Gives a list that at the end holds the growth of memory at its highest."""
    before, found, done = anonymous_bytes(), [], threading.Event()

    def watch():
        highest = before
        while not done.wait(0.002):
            highest = max(highest, anonymous_bytes())
        found.append(max(highest, anonymous_bytes()) - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def alone(folder: pathlib.Path, batch_size: int) -> dict:
    """What a process of its own needs: memory, the plan, going on at a late step."""
    case = "value + percentile"
    index = curriculum.DifficultyIndex(folder / "index")
    with tempfile.TemporaryDirectory(dir=folder) as plans, peak_memory() as plan_peak:
        began = clocks()
        curriculum.SampleOrder(
            index,
            criteria(case),
            batch_size=batch_size,
            seed=0,
            plan_directory=plans,
        )
        plan = clocks() - began
    open_order(folder, case, batch_size)  # builds the plan that stays
    with peak_memory() as peak:
        began = clocks()
        order = open_order(folder, case, batch_size)
        order[10**6]
        resume = clocks() - began
        for step in range(2 * RAMP, 2 * RAMP + 2000):
            order[step]
    return {
        "plan_seconds": plan.tolist(),
        "plan_megabytes": plan_peak[0] / 2**20,
        "sampling_megabytes": peak[0] / 2**20,
        "resume_at_million_ms": (1e3 * resume).tolist(),
    }


def scale(folders: dict[int, pathlib.Path], options) -> dict:
    """What indexes of several sizes cost."""
    result = {}
    for size, folder in folders.items():
        flags = ["--alone", str(folder), f"--batch_size={options.batch_size}"]
        command = [sys.executable, "-m", "benchmarks.sampler", *flags]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        result[size] = json.loads(done.stdout)
    cases = [
        (case, size) for case in ("value", "value + percentile") for size in folders
    ]
    orders = {
        key: open_order(folders[key[1]], key[0], options.batch_size) for key in cases
    }
    seconds = {key: [] for key in cases}
    for number in range(options.rounds + 1):
        for key, order in orders.items():
            steps = range(1000 * (number + 1), 1000 * (number + 1) + options.steady)
            began = clocks()
            for step in steps:
                order[step]
            seconds[key].append((clocks() - began) / options.steady)
    for (case, size), values in seconds.items():
        # The first round maps pages that were not touched before.
        result[size][f"{case}, first round ms"] = (1e3 * values[0]).tolist()
        median = 1e3 * np.median(values[1:], axis=0)
        result[size][f"{case}, steady ms"] = median.tolist()
    return result


def rounded(value):
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def measure(options, place: pathlib.Path) -> dict:
    sizes = dict.fromkeys([options.num_samples, *options.sizes])
    folders = {size: place / str(size) for size in sizes}
    for size, folder in folders.items():
        make_index(folder, size)
    folder, peer = folders[options.num_samples], None
    if options.peer_python:
        peer = Peer(options.peer_python, folder / "columns")
    else:
        print("No --peer_python: DeepSpeed is left out.", file=sys.stderr)
    record = {
        "num_samples": options.num_samples,
        "batch_size": options.batch_size,
        "rounds": options.rounds,
        "deepspeed": peer.version if peer else None,
        "cases": compare(folder, options, peer),
    }
    if peer:
        peer.close()
    record["sizes, [wall, cpu]"] = scale(folders, options)
    return record | {
        "load": os.getloadavg()[0],
        "date": str(datetime.date.today()),
        "cores": os.cpu_count(),
        "machine": platform.platform(),
    }


def main() -> None:
    """Parses the flags, measures, and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer_python", help="a Python that has deepspeed 0.19.8")
    parser.add_argument("--num_samples", type=int, default=10**6)
    parser.add_argument("--sizes", type=int, nargs="*", default=[10**5])
    parser.add_argument("--batch_size", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steady", type=int, default=500)
    parser.add_argument("--alone", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=pathlib.Path)
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(alone(options.alone, options.batch_size)))
        return
    if options.peer_python and not os.access(options.peer_python, os.X_OK):
        parser.error(f"--peer_python={options.peer_python} cannot be run.")
    with tempfile.TemporaryDirectory() as place:
        record = rounded(measure(options, pathlib.Path(place)))
    text = json.dumps(record, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
