import json
import multiprocessing
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from dataeff_jax import curriculum
from dataeff_jax.curriculum import _index, _shards, _sorting
from dataeff_jax.data import _publish

VOCAB = 50
ROWS = [
    {"tokens": np.random.default_rng(i).integers(0, VOCAB, 1 + i % 9)}
    for i in range(60)
]
METRICS = [
    curriculum.sequence_length(),
    curriculum.vocabulary_rarity(vocab_size=VOCAB),
    curriculum.Lexicographic(
        curriculum.sequence_length(),
        curriculum.vocabulary_rarity(vocab_size=VOCAB),
        bound=1000,
    ),
]


def contents(directory):
    return {path.name: path.read_bytes() for path in pathlib.Path(directory).iterdir()}


def names_beside(directory):
    return sorted(os.listdir(pathlib.Path(directory).parent))


def third_is_nan(record):
    return float("nan") if record["tokens"][0] == -7 else len(record["tokens"])


@pytest.fixture(scope="module")
def want(tmp_path_factory):
    directory = tmp_path_factory.mktemp("want") / "index"
    curriculum.analyze(ROWS, METRICS, directory)
    return contents(directory)


def test_the_index_is_that_of_numpy(want, tmp_path):
    index = curriculum.analyze(ROWS, METRICS, tmp_path / "index")
    lengths = np.array([len(row["tokens"]) for row in ROWS])
    np.testing.assert_array_equal(index.values("sequence_length"), lengths)
    for name in index.metrics:
        values, order = index.values(name), index.order(name)
        np.testing.assert_array_equal(order, np.argsort(values, kind="stable"))
        told = index.manifest["metrics"][name]
        assert sum(told["histogram"]["counts"]) == len(ROWS)
        assert (told["min"], told["max"]) == (values.min(), values.max())
        assert index.quantile(name, 50) == np.sort(values)[29]
        # 16 bytes a sample and metric, beside the files' headers of 128 bytes.
        size = sum(
            index.manifest["files"][f"{name}.{k}.npy"]["num_bytes"] - 128
            for k in ("values", "order")
        )
        assert size <= 16 * len(ROWS)
    index.verify()
    assert names_beside(tmp_path / "index") == ["index"]


@pytest.mark.parametrize("shard_size", [4, 7, 60, 1000])
def test_the_index_does_not_depend_on_the_shards(want, shard_size, tmp_path):
    curriculum.analyze(ROWS, METRICS, tmp_path / "index", shard_size=shard_size)
    assert contents(tmp_path / "index") == want


def test_more_processes_than_samples_change_nothing(tmp_path):
    told = []
    curriculum.analyze(
        ROWS[:5],
        METRICS,
        tmp_path / "several",
        num_workers=3,
        shard_size=1,
        progress=lambda done, total: told.append((done, total)),
    )
    curriculum.analyze(ROWS[:5], METRICS, tmp_path / "one")
    assert contents(tmp_path / "several") == contents(tmp_path / "one")
    index = curriculum.DifficultyIndex(tmp_path / "several")
    assert sorted(index.order("sequence_length").tolist()) == [0, 1, 2, 3, 4]
    assert told == [(n, 10) for n in range(1, 11)]


class Stop(BaseException):
    """As sudden as a kill, for the code that runs."""


@pytest.mark.parametrize("stop_at", [0, 1, 9, 10, 11, 19])
def test_a_run_that_was_stopped_goes_on_with_what_is_missing(want, stop_at, tmp_path):
    done = []

    def stop(*_):
        done.append(1)
        if len(done) > stop_at:
            raise Stop

    with pytest.raises(Stop):
        curriculum.analyze(
            ROWS, METRICS, tmp_path / "index", shard_size=6, progress=stop
        )
    assert not (tmp_path / "index").exists()
    parts = next(tmp_path.glob(".index.*.parts"))
    written = {p: p.stat().st_mtime_ns for p in parts.glob("*-0000*.npy")}
    assert written
    (parts / "values-0-00000003.npy.999.new").write_bytes(b"half")
    with pytest.raises(Stop):
        curriculum.analyze(
            ROWS, METRICS, tmp_path / "index", shard_size=6, progress=stop
        )
    assert all(p.stat().st_mtime_ns == t for p, t in written.items())
    curriculum.analyze(ROWS, METRICS, tmp_path / "index", shard_size=6)
    assert contents(tmp_path / "index") == want
    assert names_beside(tmp_path / "index") == ["index"]


SCRIPT = """
import os, signal, sys
import numpy as np
from dataeff_jax import curriculum

rows = [{"tokens": np.random.default_rng(i).integers(0, 50, 1 + i % 9)}
        for i in range(60)]
length = curriculum.sequence_length()
rarity = curriculum.vocabulary_rarity(vocab_size=50)
metrics = [length, rarity, curriculum.Lexicographic(length, rarity, bound=1000)]

def kill(done, total):
    if done >= int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

curriculum.analyze(rows, metrics, sys.argv[1], shard_size=6, progress=kill)
"""


def test_a_killed_process_leaves_a_run_that_goes_on(want, tmp_path):
    root = pathlib.Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "index"), "66"],
        env={**os.environ, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == -signal.SIGKILL
    assert list(tmp_path.glob(".index.*.partslock")), "the dead process left its lock"
    curriculum.analyze(ROWS, METRICS, tmp_path / "index", shard_size=6)
    assert contents(tmp_path / "index") == want
    assert names_beside(tmp_path / "index") == ["index"]


def nan_source():
    rows = [{"tokens": [5] * (1 + i % 3)} for i in range(300)]
    rows[137] = {"tokens": [-7]}
    return rows


@pytest.mark.parametrize("num_workers", [0, 3])
def test_a_difficulty_that_is_no_number_is_named_and_nothing_is_kept(
    num_workers, tmp_path
):
    metric = curriculum.function_metric(third_is_nan, name="odd")
    with pytest.raises(ValueError, match="odd of sample 137 is nan"):
        curriculum.analyze(
            nan_source(),
            [metric],
            tmp_path / "index",
            num_workers=num_workers,
            shard_size=100,
        )
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (float("inf"), "float32", "is inf"),
        (1e300, "float32", "float32 does not hold"),
        (0.5, "int64", "int64 does not hold"),
        (300, "int8", "int8 does not hold"),
        ("x", "float32", "not numbers"),
        ([1, 2], "float32", r"shape \(1, 2\)"),
    ],
)
def test_values_that_do_not_fit_their_type_are_refused(value, dtype, message, tmp_path):
    metric = curriculum.function_metric(lambda record: value, name="f", dtype=dtype)
    with pytest.raises(ValueError, match=message):
        curriculum.analyze([[1]], [metric], tmp_path / "index")


def test_counts_must_be_integers(tmp_path):
    metric = curriculum.function_metric(
        lambda record, total: 0, name="f", accumulate=lambda record: np.array([0.5])
    )
    with pytest.raises(ValueError, match="counts must be integers"):
        curriculum.analyze([[1]], [metric], tmp_path / "index")


def test_an_index_is_reused_refused_and_replaced(want, tmp_path):
    directory = tmp_path / "index"
    first = curriculum.analyze(ROWS, METRICS, directory)
    before = (directory / "manifest.json").stat().st_mtime_ns
    curriculum.analyze(ROWS, METRICS[:1], directory)  # it has more than is asked for
    assert (directory / "manifest.json").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="made from another source"):
        curriculum.analyze(ROWS[:7], METRICS, directory)
    other = curriculum.vocabulary_rarity(vocab_size=VOCAB + 1)
    with pytest.raises(ValueError, match="another metric vocabulary_rarity"):
        curriculum.analyze(ROWS, [other], directory)
    curriculum.analyze(ROWS[:7], METRICS, directory, overwrite=True)
    assert len(curriculum.DifficultyIndex(directory)) == 7
    with pytest.raises(ValueError, match="was rebuilt"):
        first.__reduce__()[0](*first.__reduce__()[1])


@pytest.mark.parametrize(
    ("source", "metrics", "kwargs", "message"),
    [
        ([], METRICS, {}, "source is empty"),
        (ROWS, [], {}, "at least one"),
        (ROWS, [METRICS[0]] * 2, {}, "must be different"),
        (ROWS, METRICS, {"num_workers": -1}, "num_workers=-1"),
        (ROWS, METRICS, {"shard_size": 0}, "shard_size=0"),
    ],
)
def test_bad_arguments_are_told(source, metrics, kwargs, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        curriculum.analyze(source, metrics, tmp_path / "index", **kwargs)


def test_a_directory_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds other files"):
        curriculum.analyze(ROWS, METRICS, tmp_path)


def test_empty_parts_are_no_records_and_the_index_opens_at_once(tmp_path):
    class Joined:
        """Three files' rows, of which one has none."""

        parts = (ROWS[:6], [], ROWS[6:12])
        fingerprint = "joined"

        def __len__(self):
            return 12

        def __getitem__(self, index):
            return [row for part in self.parts for row in part][index]

    index = curriculum.analyze(Joined(), METRICS[:1], tmp_path / "index", shard_size=6)
    assert sorted(index.order("sequence_length").tolist()) == list(range(12))


# Files that are damaged or foreign


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def with_count(directory, count):
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["num_samples"] = count
    (directory / "manifest.json").write_text(json.dumps(manifest))


DAMAGES = {
    "one byte short": (
        lambda d: cut(d / "f.values.npy", 128 + 799),
        r"f\.values\.npy has 927 bytes, the manifest says 928",
    ),
    "half": (lambda d: cut(d / "f.order.npy", 264), r"f\.order\.npy has 264 bytes"),
    "no manifest": (lambda d: cut(d / "manifest.json", 0), r"damaged \(0 bytes"),
    "101 samples": (lambda d: with_count(d, 101), "holds 100 entries.*says 101"),
    "foreign values": (
        lambda d: shutil.copy(d.parent / "other" / "f.values.npy", d / "f.values.npy"),
        r"f\.values\.npy has checksum",
    ),
    "missing": (lambda d: (d / "f.order.npy").unlink(), "has 0 bytes"),
    "other format": (
        lambda d: (d / "manifest.json").write_text('{"format": "x"}'),
        "has format",
    ),
    "lacking": (
        lambda d: (d / "manifest.json").write_text(
            json.dumps({"format": _index.FORMAT, "version": _index.VERSION})
        ),
        "lacks build, num_samples",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_index_is_refused_when_opened(damage, tmp_path):
    def metric(shift):
        return curriculum.function_metric(
            lambda record: (record + shift) % 10, name="f", dtype="int64"
        )

    source = list(range(100))
    curriculum.analyze(source, [metric(0)], tmp_path / "index")
    curriculum.analyze(source, [metric(1)], tmp_path / "other")
    spoil, message = DAMAGES[damage]
    spoil(tmp_path / "index")
    with pytest.raises(ValueError, match=message):
        curriculum.DifficultyIndex(tmp_path / "index")


def test_opening_reads_little_and_verifying_reads_all(tmp_path):
    metric = curriculum.function_metric(lambda record: record, name="f", dtype="int64")
    directory = tmp_path / "index"
    curriculum.analyze(range(40_000), [metric], directory, source_fingerprint="range")
    index = curriculum.DifficultyIndex(directory)
    index.verify()
    path = directory / "f.values.npy"
    content = bytearray(path.read_bytes())
    content[10_000] ^= 1  # between two blocks
    path.write_bytes(content)
    opened = curriculum.DifficultyIndex(directory)
    with pytest.raises(ValueError, match="it is damaged"):
        opened.verify()


def test_names_and_percentiles_that_are_not_there(tmp_path):
    index = curriculum.analyze(ROWS, METRICS[:1], tmp_path / "index")
    with pytest.raises(ValueError, match="no metric 'x'; it has: sequence_length"):
        index.values("x")
    with pytest.raises(ValueError, match="percentile=101"):
        index.quantile("sequence_length", 101)


# Several writers and readers


def test_a_second_writer_of_the_same_is_refused_and_a_dead_lock_is_not(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(_shards, "_PATIENCE_SECONDS", 0.1)
    directory = tmp_path / "index"
    with _shards.own_parts(directory, "key"):
        with pytest.raises(ValueError, match="Another process analyzes the same"):
            with _shards.own_parts(directory, "key"):
                pass
    _shards.parts_directory(directory, "key").with_suffix(
        ".partslock"
    ).touch()  # its file
    with _shards.own_parts(directory, "key") as parts:
        assert parts.exists()


def test_two_different_builds_never_mix(tmp_path):
    errors, both = [], threading.Barrier(2)

    def build(rows):
        def wait(done, total):
            if done == total:
                both.wait()

        try:
            curriculum.analyze(
                rows, METRICS[:1], tmp_path / "index", shard_size=100, progress=wait
            )
        except ValueError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=build, args=(ROWS[:n],)) for n in (20, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 1
    assert "made from another source" in errors[0]
    curriculum.DifficultyIndex(tmp_path / "index").verify()
    assert names_beside(tmp_path / "index") == ["index"]


def test_a_reader_sees_the_old_index_or_the_new_one(tmp_path):
    directory = tmp_path / "index"
    curriculum.analyze(ROWS[:10], METRICS[:1], directory)
    done, seen = threading.Event(), set()

    def read():
        while not done.is_set():
            index = curriculum.DifficultyIndex(directory)
            seen.add(len(index))
            assert len(index.values("sequence_length")) == len(index)

    failures = []

    def reader():
        try:
            read()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=reader)
    thread.start()
    for size in (20, 10) * 10:
        curriculum.analyze(ROWS[:size], METRICS[:1], directory, overwrite=True)
    done.set()
    thread.join()
    assert not failures
    assert seen <= {10, 20}


def test_what_cannot_be_sent_to_processes_is_named(tmp_path):
    metric = curriculum.function_metric(lambda record: 1, name="odd")
    with pytest.raises(ValueError, match="odd cannot be sent to processes"):
        curriculum.analyze(ROWS, [metric], tmp_path / "index", num_workers=2)


# What acceptance asks for at scale


class Column:
    """Numbers that are read many at once, and what was read."""

    fingerprint = "column"

    def __init__(self, numbers):
        self.numbers, self.reads = numbers, []

    def __len__(self):
        return len(self.numbers)

    def read_range(self, start, stop):
        self.reads.append((start, stop))
        return {"number": self.numbers[start:stop]}


class Number(curriculum.Metric):
    name, batch_size = "number", 2**16

    def values(self, records, prepared):
        return records.flat("number")[0]


def test_a_shard_that_was_lost_is_the_only_one_computed_again(tmp_path):
    numbers = np.random.default_rng(0).integers(0, 9, 1000)

    def stop(done, total):
        if done == total:
            raise Stop

    with pytest.raises(Stop):
        curriculum.analyze(
            Column(numbers), [Number()], tmp_path / "x", shard_size=100, progress=stop
        )
    (lost,) = tmp_path.glob(".x.*.parts/values-0-00000007.npy")
    lost.unlink()
    source = Column(numbers)
    curriculum.analyze(source, [Number()], tmp_path / "x", shard_size=100)
    assert source.reads == [(700, 800)]
    curriculum.analyze(Column(numbers), [Number()], tmp_path / "y")
    assert contents(tmp_path / "x") == contents(tmp_path / "y")


@pytest.mark.slow
def test_ten_million_numbers_make_three_files(tmp_path):
    numbers = np.random.default_rng(0).permutation(10**7)
    index = curriculum.analyze(
        Column(numbers), [Number()], tmp_path / "x", shard_size=2**20
    )
    assert len(contents(tmp_path / "x")) == 3
    order = index.order("number")
    assert order.dtype == np.uint32
    np.testing.assert_array_equal(numbers[order], np.arange(10**7))


# Sorting


@pytest.mark.parametrize("in_memory", [1, 5, 64, 2**23])
@pytest.mark.parametrize("kind", ["distinct", "ties", "equal", "float"])
def test_sorting_in_parts_is_stable(in_memory, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(_sorting, "IN_MEMORY", in_memory)
    rng = np.random.default_rng(0)
    values = {
        "distinct": rng.permutation(300),
        "ties": rng.integers(0, 5, 300),
        "equal": np.zeros(300, np.int64),
        "float": rng.standard_normal(300).astype(np.float32),
    }[kind]
    order = _sorting.write_order(values, tmp_path / "order.npy")
    np.testing.assert_array_equal(order, np.argsort(values, kind="stable"))


def test_sample_numbers_beyond_24_bits_are_kept(tmp_path):
    # float32 cannot tell 2^24 + 1 from 2^24.
    values = np.ones(2**24 + 3, np.uint8)
    values[-2] = 0
    order = _sorting.write_order(values, tmp_path / "order.npy")
    assert order[0] == 2**24 + 1
    assert order[-1] == 2**24 + 2
    assert order[-2] == 2**24
    assert _sorting.order_dtype(2**32) is np.uint32
    assert _sorting.order_dtype(2**32 + 1) is np.uint64


def test_indexes_are_sent_to_processes_by_their_place(tmp_path):
    index = curriculum.analyze(ROWS, METRICS[:1], tmp_path / "index")
    sent = multiprocessing.reduction.ForkingPickler.dumps(index)
    assert len(sent) < 1000
    again = multiprocessing.reduction.ForkingPickler.loads(sent)
    assert again.fingerprint == index.fingerprint


def test_array_sources_read_rows_of_a_file(tmp_path):
    rows = np.arange(12, dtype=np.uint16).reshape(4, 3)
    np.save(tmp_path / "rows.npy", rows)
    source = curriculum.ArraySource(tmp_path / "rows.npy")
    index = curriculum.analyze(source, METRICS[:2], tmp_path / "index")
    one_by_one = curriculum.analyze(list(rows), METRICS[:2], tmp_path / "list")
    np.testing.assert_array_equal(
        index.values("vocabulary_rarity"), one_by_one.values("vocabulary_rarity")
    )
    again = source.__reduce__()
    assert again[0](*again[1])[3]["tokens"].tolist() == [9, 10, 11]
    with pytest.raises(IndexError, match="index=4"):
        source[4]
    for content, message in ((None, "does not exist"), (b"", "is empty")):
        path = tmp_path / "bad.npy"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            curriculum.ArraySource(path)
    np.save(tmp_path / "one.npy", np.float32(3))
    with pytest.raises(ValueError, match="one number"):
        curriculum.ArraySource(tmp_path / "one.npy")


def test_a_swapped_index_is_waited_for(tmp_path):
    directory = tmp_path / "index"
    curriculum.analyze(ROWS, METRICS[:1], directory)
    with _publish.temporary_directory(directory) as temporary:
        old = temporary.with_suffix(".old")
        os.rename(directory, old)
        timer = threading.Timer(0.1, os.rename, (old, directory))
        timer.start()
        assert len(curriculum.DifficultyIndex(directory)) == len(ROWS)
        timer.join()
