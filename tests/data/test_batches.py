"""The batch of a step depends on (rows, seed, step) and on nothing else."""

import os
import pathlib
import pickle
import subprocess
import sys
import textwrap

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from dataeff_jax import data
from dataeff_jax.data import _splits

ROOT = pathlib.Path(data.__file__).parents[2]
# Hypothesis's own deadline is a wall-clock assertion.
settings = hypothesis.settings(max_examples=40, deadline=None)


def rows(count):
    return data.MemorySource({"labels": np.arange(count), "x": np.arange(count) * 0.5})


def ids(batch):
    return batch["sample_id"].tolist()


def global_ids(count, *, step, process_count=1, **arguments):
    """The ids of a step, put together from all processes."""
    return [
        i
        for process in range(process_count)
        for i in ids(
            data.batches(
                rows(count),
                process_index=process,
                process_count=process_count,
                **arguments,
            )[step]
        )
    ]


@settings
@hypothesis.given(
    count=st.integers(1, 12), batch_size=st.integers(1, 15), seed=st.integers(0, 2**40)
)
def test_every_epoch_has_every_row_once(count, batch_size, seed):
    steps = data.batches(rows(count), batch_size=batch_size, seed=seed)
    num_steps = -(-3 * count // batch_size)
    drawn = [i for t in range(num_steps) for i in ids(steps[t])]
    for epoch in range(3):
        part = drawn[epoch * count : (epoch + 1) * count]
        assert sorted(part) == list(range(count))


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {
        tuple(global_ids(50, batch_size=50, seed=seed, step=epoch))
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25  # so epoch 1 of seed 0 is not epoch 0 of seed 1


def test_orders_are_pinned():
    # A change would alter the batches of every run that is resumed after it.
    order = global_ids(10, batch_size=10, seed=0, step=0)
    assert order == [3, 2, 1, 8, 5, 4, 9, 7, 0, 6]
    order = global_ids(10, batch_size=10, seed=7, step=3)
    assert order == [8, 1, 6, 5, 9, 3, 0, 4, 2, 7]
    order = global_ids(5000, batch_size=6, seed=3, step=2)
    assert order == [1555, 1275, 3068, 279, 4627, 2790]


@pytest.mark.parametrize("count", [1, 2, 4095, 4096, 4097, 70_001])
def test_permutations_of_short_and_long_ranges_are_permutations(count):
    order = [_splits.permuted(i, count, 5) for i in range(count)]
    assert sorted(order) == list(range(count))
    assert count < 3 or order != [_splits.permuted(i, count, 6) for i in range(count)]


def test_without_a_seed_rows_come_in_order():
    got = [global_ids(5, batch_size=3, seed=None, step=t) for t in range(4)]
    assert got == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]


@pytest.mark.parametrize("process_count", [1, 2, 3, 6])
def test_processes_hold_contiguous_parts_of_one_batch(process_count):
    for step in (0, 1, 17):
        arguments = dict(batch_size=12, seed=3, step=step)
        whole = global_ids(31, **arguments)
        assert global_ids(31, process_count=process_count, **arguments) == whole


def test_fewer_processes_go_on_where_more_have_stopped():
    # 240 samples, batches of 24, one epoch: 4 steps on 4 processes, then 2 processes.
    arguments = dict(batch_size=24, seed=7)
    unbroken = [global_ids(240, step=t, **arguments) for t in range(10)]
    before = [global_ids(240, step=t, process_count=4, **arguments) for t in range(4)]
    after = [
        global_ids(240, step=t, process_count=2, **arguments) for t in range(4, 10)
    ]
    assert [set(i) for i in before + after] == [set(i) for i in unbroken]
    rest = [i for step in after for i in step]
    assert len(rest) == 144
    assert sorted(i for step in before + after for i in step) == list(range(240))


def test_another_batch_size_goes_on_at_the_right_sample():
    small = data.batches(rows(100), batch_size=4, seed=1)
    order = [i for t in range(50) for i in ids(small[t])]
    step, samples = 10, 40  # where the run with batches of 4 has stopped
    large = data.batches(
        rows(100), batch_size=16, seed=1, first_sample=samples - step * 16
    )
    resumed = [i for t in range(step, step + 5) for i in ids(large[t])]
    assert resumed == order[samples : samples + 5 * 16]
    with pytest.raises(IndexError, match="the first step is 8"):
        large[7]
    assert len(ids(large[8])) == 16


def test_batch_stacks_the_rows_with_their_ids():
    batch = data.batches(rows(6), batch_size=4, seed=2)[5]
    assert batch["sample_id"].dtype == np.int64
    np.testing.assert_array_equal(batch["labels"], batch["sample_id"])
    np.testing.assert_array_equal(batch["x"], batch["sample_id"] * 0.5)


class Enormous:
    """More rows than 32 bits can number."""

    def __len__(self):
        return 2**33 + 5

    def __getitem__(self, index):
        return {"value": np.int64(index)}


def test_ids_beyond_32_bits_come_back_unchanged():
    last = data.batches(Enormous(), batch_size=2, seed=None, first_sample=2**33 + 3)[0]
    assert last["sample_id"].tolist() == [2**33 + 3, 2**33 + 4]
    shuffled = data.batches(Enormous(), batch_size=64, seed=0)[10**7]
    np.testing.assert_array_equal(shuffled["sample_id"], shuffled["value"])
    assert shuffled["sample_id"].max() > 2**32
    assert len(set(ids(shuffled))) == 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(batch_size=0), "batch_size=0 and process_count=1 must be at least 1"),
        (dict(batch_size=4, seed=-1), "seed=-1 must not be negative"),
        (
            dict(batch_size=12, process_count=8),
            "batch_size=12 does not divide by process_count=8; the nearest that do: "
            "8 or 16",
        ),
        (dict(batch_size=4, process_count=8), "the nearest that do: 8"),
        (dict(batch_size=4, process_index=2, process_count=2), "process_index=2 must"),
    ],
)
def test_impossible_sizes_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        data.batches(rows(5), **{"seed": 0, **arguments})


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="no rows"):
        data.batches([], batch_size=1, seed=0)


def test_rows_that_differ_in_their_fields_are_named():
    class Uneven:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return {"a": 1} if index else {"b": 1}

    with pytest.raises(
        ValueError, match=r"\['b', 'sample_id'\] and \['a', 'sample_id'"
    ):
        data.batches(Uneven(), batch_size=2, seed=None)[0]


# Evaluation.


@pytest.mark.parametrize(
    ("batch_size", "process_count"),
    [(1, 1), (6, 1), (6, 2), (6, 3), (8, 1), (8, 2), (96, 1), (96, 3)],
)
def test_evaluation_counts_every_row_once(batch_size, process_count):
    weighted = []
    for process in range(process_count):
        batches = data.evaluation_batches(
            rows(29),
            batch_size=batch_size,
            process_index=process,
            process_count=process_count,
        )
        assert len(batches) == -(-29 // batch_size)  # the same on every process
        for number in range(len(batches)):
            batch = batches[number]
            assert batch["weights"].shape == (batch_size // process_count,)
            weighted += batch["sample_id"][batch["weights"] > 0].tolist()
            assert (batch["sample_id"][batch["weights"] == 0] == -1).all()
    assert sorted(weighted) == list(range(29))


def test_evaluation_of_packed_rows_counts_every_token_once():
    documents = data.TokenDocuments([[1, 2, 3], [], [4, 5, 6, 7]], end_of_text=0)
    packed = data.PackedRows(documents, length=4, keep_remainder=True)
    batches = data.evaluation_batches(packed, batch_size=2)
    counted = np.concatenate([b["targets"][b["weights"] > 0] for b in batches])
    assert counted.tolist() == [1, 2, 3, 0, 0, 4, 5, 6, 7, 0]
    assert {b["weights"].shape for b in batches} == {(2, 4)}


@pytest.mark.parametrize("batch_size", [1, 3, 4, 8])
def test_evaluation_of_the_first_rows_is_the_same_for_every_batch_size(batch_size):
    batches = data.evaluation_batches(rows(29), batch_size=batch_size, max_rows=5)
    counted = [
        i
        for batch in batches
        for i, weight in zip(ids(batch), batch["weights"].tolist(), strict=True)
        if weight
    ]
    assert counted == list(range(5))
    batches = data.evaluation_batches(rows(3), batch_size=batch_size, max_rows=5)
    assert sum(batch["weights"].sum() for batch in batches) == 3


def test_evaluation_may_drop_an_incomplete_batch():
    batches = data.evaluation_batches(rows(29), batch_size=8, remainder="drop")
    assert [ids(b) for b in batches] == [
        list(range(8 * t, 8 * t + 8)) for t in range(3)
    ]


@pytest.mark.parametrize(
    ("count", "arguments", "message"),
    [
        (5, dict(batch_size=8, remainder="drop"), "5 rows make no batch of 8"),
        (5, dict(batch_size=8, remainder="keep"), "must be 'pad' or 'drop'"),
        (5, dict(batch_size=5, process_count=2), "the nearest that do: 4 or 6"),
    ],
)
def test_impossible_evaluations_are_refused(count, arguments, message):
    with pytest.raises(ValueError, match=message):
        data.evaluation_batches(rows(count), **arguments)


def test_evaluation_needs_to_know_what_is_counted():
    unlabelled = data.MemorySource({"tokens": np.arange(3)})
    with pytest.raises(ValueError, match=r"needs 'targets', 'labels' or 'weights'"):
        data.evaluation_batches(unlabelled, batch_size=2)[0]


# Prefetching and worker processes.


@pytest.mark.parametrize(("threads", "buffer"), [(0, 0), (1, 1), (3, 5)])
@pytest.mark.parametrize("start", [0, 13])
def test_prefetching_changes_nothing(threads, buffer, start):
    steps = data.batches(rows(29), batch_size=8, seed=4)
    iterator = data.prefetch(
        steps, start_step=start, num_threads=threads, buffer_size=buffer
    )
    for step in range(start, start + 6):
        assert ids(next(iterator)) == ids(steps[step])
    iterator.close()


def test_prefetching_a_finite_set_ends():
    batches = data.evaluation_batches(rows(29), batch_size=8)
    numbers = [len(batch["labels"]) for batch in data.prefetch(batches, start_step=2)]
    assert numbers == [8, 8]


@pytest.mark.parametrize(("remainder", "count"), [("pad", 29), ("drop", 24)])
def test_workers_share_no_batch_of_a_finite_set(remainder, count):
    batches = data.evaluation_batches(rows(29), batch_size=8, remainder=remainder)
    reader = data.prefetch(batches, num_workers=3)
    found = [batch["sample_id"][batch["weights"] > 0].tolist() for batch in reader]
    assert found == [list(range(i, min(i + 8, 29))) for i in range(0, count, 8)]


@pytest.mark.parametrize(
    "name", ["start_step", "num_threads", "buffer_size", "num_workers"]
)
def test_negative_prefetching_is_refused(name):
    steps = data.batches(rows(3), batch_size=1, seed=0)
    with pytest.raises(ValueError, match=f"{name}=-1"):
        data.prefetch(steps, **{name: -1})


def test_dataset_pickles():
    steps = data.batches(rows(29), batch_size=8, seed=4)
    assert ids(pickle.loads(pickle.dumps(steps))[9]) == ids(steps[9])


PROGRAM = """
import sys
import numpy as np
import grain
from dataeff_jax import data

def main(num_workers):
    rows = data.MemorySource({"labels": np.arange(29)})
    batches = grain.MapDataset.concatenate([
        data.evaluation_batches(rows, batch_size=8),
        data.evaluation_batches(rows, batch_size=8, remainder="drop"),
        data.batches(rows, batch_size=8, seed=0)[:5],
    ])
    iterator = data.prefetch(batches, num_workers=num_workers)
    print([batch["sample_id"].tolist() for batch in iterator])
    iterator.close()
"""
# Flags are never parsed here; afterwards a wrong one must still be an error.
ARGPARSE = PROGRAM + textwrap.dedent("""
    if __name__ == "__main__":
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--num_workers", type=int)
        main(parser.parse_args().num_workers)
        from absl import flags
        try:
            flags.FLAGS(["program", "--num_wrkers=2"])
        except flags.UnrecognizedFlagError as error:
            print(error)
""")
ABSL = PROGRAM + textwrap.dedent("""
    from absl import app, flags
    flags.DEFINE_integer("num_workers", 0, "")
    if __name__ == "__main__":
        app.run(lambda argv: main(flags.FLAGS.num_workers))
""")
# What a notebook does with a cell.
CELL = f"exec(compile({PROGRAM!r} + 'main(1)', 'cell', 'exec'), globals())"


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """All programs at once: each spends seconds on importing, in every process."""
    folder = tmp_path_factory.mktemp("my scripts")
    (folder / "argparse script.py").write_text(ARGPARSE)
    (folder / "absl script.py").write_text(ABSL)
    commands = {
        "argparse_three_workers": ["argparse script.py", "--num_workers=3"],
        "absl_one_worker": ["absl script.py", "--num_workers=1"],
        "python_c_and_a_cell": ["-c", CELL],
    }
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes = {
        name: subprocess.Popen(
            [sys.executable, *command], cwd=folder, env=environment, **pipes
        )
        for name, command in commands.items()
    }
    try:
        yield {
            name: (*process.communicate(timeout=600), process.returncode)
            for name, process in processes.items()
        }
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    "name", ["argparse_three_workers", "absl_one_worker", "python_c_and_a_cell"]
)
def test_workers_start_everywhere_and_change_no_batch(name, launched):
    stdout, stderr, returncode = launched[name]
    wanted = [
        *data.evaluation_batches(rows(29), batch_size=8),
        *data.evaluation_batches(rows(29), batch_size=8, remainder="drop"),
        *data.batches(rows(29), batch_size=8, seed=0)[:5],
    ]
    assert stdout.splitlines()[:1] == [f"{[ids(batch) for batch in wanted]}"], stderr
    assert returncode == 0


def test_unknown_flags_are_still_reported_after_workers_have_run(launched):
    stdout, stderr, _ = launched["argparse_three_workers"]
    reported = [line for line in stdout.splitlines() if "num_wrkers" in line]
    assert reported == ["Unknown command line flag 'num_wrkers'"], stderr


KILLED = textwrap.dedent("""
    import multiprocessing, os, signal
    import numpy as np
    from dataeff_jax import data

    if __name__ == "__main__":
        rows = data.MemorySource({"labels": np.arange(29)})
        steps = data.batches(rows, batch_size=8, seed=0)
        iterator = data.prefetch(steps, num_workers=1)
        next(iterator)
        (worker,) = multiprocessing.active_children()
        os.kill(worker.pid, signal.SIGKILL)
        try:
            for _ in range(10**6):
                next(iterator)
        except Exception as error:
            print("noticed", type(error).__name__)
""")


@pytest.mark.slow
def test_a_killed_worker_is_an_error_and_no_endless_wait(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "noticed" in done.stdout, done.stderr


def test_processes_agree_on_the_steps_of_an_epoch_of_uneven_size():
    parts = [dict(batch_size=4, process_index=p, process_count=2) for p in range(2)]
    for remainder, steps in (("pad", 5), ("drop", 4)):
        batches = [
            data.evaluation_batches(rows(17), remainder=remainder, **p) for p in parts
        ]
        assert [len(b) for b in batches] == [steps, steps]
    # In training no epoch ends early: 17 rows are 4 batches and a quarter of a fifth.
    steps = [data.batches(rows(17), seed=0, **p)[:9] for p in parts]
    drawn = [i for t in range(9) for part in steps for i in ids(part[t])]
    assert sorted(drawn[:17]) == sorted(drawn[17:34]) == list(range(17))
