"""The analysis of a data set beside plain NumPy and beside DeepSpeed's.

    python -m benchmarks.analyzer --peer_python=PATH/bin/python [--rounds=5]
        [--num_samples=1000000] [--peer_samples=100000] [--output=FILE.json]

Sequence length and vocabulary rarity of rows of a mapped file, in three parts that are
timed apart: counting the words, the values, the index. NumPy does the first two in one
process and writes nothing: that is the limit for a core. All take turns, each in a
process of its own whose start and imports are not counted, except for the start of the
processes that `ours, 2 processes` computes in, which falls into its first part. Memory
is the most that all processes of one held at once, without the mapped file. DeepSpeed,
and ours beside it, gets fewer samples: its time a sample does not depend on them.
"""

import argparse
import datetime
import json
import math
import os
import pathlib
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
PARTS = ("counts", "values", "index")
NUM_WORKERS = {"ours": 0, "ours, 2 processes": 2, "ours, few samples": 0}


def write_tokens(path: pathlib.Path, num_samples: int, length: int, vocab_size: int):
    """Writes rows, uint16: words by Zipf's law, 1 to ``length`` of them, then zeros."""
    rng = np.random.default_rng(0)
    edges = np.cumsum(1 / np.arange(1, vocab_size))
    words = 1 + rng.permutation(vocab_size - 1).astype(np.uint16)
    shape = (num_samples, length)
    out = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint16, shape=shape)
    for start in range(0, num_samples, 8192):
        piece = out[start : start + 8192]
        drawn = np.searchsorted(edges, rng.random(piece.shape) * edges[-1])
        lengths = rng.integers(1, length + 1, len(piece))
        inside = np.arange(length) < lengths[:, None]
        piece[:] = words[np.minimum(drawn, vocab_size - 2)] * inside
    out.flush()


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    used = [
        resource.getrusage(who)
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    return sum(one.ru_utime + one.ru_stime for one in used)


def clocks() -> tuple[float, float]:
    return time.perf_counter(), cpu_seconds()


def numpy_alone(path: str, vocab_size: int) -> dict:
    """Both passes in plain NumPy, a few rows at a time, as fast as we know how."""
    rows, few = np.load(path, mmap_mode="r"), 64
    num_samples = len(rows)
    # As large imports do: makes malloc keep memory instead of returning it each time.
    np.ones(2**24, np.uint8)
    marks = [clocks()]
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, num_samples, few):
        piece = rows[start : start + few]
        counts += np.bincount(piece.reshape(-1), minlength=vocab_size)
    marks.append(clocks())
    counts[0] = 0
    counts = np.maximum(counts, 1)
    rarity = np.log(counts.sum()) - np.log(counts)
    rarity[0] = 0
    lengths, rarities = (np.empty(num_samples, np.int64) for _ in range(2))
    for start in range(0, num_samples, few):
        piece = rows[start : start + few]
        lengths[start : start + few] = (piece != 0).sum(axis=1)
        rarities[start : start + few] = rarity.take(piece).sum(axis=1)
    marks.append(clocks())
    return {
        "num_samples": num_samples,
        "marks": marks,
        "rarity_sum": float(rarities.sum()),
    }


def analyze(path: str, vocab_size: int, num_workers: int) -> dict:
    """Both passes and the index by `curriculum.analyze`."""
    from dataeff_jax import curriculum

    source = curriculum.ArraySource(path)
    metrics = [
        curriculum.sequence_length(padding=0),
        curriculum.vocabulary_rarity(vocab_size=vocab_size, padding=0),
    ]
    marks = [clocks()]

    def progress(done, total):
        if done in (len(source), total):
            marks.append(clocks())

    with tempfile.TemporaryDirectory(dir=pathlib.Path(path).parent) as place:
        index = curriculum.analyze(
            source,
            metrics,
            f"{place}/index",
            num_workers=num_workers,
            source_fingerprint="rows",
            progress=progress,
        )
        marks.append(clocks())
        files = index.manifest["files"].values()
        return {
            "num_samples": len(source),
            "num_workers": num_workers,
            "marks": marks,
            "rarity_sum": int(index.values("vocabulary_rarity").sum()),
            "num_files": len(files) + 1,
            "num_bytes": sum(one["num_bytes"] for one in files),
        }


def held_bytes(process: int) -> int:
    """Memory of a process and its descendants that is no mapped file; Linux only."""
    total = 0
    try:
        status = pathlib.Path(f"/proc/{process}/status").read_text()
        tasks = list(pathlib.Path(f"/proc/{process}/task").iterdir())
        for line in status.splitlines():
            if line.startswith("RssAnon:"):
                total = 1024 * int(line.split()[1])
        for task in tasks:
            for child in (task / "children").read_text().split():
                total += held_bytes(int(child))
    except OSError:  # it has ended meanwhile
        pass
    return total


def run_child(command: list[str], errors: pathlib.Path) -> dict:
    """Runs a command to its end; returns its answer, with the memory it held."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with open(errors, "w+") as stream:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stream, env=environment, text=True
        )
        most = 0
        while process.poll() is None:
            most = max(most, held_bytes(process.pid))
            time.sleep(0.02)
        said, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{command} failed:\n{errors.read_text()}")
    return json.loads(said.splitlines()[-1]) | {"held_bytes": most}


def parts_of(answer: dict) -> dict[str, tuple[float, float]]:
    """Wall and CPU seconds of each part."""
    marks = answer["marks"]
    return {
        part: (after[0] - before[0], after[1] - before[1])
        for part, before, after in zip(PARTS, marks, marks[1:], strict=False)
    }


def summary(answers: list[dict]) -> dict:
    """Medians over the rounds of one contestant."""
    parts = [parts_of(answer) for answer in answers]
    rates: dict[str, dict] = {"samples_per_second": {}, "samples_per_cpu_second": {}}
    size = answers[0]["num_samples"]
    for clock, table in enumerate(rates.values()):
        for part in parts[0]:
            seconds = statistics.median(one[part][clock] for one in parts)
            # A pool's CPU seconds are known when it has ended, as part of the index.
            known = clock == 0 or not answers[0].get("num_workers")
            table[part] = round(size / max(seconds, 1e-9)) if known else None
        whole = [sum(times[clock] for times in one.values()) for one in parts]
        table["all"] = round(size / statistics.median(whole))
    result = {"num_samples": size, **rates}
    held = statistics.median(one["held_bytes"] for one in answers)
    result["held_megabytes"] = round(held / 1e6, 1)
    if "num_files" in answers[0]:
        result["num_files"] = answers[0]["num_files"]
        result["bytes_a_sample_and_metric"] = round(
            answers[0]["num_bytes"] / size / 2, 2
        )
    return result


def seconds_a_sample(answer: dict, clock: int, parts=PARTS) -> float:
    found = parts_of(answer)
    total = sum(found[part][clock] for part in parts if part in found)
    return total / answer["num_samples"]


def ratio(answers: dict, one: str, other: str, clock: int, parts=PARTS) -> float:
    """How many times as fast as the other one is, the median over the rounds."""
    found = [
        seconds_a_sample(b, clock, parts) / seconds_a_sample(a, clock, parts)
        for a, b in zip(answers[one], answers[other], strict=True)
    ]
    return round(statistics.median(found), 3)


def check_sums(answers: dict) -> None:
    """The values must be those of the others: floor of sums in another precision."""
    for one, other in (("ours", "numpy"), ("ours, few samples", "deepspeed")):
        if other in answers:
            a, b = answers[one][0], answers[other][0]
            if not math.isclose(a["rarity_sum"], b["rarity_sum"], rel_tol=1e-6):
                raise RuntimeError(f"{one} and {other} differ: {a} {b}")


def measure(options: argparse.Namespace, place: pathlib.Path) -> dict:
    large, few = place / "tokens.npy", place / "few.npy"
    shape = (options.length, options.vocab_size)
    write_tokens(large, options.num_samples, *shape)
    write_tokens(few, options.peer_samples, *shape)

    def ours(name, path):
        us = [sys.executable, "-m", "benchmarks.analyzer", f"--alone={name}"]
        return [*us, f"--file={path}", f"--vocab_size={options.vocab_size}"]

    commands = {name: ours(name, large) for name in ("numpy", *list(NUM_WORKERS)[:2])}
    commands["ours, few samples"] = ours("ours, few samples", few)
    if options.peer_python:
        script = ROOT / "benchmarks" / "_deepspeed_analyzer.py"
        peer = [options.peer_python, str(script), str(few), str(options.vocab_size)]
        commands["deepspeed"] = peer
    else:
        print("No --peer_python: DeepSpeed is left out.", file=sys.stderr)
    answers: dict[str, list] = {name: [] for name in commands}
    for number in range(options.rounds):
        for name, command in commands.items():
            with tempfile.TemporaryDirectory(dir=place) as folder:
                extra = [folder] if name == "deepspeed" else []
                answer = run_child([*command, *extra], place / "errors.txt")
            answers[name].append(answer)
            print(f"round {number + 1}: {name}", file=sys.stderr)
    check_sums(answers)
    return report(answers, options)


def report(answers: dict, options: argparse.Namespace) -> dict:
    passes = ("counts", "values")
    result: dict = {name: summary(found) for name, found in answers.items()}
    result["ours_over_numpy_by_cpu"] = {
        "counts": ratio(answers, "ours", "numpy", 1, ("counts",)),
        "values": ratio(answers, "ours", "numpy", 1, ("values",)),
        "both, and the index": ratio(answers, "ours", "numpy", 1),
    }
    result["two_processes_over_one"] = {
        "values, when they run": ratio(
            answers, "ours, 2 processes", "ours", 0, ("values",)
        ),
        "both, with their start": ratio(
            answers, "ours, 2 processes", "ours", 0, passes
        ),
    }
    if "deepspeed" in answers:
        pair = answers, "ours, few samples", "deepspeed"
        result["ours_over_deepspeed"] = {
            "wall": ratio(*pair, 0),
            "cpu": ratio(*pair, 1),
            "counts, cpu": ratio(*pair, 1, ("counts",)),
            "values and index, cpu": ratio(*pair, 1, ("values", "index")),
        }
        result["deepspeed_version"] = answers["deepspeed"][0]["version"]
    return result | {
        "length": options.length,
        "vocab_size": options.vocab_size,
        "rounds": options.rounds,
        "date": str(datetime.date.today()),
        "commit": commit(),
        "cores": os.cpu_count(),
        "machine": platform.platform(),
    }


def commit() -> str | None:
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or None


def alone(name: str, path: str, vocab_size: int) -> dict:
    if name == "numpy":
        return numpy_alone(path, vocab_size)
    return analyze(path, vocab_size, NUM_WORKERS[name])


def main() -> None:
    """Parses the flags, measures, and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer_python", help="a Python that has deepspeed 0.19.8")
    parser.add_argument("--num_samples", type=int, default=10**6)
    parser.add_argument("--peer_samples", type=int, default=10**5)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--vocab_size", type=int, default=32_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=pathlib.Path)
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(alone(options.alone, options.file, options.vocab_size)))
        return
    if options.peer_python and not os.access(options.peer_python, os.X_OK):
        parser.error(f"--peer_python={options.peer_python} cannot be run.")
    with tempfile.TemporaryDirectory() as place:
        record = measure(options, pathlib.Path(place))
    text = json.dumps(record, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
