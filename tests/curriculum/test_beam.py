"""The Beam runner gives the local runner's index; its workers read the records."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from dataeff_jax import curriculum
from dataeff_jax.curriculum import _beam

ROOT = pathlib.Path(__file__).resolve().parents[2]
LENGTH = [curriculum.sequence_length()]
pytestmark = pytest.mark.slow  # a pass starts two processes that import all
needs_beam = pytest.mark.skipif(
    importlib.util.find_spec("apache_beam") is None,
    reason="apache-beam is not installed (the extra 'beam')",
)

# A process of its own: Beam starts threads and workers, and logs.
SCRIPT = '''
import json, os, pathlib, sys
import numpy as np
from dataeff_jax import curriculum

place = pathlib.Path(sys.argv[1])
OPTIONS = ["--runner=FnApiRunner", "--direct_num_workers=2",
           "--direct_running_mode=multi_processing"]

class Rows(curriculum.ArraySource):
    """Notes who reads what."""
    fingerprint = "rows"

    def read_range(self, start, stop):
        with open(self._path.with_suffix(f".{os.getpid()}"), "a") as stream:
            stream.write(f"{start} {stop}\\n")
        return super().read_range(start, stop)

    def __reduce__(self):
        return type(self), (str(self._path),)

def last_token(record):
    if record["tokens"][0] == 49:
        return float("nan")
    return float(record["tokens"][-1])

length = curriculum.sequence_length()
rarity = curriculum.vocabulary_rarity(vocab_size=50)
metrics = [length, rarity, curriculum.Lexicographic(length, rarity, bound=1000),
           curriculum.function_metric(last_token, name="last_token")]

def analyze(rows, metrics=metrics, **kwargs):
    return curriculum.analyze(
        Rows(place / f"{rows}.npy"), metrics, place / rows, shard_size=100, **kwargs)

class Stop(BaseException):
    pass

def stop(done, total):
    if done == 1300:
        raise Stop

if __name__ == "__main__":
    told = []
    analyze("local")
    try:
        analyze("begun", progress=stop)
    except Stop:
        (place / f"begun.{os.getpid()}").unlink()
    for rows in ("beam", "begun"):
        analyze(rows, beam_options=OPTIONS, progress=lambda *done: told.append(done))
    (place / "told").write_text(json.dumps(told))
    try:
        analyze("wrong", metrics[3:], beam_options=OPTIONS)
    except ValueError as error:
        (place / "refusal").write_text(str(error))
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """What the script has left: indexes, and a file of reads for each process."""
    result = tmp_path_factory.mktemp("a place")
    rows = np.random.default_rng(0).integers(0, 49, (1000, 8)).astype(np.uint16)
    for name in ("local", "beam", "begun"):
        np.save(result / f"{name}.npy", rows)
    rows[537, 0] = 49
    np.save(result / "wrong.npy", rows)
    script = result / "script.py"
    script.write_text(SCRIPT)
    subprocess.run(
        [sys.executable, str(script), str(result)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        check=True,
    )
    return result


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def reads(place, name):
    """The ranges that each worker has read."""
    return [
        [tuple(map(int, line.split())) for line in path.read_text().splitlines()]
        for path in place.glob(f"{name}.*[0-9]")
    ]


@needs_beam
@pytest.mark.parametrize("name", ["beam", "begun"])
def test_the_index_is_that_of_the_local_runner_byte_for_byte(place, name):
    assert contents(place / name) == contents(place / "local")


@needs_beam
def test_two_workers_read_each_record_once_a_pass_a_few_at_a_time(place):
    workers = reads(place, "beam")
    assert len(workers) == 4  # two, started anew for the second pass
    ranges = [one for worker in workers for one in worker]
    assert all(stop - start <= 256 for start, stop in ranges)
    rows = [i for start, stop in ranges for i in range(start, stop)]
    assert sorted(rows) == sorted([*range(1000)] * 2)


@needs_beam
def test_a_run_that_others_began_goes_on_with_what_is_missing(place):
    ranges = [one for worker in reads(place, "begun") for one in worker]
    rows = sorted(i for start, stop in ranges for i in range(start, stop))
    assert rows == list(range(300, 1000))  # 13 of 20 shards were done


@needs_beam
def test_progress_counts_every_shard_of_both_passes(place):
    told = json.loads((place / "told").read_text())
    assert told == [[100 * n, 2000] for n in range(1, 21)] * 2


@needs_beam
def test_a_sample_without_a_difficulty_is_named_and_nothing_is_kept(place):
    refusal = (place / "refusal").read_text()
    assert refusal.startswith("last_token of sample 537 is nan;")
    assert not (place / "wrong").exists()
    assert not list(place.glob(".*"))


def test_beam_that_is_missing_is_told_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "apache_beam", None)
    with pytest.raises(ValueError, match=r"install it with: pip install '\.\[beam\]'"):
        curriculum.analyze([[1]], LENGTH, tmp_path / "index", beam_options=[])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "num_workers", "message"),
    [("--runner=x", 0, "must be a list"), ([], 2, "num_workers=2 is of the local")],
)
def test_arguments_that_cannot_be_meant_are_told(options, num_workers, message):
    with pytest.raises(ValueError, match=message):
        _beam.check(options, num_workers)
