import collections
import hashlib
import itertools
import json
import pickle
import tracemalloc

import numpy as np
import pytest

from dataeff_jax import curriculum, schedules
from dataeff_jax.curriculum import _draws, _index, _permutation, _sampler

LINEAR = schedules.fixed_linear_schedule
ROOT = schedules.fixed_root_schedule
DRAWS = ("stratified", "parity", "iid")


def function_index(directory, *columns):
    """An index of metrics f0, f1, ... with the given values."""
    source = list(range(len(columns[0])))
    metrics = [
        curriculum.function_metric(Column(c), name=f"f{i}", dtype="int64")
        for i, c in enumerate(columns)
    ]
    return curriculum.analyze(source, metrics, directory)


class Column:
    def __init__(self, values):
        self.values = [int(v) for v in values]

    def __call__(self, record):
        return self.values[record]


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """1,000 samples, difficulty = id mod 97, and another one."""
    rng = np.random.default_rng(0)
    columns = (np.arange(1000) % 97, rng.integers(0, 1000, 1000))
    return function_index(tmp_path_factory.mktemp("index") / "index", *columns)


def one(**kw):
    kw = {"min": 5, "max": 96, "total": 40} | kw
    pacing = LINEAR(kw["min"], max_difficulty=kw["max"], total=kw["total"])
    return {"f0": curriculum.Criterion(pacing, "value")}


def two():
    percent = curriculum.Criterion(ROOT(10, max_difficulty=100, total=50))
    return one() | {"f1": percent}


# Permutations


def permuted(indices, lengths, keys):
    parts = np.broadcast_arrays(*(np.atleast_1d(x) for x in (indices, lengths, keys)))
    indices, lengths, keys = (part.astype(np.uint64) for part in parts)
    return _permutation.permuted(indices, lengths, keys)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 10, 97, 1024, 1025, 5000])
def test_a_keyed_permutation_is_one_and_depends_on_its_key(length):
    found = [permuted(np.arange(length), length, key) for key in (1, 2)]
    for places in found:
        assert sorted(places.tolist()) == list(range(length))
    if length >= 10:
        assert found[0].tolist() != found[1].tolist()


def test_many_permutations_at_once_are_those_one_by_one():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 10**12, 200)
    indices, keys = lengths // 3, rng.integers(0, 2**63, 200).astype(np.uint64)
    together = permuted(indices, lengths, keys)
    alone = [
        permuted(*part).item() for part in zip(indices, lengths, keys, strict=True)
    ]
    assert together.tolist() == alone
    assert (together < lengths).all()


@pytest.mark.parametrize("length", [3, 7, 100])
def test_each_place_is_as_likely_as_another(length):
    keys = _permutation.mixed(np.arange(20_000).astype(np.uint64))
    for place in (0, length - 1):
        found = permuted(place, length, keys)
        counts = np.bincount(found, minlength=length)
        share = 1 / length
        sigma = np.sqrt(20_000 * share * (1 - share))
        assert np.abs(counts - 20_000 * share).max() < 5 * sigma


# Draws


def make_pool(rng, num_stages, batch_size):
    steps = rng.integers(1, 9, num_stages - 1)
    starts = np.concatenate([[0], np.cumsum(steps)])
    sizes = rng.choice([1, 2, 3, 50, 1000], num_stages)
    return _draws.Pool(starts, sizes.astype(np.int64), batch_size, 7)


@pytest.mark.parametrize("kind", [_draws.Stratified, _draws.Parity])
@pytest.mark.parametrize("block", [3, 64, 4096])
@pytest.mark.parametrize("seed", range(4))
def test_every_cluster_is_drawn_in_its_order_without_a_gap(
    kind, block, seed, monkeypatch
):
    monkeypatch.setattr(_draws, "_BLOCK", block)
    monkeypatch.setattr(_draws, "_MAX_SEGMENT", 4 * block)
    pool = make_pool(np.random.default_rng(seed), 6, 8)
    draws = kind(pool)
    seen = collections.defaultdict(list)
    for step in range(int(pool.starts[-1]) + 40):
        clusters, numbers = draws.draws(step)
        assert len(clusters) == len(numbers) == 8
        assert clusters.max() <= pool.stage(step)
        for cluster, number in zip(clusters.tolist(), numbers.tolist(), strict=True):
            seen[cluster].append(number)
    for numbers in seen.values():
        assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("kind", [_draws.Stratified, _draws.Parity, _draws.Iid])
def test_any_step_is_found_at_once(kind):
    pool = make_pool(np.random.default_rng(1), 5, 8)

    def get(draws, step):
        if kind is _draws.Iid:
            return draws.places(step).tolist()
        return [part.tolist() for part in draws.draws(step)]

    draws = kind(pool)
    in_order = [get(draws, step) for step in range(200)]
    for step in (199, 0, 57, 3, 120):
        assert get(kind(pool), step) == in_order[step]
        assert get(pickle.loads(pickle.dumps(draws)), step) == in_order[step]
    assert get(kind(pool), 10**9) == get(kind(pool), 10**9)


@pytest.mark.parametrize("block", [16, 4096])
def test_stratified_counts_stay_at_the_shares_and_nobody_starves(block, monkeypatch):
    monkeypatch.setattr(_draws, "_BLOCK", block)
    # Many short stages: a small cluster's share of each is far below one draw.
    starts = np.arange(0, 400, 2)
    sizes = np.where(np.arange(200) % 3, 2, 400)
    draws = _draws.Stratified(_draws.Pool(starts, sizes, 16, 3))
    had, due = np.zeros(200), np.zeros(200)
    for step in range(1400):
        stage = draws.pool.stage(step)
        pool = sizes[: stage + 1]
        due[: stage + 1] += 16 * pool / pool.sum()
        had += np.bincount(draws.draws(step)[0], minlength=200)
        if step % 2 and step < 398:  # the ends of stages
            assert np.abs(had - due).max() < 2
    slack = 5 * np.sqrt(np.maximum(due, 1))
    assert (np.abs(had - due) < slack).all()
    assert (had > 0).all()


@pytest.mark.parametrize("segment", [2**29, 64])
def test_parity_counts_have_the_multinomial_law(segment, monkeypatch):
    monkeypatch.setattr(_draws, "_MAX_SEGMENT", segment)
    sizes = np.array([5, 1, 30])
    starts = np.array([0, 1, 2])
    counts = []
    for seed in range(60):
        draws = _draws.Parity(_draws.Pool(starts, sizes, 8, seed))
        for step in range(2, 42):
            counts.append(np.bincount(draws.draws(step)[0], minlength=3))
    counts, p = np.array(counts), sizes / sizes.sum()
    n = len(counts)
    mean_error = np.abs(counts.mean(0) - 8 * p) / np.sqrt(8 * p * (1 - p) / n)
    assert mean_error.max() < 5
    # Independent between steps: the variance of one batch is the binomial one.
    np.testing.assert_allclose(counts.var(0), 8 * p * (1 - p), rtol=0.15)
    pairs = counts.reshape(60, 40, 3)
    for part in range(3):
        left, right = pairs[:, :-1, part].ravel(), pairs[:, 1:, part].ravel()
        assert abs(np.corrcoef(left, right)[0, 1]) < 5 / np.sqrt(len(left))


@pytest.mark.parametrize("count", [1, 2, 7, 39, 40, 50])
def test_the_smallest_are_those_of_a_stable_sort(count):
    values = np.random.default_rng(count).integers(0, 6, 40).astype(float)
    want = np.argsort(values, kind="stable")[:count]
    assert sorted(_draws._smallest(values, count)) == sorted(want)


@pytest.mark.parametrize("kind", [_draws.Stratified, _draws.Parity])
@pytest.mark.parametrize("batch_size", [8, 1000, 5000])
def test_steps_together_are_those_one_by_one(kind, batch_size):
    draws = kind(make_pool(np.random.default_rng(2), 6, batch_size))
    for step in range(40):
        alone = draws._located(*draws.draws(step))
        np.testing.assert_array_equal(draws.places(step), alone)


# The order


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("criteria", [one, two])
def test_batches_are_full_and_only_of_what_is_admitted(index, draw, criteria):
    order = curriculum.SampleOrder(index, criteria(), batch_size=16, seed=7, draw=draw)
    f0, f1 = index.values("f0"), index.values("f1")
    rank = np.argsort(np.argsort(f1, kind="stable"))
    for step in range(70):
        batch, told = order[step], order.difficulties(step)
        assert batch.shape == (16,)
        eligible = f0 <= told["f0"]
        if "f1" in told:
            eligible &= rank < curriculum.percentile_count(told["f1"], 1000)
        assert told["f0"] == criteria()["f0"].schedule(step + 1)
        assert eligible[batch].all()
        assert order.num_eligible(step) == eligible.sum()


@pytest.mark.parametrize("draw", ["stratified", "parity"])
def test_a_pass_has_every_sample_once(tmp_path, draw):
    index = function_index(tmp_path / "index", np.zeros(60))
    criteria = {
        "f0": curriculum.Criterion(LINEAR(0, max_difficulty=0, total=1), "value")
    }
    order = curriculum.SampleOrder(index, criteria, batch_size=12, seed=0, draw=draw)
    passes = [
        np.concatenate([order[step] for step in range(start, start + 5)])
        for start in (0, 5, 500, 10_000)
    ]
    for samples in passes:
        assert sorted(samples.tolist()) == list(range(60))
    assert passes[0].tolist() != passes[1].tolist()


@pytest.mark.parametrize("draw", DRAWS)
def test_a_pool_smaller_than_the_batch_fills_it(tmp_path, draw):
    index = function_index(tmp_path / "index", np.arange(100))
    pacing = LINEAR(2, max_difficulty=99, total=1000, difficulty_step=97)
    criteria = {"f0": curriculum.Criterion(pacing, "value")}
    order = curriculum.SampleOrder(index, criteria, batch_size=10, seed=0, draw=draw)
    batches = np.array([order[step] for step in range(10)])
    assert batches.shape == (10, 10)
    counts = np.bincount(batches.ravel(), minlength=100)
    assert counts[3:].sum() == 0
    assert counts[:3].min() >= 14
    assert counts[:3].max() <= 53


def test_a_sample_is_drawn_as_often_as_it_was_eligible(index):
    order = curriculum.SampleOrder(index, one(total=400), batch_size=64, seed=0)
    counts, due = np.zeros(1000), np.zeros(1000)
    values = index.values("f0")
    for step in range(600):
        counts += np.bincount(order[step], minlength=1000)
        eligible = values <= order.difficulties(step)["f0"]
        due += eligible * 64 / eligible.sum()
    by_value = [np.bincount(values, weights=w) for w in (counts, due)]
    np.testing.assert_allclose(*by_value, rtol=0.05, atol=6)
    assert np.corrcoef(counts, due)[0, 1] > 0.99


@pytest.mark.parametrize("draw", DRAWS)
def test_seeds_and_settings_give_other_orders_and_fingerprints(index, draw):
    def make(seed=0, criteria=one, **kw):
        return curriculum.SampleOrder(
            index, criteria(), batch_size=16, seed=seed, draw=draw, **kw
        )

    order = make()
    assert order[30].tolist() == make()[30].tolist()
    assert order.fingerprint == make().fingerprint
    others = [make(seed=1), make(step_offset=0), make(criteria=two)]
    assert len({o.fingerprint for o in (order, *others)}) == 4
    assert order[30].tolist() != others[0][30].tolist()


@pytest.mark.parametrize(
    ("draw", "want"), [("stratified", "bac96bf4c034af2c"), ("iid", "1c80389ddcc0bcef")]
)
def test_the_same_settings_give_the_same_samples_in_every_version(index, draw, want):
    order = curriculum.SampleOrder(index, two(), batch_size=16, seed=7, draw=draw)
    samples = [order[step].tolist() for step in (*range(60), 10**6)]
    found = hashlib.sha256(json.dumps(samples).encode()).hexdigest()
    # Runs that were begun rely on it: if it must change, so must _sampler._VERSION.
    assert (_sampler._VERSION, found[:16]) == (2, want)


def test_random_numbers_of_others_change_nothing(index):
    np.random.seed(0)
    before = np.random.get_state()[1].tolist()
    order = curriculum.SampleOrder(index, one(), batch_size=16, seed=7)
    first = order[3].tolist()
    assert np.random.get_state()[1].tolist() == before
    np.random.random(50)
    assert (
        curriculum.SampleOrder(index, one(), batch_size=16, seed=7)[3].tolist() == first
    )


@pytest.mark.parametrize("criteria", [one, two])
def test_an_order_is_sent_to_processes_small(index, criteria):
    order = curriculum.SampleOrder(index, criteria(), batch_size=16, seed=7)
    sent = pickle.dumps(order)
    assert len(sent) < 10_000
    again = pickle.loads(sent)
    for step in (0, 20, 10**6):
        assert again[step].tolist() == order[step].tolist()
    assert again.difficulties(20) == order.difficulties(20)
    with pytest.raises(ValueError, match="read-only"):
        order[0][0] = 1


def test_sampling_writes_nothing_and_the_plan_is_built_once(tmp_path):
    rng = np.random.default_rng(0)
    columns = rng.integers(0, 97, 300), rng.integers(0, 1000, 300)
    index = function_index(tmp_path / "index", *columns)

    def files():
        return {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}

    before = files()
    order = curriculum.SampleOrder(index, one(), batch_size=16, seed=7)
    order[10]
    assert files() == before, "one metric needs no plan"
    order = curriculum.SampleOrder(index, two(), batch_size=16, seed=7)
    planned = files()
    assert len([p for p in planned if p.name == "order.npy"]) == 1
    order[10]
    again = curriculum.SampleOrder(index, two(), batch_size=8, seed=8)
    again[3]
    assert files() == planned
    elsewhere = tmp_path / "plans"
    other = curriculum.SampleOrder(
        index, two(), batch_size=16, seed=7, plan_directory=elsewhere
    )
    assert other[10].tolist() == order[10].tolist()
    assert list(elsewhere.iterdir())


@pytest.mark.parametrize("damage", ["cut", "manifest", "key", "missing"])
def test_a_damaged_plan_is_refused(tmp_path, damage):
    index = function_index(tmp_path / "index", np.arange(100), np.arange(100) % 7)
    curriculum.SampleOrder(index, two(), batch_size=4, seed=0)
    (plan,) = (tmp_path / "index.plans").iterdir()
    path, manifest = plan / "order.npy", plan / "manifest.json"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "missing":
        path.unlink()
    elif damage == "manifest":
        manifest.write_text("{")
    else:
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"key": "x"}))
    with pytest.raises(ValueError, match=r"[Dd]elete the directory"):
        curriculum.SampleOrder(index, two(), batch_size=4, seed=0)


def test_an_empty_pool_is_told_at_once_with_the_reason(tmp_path):
    index = function_index(tmp_path / "index", np.arange(50) + 10, np.arange(50)[::-1])
    with pytest.raises(ValueError, match=r"f0 at value 7 admits 0 of 50.*has 10"):
        curriculum.SampleOrder(index, one(), batch_size=4, seed=0)
    both = {
        f"f{i}": curriculum.Criterion(LINEAR(20, max_difficulty=100, total=9))
        for i in range(2)
    }
    with pytest.raises(ValueError, match="f1 at percentile 20 admits 10 of 50"):
        curriculum.SampleOrder(index, both, batch_size=4, seed=0, step_offset=0)


def test_samples_that_are_never_admitted_are_never_drawn(tmp_path):
    index = function_index(tmp_path / "index", np.arange(100), np.arange(100) % 7)
    criteria = {
        "f0": curriculum.Criterion(LINEAR(5, max_difficulty=50, total=9), "value"),
        "f1": curriculum.Criterion(LINEAR(3, max_difficulty=4, total=9), "value"),
    }
    order = curriculum.SampleOrder(index, criteria, batch_size=4, seed=0)
    many = set(itertools.chain(*(order[step].tolist() for step in range(400))))
    assert many == {i for i in range(51) if i % 7 <= 4}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"seed": -1}, "seed=-1"),
        ({"draw": "random"}, "draw='random'"),
        ({"criteria": {}}, "criteria is empty"),
        ({"criteria": {"g": one()["f0"]}}, "no metric 'g'"),
    ],
)
def test_bad_arguments_are_told_when_built(index, kwargs, message):
    kwargs = {"criteria": one(), "batch_size": 16, "seed": 0} | kwargs
    with pytest.raises(ValueError, match=message):
        curriculum.SampleOrder(index, kwargs.pop("criteria"), **kwargs)


def test_a_step_before_the_first_is_refused(index):
    order = curriculum.SampleOrder(index, one(), batch_size=16, seed=0)
    with pytest.raises(IndexError, match="step=-1"):
        order[-1]


def test_a_huge_index_costs_no_memory_and_no_time(tmp_path):
    # 20 million samples: the values are a hole in the file, their order is 0, 1, 2, ...
    size = 20_000_000
    files = {}
    for kind, dtype in (("values", np.int8), ("order", np.uint32)):
        path = tmp_path / f"f.{kind}.npy"
        array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(size,))
        if kind == "order":
            for start in range(0, size, 10**6):
                array[start : start + 10**6] = np.arange(start, start + 10**6)
        array.flush()
        checksum = _index.block_checksum(path)
        num_bytes = path.stat().st_size
        files[path.name] = {"num_bytes": num_bytes, "checksum": checksum, "sha256": ""}
    manifest = {
        "format": _index.FORMAT,
        "version": _index.VERSION,
        "build": "",
        "num_samples": size,
        "source": "",
        "metrics": {"f": {}},
        "files": files,
    }
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    criteria = {"f": curriculum.Criterion(ROOT(1, max_difficulty=100, total=1000))}
    tracemalloc.start()
    index = curriculum.DifficultyIndex(tmp_path)
    order = curriculum.SampleOrder(index, criteria, batch_size=256, seed=0)
    for step in (*range(10), 10**6):
        assert len(set(order[step].tolist())) == 256
        assert order[step].max() < order.num_eligible(step)
    assert len(pickle.dumps(order)) < 10_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * 2**20
