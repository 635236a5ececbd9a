import itertools
import json
import os
import pathlib
import subprocess
import sys

import grain
import numpy as np
import pytest

from dataeff_jax import curriculum, data, schedules

ROOT = pathlib.Path(__file__).resolve().parents[2]


def mod_97(record):
    return int(record["labels"]) % 97


METRIC = curriculum.function_metric(mod_97, name="difficulty", dtype="int64")
CRITERIA = {
    "difficulty": curriculum.Criterion(
        schedules.fixed_linear_schedule(5, max_difficulty=96, total=40), "value"
    )
}


class Rows:
    """1,000 rows that pickle small."""

    fingerprint = "rows"

    def __len__(self):
        return 1000

    def __repr__(self):
        return "Rows()"

    def __getitem__(self, index):
        return {"labels": np.int64(index), "tokens": np.full(4, index)}


@pytest.fixture(scope="module")
def order(tmp_path_factory):
    directory = tmp_path_factory.mktemp("index") / "index"
    index = curriculum.analyze(Rows(), [METRIC], directory)
    return curriculum.SampleOrder(index, CRITERIA, batch_size=16, seed=7)


def ids(batch):
    return batch["sample_id"].tolist()


def test_batches_carry_ids_step_and_difficulties(order):
    steps = curriculum.batches(Rows(), order)
    for step in (0, 17, 39, 10**6):
        batch = steps[step]
        assert ids(batch) == order[step].tolist() == batch["labels"].tolist()
        assert batch["tokens"].shape == (16, 4)
        assert set(batch["step"].tolist()) == {step}
        want = order.difficulties(step)["difficulty"]
        assert set(batch["difficulty_difficulty"].tolist()) == {want}
        assert (batch["labels"] % 97 <= want).all()


@pytest.mark.parametrize("process_count", [1, 2, 4])
def test_processes_have_slices_of_one_batch(order, process_count):
    size = 16 // process_count
    parts = [
        {"process_index": h, "process_count": process_count}
        for h in range(process_count)
    ]
    for step in (0, 33):
        whole = curriculum.batches(Rows(), order)[step]
        steps = [curriculum.batches(Rows(), order, **part)[step] for part in parts]
        single = [
            curriculum.dataset(Rows(), order, **part).batch(size)[step]
            for part in parts
        ]
        for name in whole:
            for found in (steps, single):
                joined = np.concatenate([part[name] for part in found])
                np.testing.assert_array_equal(joined, whole[name])


def test_a_transform_gets_the_number_of_the_draw(order):
    def tell(record, draw):
        return {"draw": np.int64(draw), "sample_id": record["sample_id"]}

    steps = curriculum.batches(
        Rows(), order, process_index=1, process_count=2, transform=tell
    )
    assert steps[3]["draw"].tolist() == list(range(3 * 16 + 8, 4 * 16))


def test_prefetched_batches_tell_their_own_difficulty(order):
    iterator = data.prefetch(curriculum.batches(Rows(), order), buffer_size=16)
    for step in range(45):
        batch = next(iterator)
        want = CRITERIA["difficulty"].schedule(step + 1)
        assert batch["step"].tolist() == [step] * 16
        assert batch["difficulty_difficulty"].tolist() == [want] * 16
        assert batch["labels"].tolist() == order[step].tolist()
    iterator.close()


def test_difficulties_are_asked_for_once_a_batch(order, monkeypatch):
    asked = []
    find = type(order).difficulties

    def difficulties(self, step):
        asked.append(step)
        return find(self, step)

    monkeypatch.setattr(type(order), "difficulties", difficulties)
    steps = curriculum.batches(Rows(), order)
    for step in (3, 4, 3):
        assert set(steps[step]["step"]) == {step}
    assert asked == [3, 4, 3]


def test_records_compose_with_map_and_batch(order):
    labels = curriculum.dataset(Rows(), order).map(lambda record: record["labels"])
    found = list(itertools.islice(labels.batch(16).to_iter_dataset(), 5))
    assert [b.tolist() for b in found] == [order[step].tolist() for step in range(5)]


SCRIPT = """
import json, sys
sys.path[:0] = sys.argv[1:3]
import numpy as np
from dataeff_jax import curriculum, data
import test_dataset as t

if __name__ == "__main__":
    directory, state = sys.argv[3], json.loads(sys.argv[4])
    np.random.random(50)
    index = curriculum.DifficultyIndex(directory)
    order = curriculum.SampleOrder(index, t.CRITERIA, batch_size=16, seed=7)
    before = np.random.get_state()[1].tolist()
    found = []
    halves = [
        data.prefetch(
            curriculum.batches(t.Rows(), order, process_index=h, process_count=2),
            start_step=state["step"], num_workers=workers, buffer_size=16)
        for h, workers in enumerate((0, 2))]
    for _ in range(25):
        batches = [next(half) for half in halves]
        found.append(sum((b["sample_id"].tolist() for b in batches), []))
        assert len({int(s) for b in batches for s in b["step"]}) == 1
    for half in halves:
        half.close()
    assert np.random.get_state()[1].tolist() == before
    print(json.dumps(found))
"""


def test_a_new_process_goes_on_with_other_workers_and_hosts(order, tmp_path):
    # 15 steps lie within the ramp of 40.
    iterator = data.prefetch(curriculum.batches(Rows(), order), buffer_size=16)
    states = []
    for step in range(15):
        next(iterator)
        states.append(json.dumps({"step": step + 1}))
    iterator.close()
    assert states[0] != states[-1]
    script = tmp_path / "go_on.py"
    script.write_text(SCRIPT)
    here = str(pathlib.Path(__file__).parent)
    directory = str(order._settings[0].directory)
    done = subprocess.run(
        [sys.executable, str(script), str(ROOT), here, directory, states[-1]],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}:{here}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    want = [order[step].tolist() for step in range(15, 40)]
    assert json.loads(done.stdout) == want


def test_other_shards_at_a_resume_lose_and_repeat_nothing(tmp_path):
    index = curriculum.analyze(
        [{"labels": i} for i in range(240)], [METRIC], tmp_path / "index"
    )
    pacing = schedules.fixed_linear_schedule(96, max_difficulty=96, total=1)
    criteria = {"difficulty": curriculum.Criterion(pacing, "value")}
    order = curriculum.SampleOrder(index, criteria, batch_size=24, seed=5)

    class Few(Rows):
        def __len__(self):
            return 240

    def run(shards, steps):
        parts = [
            curriculum.batches(Few(), order, process_index=h, process_count=shards)
            for h in range(shards)
        ]
        return [[i for part in parts for i in ids(part[step])] for step in steps]

    first, rest = run(4, range(4)), run(2, range(4, 10))
    assert first + rest == run(1, range(10))
    assert sorted(itertools.chain(*first, *rest)) == list(range(240))


@pytest.mark.parametrize("stop", np.random.default_rng(0).integers(0, 60, 10).tolist())
def test_the_next_thousand_batches_follow_from_the_step(order, stop):
    again = curriculum.SampleOrder(order._settings[0], CRITERIA, batch_size=16, seed=7)
    for step in range(stop, stop + 1000, 37):
        assert again[step].tolist() == order[step].tolist()


# grain.DataLoader


def load(order, *, num_workers=0, shard=0, shards=1, first_step=0, steps=6):
    sampler = curriculum.Sampler(
        order,
        num_workers=num_workers,
        shard_count=shards,
        first_step=first_step,
        num_steps=steps,
    )
    loader = grain.DataLoader(
        data_source=Rows(),
        sampler=sampler,
        shard_options=grain.sharding.ShardOptions(shard, shards),
        operations=[grain.transforms.Batch(order.batch_size // shards)],
        worker_count=num_workers,
    )
    return loader


def test_the_loader_gives_the_batches_of_the_steps(order):
    found = [b["labels"].tolist() for b in load(order)]
    assert found == [order[step].tolist() for step in range(6)]
    found = [b["labels"].tolist() for b in load(order, first_step=30)]
    assert found == [order[step].tolist() for step in range(30, 36)]


def test_the_loaders_shards_are_slices_of_the_batches(order):
    halves = [[b["labels"] for b in load(order, shard=h, shards=2)] for h in (0, 1)]
    for step, parts in enumerate(zip(*halves, strict=True)):
        assert np.concatenate(parts).tolist() == order[step].tolist()


@pytest.mark.parametrize(("num_workers", "shards"), [(3, 1), (3, 2)])
def test_each_of_the_loaders_workers_gets_whole_steps(order, num_workers, shards):
    # What the loader's workers read: worker w takes every W-th of the shard's records.
    sampler = curriculum.Sampler(order, num_workers=num_workers, shard_count=shards)
    local = 16 // shards
    for shard in range(shards):
        keys = [
            sampler[number * shards + shard].record_key for number in range(6 * local)
        ]
        batches = []
        for worker in range(num_workers):
            mine = keys[worker::num_workers]
            batches.append([mine[i : i + local] for i in range(0, len(mine), local)])
        in_turn = [batch for turn in zip(*batches, strict=True) for batch in turn]
        slots = slice(shard * local, (shard + 1) * local)
        assert in_turn == [order[step][slots].tolist() for step in range(6)]


def test_the_loader_resumes_and_its_records_have_random_numbers(order):
    iterator = iter(load(order))
    next(iterator)
    state = iterator.get_state()
    want = [b["labels"].tolist() for b in iterator]
    again = iter(load(order))
    again.set_state(state)
    assert [b["labels"].tolist() for b in again] == want
    sampler = curriculum.Sampler(order)
    drawn = [sampler[i].rng.random() for i in (0, 1, 16)]
    assert len(set(drawn)) == 3
    assert curriculum.Sampler(order, first_step=1)[0].rng.random() == drawn[2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda o: curriculum.batches([1, 2], o), "of 1000 samples, .* are 2 rows"),
        (lambda o: curriculum.dataset(Rows(), o, process_count=3), "does not divide"),
        (lambda o: curriculum.Sampler(o, shard_count=3), "does not divide"),
        (lambda o: curriculum.Sampler(o, num_workers=-1), "num_workers=-1"),
        (lambda o: curriculum.Sampler(o, num_workers=3, num_steps=4), "multiple of"),
    ],
)
def test_what_does_not_fit_is_told_when_built(order, make, message):
    with pytest.raises(ValueError, match=message):
        make(order)


def test_positions_outside_the_sampler_are_refused(order):
    with pytest.raises(IndexError, match="index=32 is outside 32"):
        curriculum.Sampler(order, num_steps=2)[32]
