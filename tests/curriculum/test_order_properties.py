"""What holds of the order of every curriculum, whatever index and schedules."""

import collections
import tempfile

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from dataeff_jax import curriculum, data, schedules

LINEAR = schedules.fixed_linear_schedule
DRAWS = ("stratified", "parity", "iid")


class Columns:
    """Samples whose difficulties are known already."""

    fingerprint = "columns"

    def __init__(self, columns):
        self.columns = columns

    def __len__(self):
        return len(self.columns["a"])

    def __getitem__(self, sample):
        return {name: column[sample] for name, column in self.columns.items()}


class Column:
    def __init__(self, name):
        self.name = name

    def __call__(self, record):
        return int(record[self.name])


def make_index(directory, **columns):
    metrics = [
        curriculum.function_metric(Column(name), name=name, dtype="int64")
        for name in columns
    ]
    return curriculum.analyze(Columns(columns), metrics, directory)


def admitted(criterion, difficulty, values):
    """The samples that one metric admits, by sorting and counting."""
    rank = np.argsort(np.argsort(values, kind="stable"))
    if criterion.difficulty_type == "value":
        return values <= difficulty
    if criterion.difficulty_type == "percentile":
        return rank < max(1, -(-difficulty * len(values) // 100))
    top = criterion.schedule.max_difficulty
    count = len(values) // top * difficulty if difficulty < top else len(values)
    return rank < count


KINDS = ("value", "percentile", "deepspeed_percentile")


@hypothesis.given(
    num_samples=st.integers(1, 130),
    distinct=st.integers(1, 12),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=2),
    low=st.integers(0, 60),
    total=st.integers(1, 20),
    batch_size=st.sampled_from([1, 3, 16, 200]),
    draw=st.sampled_from(DRAWS),
    seed=st.integers(0, 2**40),
)
@hypothesis.settings(max_examples=40, deadline=None)
def test_batches_are_full_of_what_the_set_algebra_admits(
    num_samples, distinct, kinds, low, total, batch_size, draw, seed
):
    random = np.random.default_rng(seed)
    columns = {
        name: random.integers(0, distinct, num_samples)
        for name, _ in zip("ab", kinds, strict=False)
    }
    criteria = {}
    for name, kind in zip(columns, kinds, strict=True):
        top = distinct - 1 if kind == "value" else 100
        pacing = LINEAR(min(low, top), max_difficulty=top, total=total)
        criteria[name] = curriculum.Criterion(pacing, kind)
    pools = []
    for step in range(total + 3):
        masks = [
            admitted(c, c.schedule(step + 1), columns[n]) for n, c in criteria.items()
        ]
        pools.append(np.logical_and.reduce(masks))
    with tempfile.TemporaryDirectory() as place:
        index = make_index(f"{place}/index", **columns)
        make = {"batch_size": batch_size, "seed": seed, "draw": draw}
        if not pools[0].any():
            with pytest.raises(ValueError, match="No sample may be drawn at step 0"):
                curriculum.SampleOrder(index, criteria, **make)
            return
        order = curriculum.SampleOrder(index, criteria, **make)
        for step, pool in enumerate(pools):
            assert order[step].shape == (batch_size,)
            assert pool[order[step]].all()
            assert order.num_eligible(step) == pool.sum()
        assert pools[-1].all() and order.num_eligible(10**9) == num_samples


@pytest.fixture(scope="module")
def ramp(tmp_path_factory):
    """400 samples in clusters of 1 to 150, and what admits one after the other."""
    sizes = (1, 2, 7, 30, 80, 80, 50, 150)
    values = np.repeat(np.arange(len(sizes)), sizes)
    np.random.default_rng(3).shuffle(values)
    index = make_index(tmp_path_factory.mktemp("ramp") / "index", a=values)
    pacing = LINEAR(0, max_difficulty=len(sizes) - 1, total=21)
    return index, {"a": curriculum.Criterion(pacing, "value")}


@pytest.mark.parametrize("draw", ["stratified", "parity"])
@pytest.mark.parametrize("batch_size", [8, 50])
def test_every_pass_over_a_cluster_has_each_of_its_samples_once(ramp, draw, batch_size):
    index, criteria = ramp
    order = curriculum.SampleOrder(
        index, criteria, batch_size=batch_size, seed=1, draw=draw
    )
    values, drawn = index.values("a"), collections.defaultdict(list)
    for step in range(300):
        for sample in order[step].tolist():
            drawn[int(values[sample])].append(sample)
    for cluster, samples in drawn.items():
        members = np.flatnonzero(values == cluster).tolist()
        size, passes = len(members), len(samples) // len(members)
        assert passes >= 3
        for number in range(passes):
            assert sorted(samples[number * size : (number + 1) * size]) == members
    orders = [drawn[4][:80], drawn[4][80:160], drawn[5][:80]]
    ranks = [np.argsort(np.argsort(samples)).tolist() for samples in orders]
    assert ranks[0] != ranks[1] != ranks[2] != ranks[0]


@pytest.mark.parametrize("draw", DRAWS)
def test_clusters_are_drawn_in_proportion_to_their_sizes(ramp, draw):
    index, criteria = ramp
    values, due, found, variance = index.values("a"), *np.zeros((3, 8))
    sizes = np.bincount(values)
    for seed in range(4):
        order = curriculum.SampleOrder(
            index, criteria, batch_size=16, seed=seed, draw=draw
        )
        for step in range(500):
            pool = sizes * (np.arange(8) <= order.difficulties(step)["a"])
            share = pool / pool.sum()
            due += 16 * share
            variance += 16 * share * (1 - share)
            found += np.bincount(values[order[step]], minlength=8)
    assert (np.abs(found - due) < 5 * np.sqrt(variance)).all()


class WideIndex:
    """An index of a few samples whose numbers are far beyond 32 bits."""

    fingerprint = "wide"

    def __init__(self, samples):
        self._samples = samples

    def __len__(self):
        return len(self._samples)

    def values(self, metric):
        return np.zeros(len(self), np.int64)

    def order(self, metric):
        return self._samples


class WideRows:
    def __len__(self):
        return 4

    def __getitem__(self, sample):
        return {"tokens": np.zeros(2, np.int32), "own_id": np.int64(sample)}


@pytest.mark.parametrize(
    ("first", "dtype"),
    [(2**24, np.uint32), (2**31 + 5, np.uint32), (2**53, np.uint64)],
)
def test_numbers_of_samples_beyond_32_bits_come_back_unchanged(first, dtype):
    samples = np.arange(first, first + 4, dtype=dtype)
    criteria = {"a": curriculum.Criterion(LINEAR(100, max_difficulty=100, total=1))}
    order = curriculum.SampleOrder(
        WideIndex(samples), criteria, batch_size=4, seed=0, num_steps=1
    )
    want = list(range(first, first + 4))
    assert sorted(order[3].tolist()) == want
    batch = curriculum.batches(WideRows(), order)[3]
    assert batch["sample_id"].dtype == np.int64
    assert batch["sample_id"].tolist() == batch["own_id"].tolist() == order[3].tolist()


def test_batches_in_flight_tell_their_own_length_and_the_tokens_can_be_recounted(ramp):
    index, criteria = ramp
    order = curriculum.SampleOrder(index, criteria, batch_size=8, seed=1)
    growth = LINEAR(4, max_difficulty=32, total=20, difficulty_step=4)
    rows = data.MemorySource({"tokens": np.zeros((400, 32), np.int32)})
    lengths = curriculum.LengthCurriculum(growth)
    reader = data.prefetch(
        lengths.batches(curriculum.batches(rows, order)), buffer_size=32
    )
    fed, log = 0, []
    for _ in range(40):
        batch = next(reader)
        fed += batch["tokens"].size
        log.append(batch["step"].tolist()[0])
        length, level = growth(log[-1] + 1), criteria["a"].schedule(log[-1] + 1)
        assert batch["length"].tolist() == [length] * 8
        assert batch["difficulty_a"].tolist() == [level] * 8
        assert batch["sample_id"].tolist() == order[log[-1]].tolist()
    reader.close()
    assert log == list(range(40))
    assert fed == sum(8 * growth(step + 1) for step in range(40))


def test_plans_lie_beside_an_index_in_a_folder_with_blanks(tmp_path):
    columns = {"a": np.arange(50) % 7, "b": np.arange(50) % 11}
    criteria = {
        name: curriculum.Criterion(LINEAR(3, max_difficulty=6, total=9), "value")
        for name in columns
    }
    orders = []
    for folder in ("plain", "my data/run 1"):
        index = make_index(tmp_path / folder / "index", **columns)
        make = {"batch_size": 4, "seed": 0}
        order = curriculum.SampleOrder(index, criteria, **make)
        orders.append([order[step].tolist() for step in range(20)])
        assert list((tmp_path / folder / "index.plans").iterdir())
    assert orders[0] == orders[1]
