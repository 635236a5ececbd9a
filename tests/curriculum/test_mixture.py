import fractions
import json
import math
import os
import pathlib
import pickle
import subprocess
import sys

import grain
import numpy as np
import pytest

from dataeff_jax import curriculum, data, schedules
from dataeff_jax.curriculum import _quotas

LINEAR = schedules.fixed_linear_schedule


# Quotas


def halved_by_hand(starts, weights, batch_size, step):
    """The rule, told with fractions and found by scanning: K positive weights."""
    shares = [
        [fractions.Fraction(int(w), int(sum(row))) for w in row] for row in weights
    ]

    def due(members, time):
        total = fractions.Fraction(0)
        for number, start in enumerate(starts):
            end = starts[number + 1] if number + 1 < len(starts) else math.inf
            part = sum(shares[number][m] for m in members)
            total += batch_size * part * max(0, min(time, end) - start)
        return total

    def time_of(members, draws):
        """When the members are due so many draws."""
        for number, start in enumerate(starts):
            part = batch_size * sum(shares[number][m] for m in members)
            time = start + (draws - due(members, start)) / part
            if number + 1 == len(starts) or time < starts[number + 1]:
                return max(time, 0)
        raise AssertionError

    counts = {}

    def split(members, draws, time):
        if len(members) == 1:
            counts[members[0]] = draws
            return
        left, right = members[: len(members) // 2], members[len(members) // 2 :]
        count = math.floor(due(left, time) + fractions.Fraction(1, 2))
        split(left, count, time_of(left, count))
        split(right, draws - count, time_of(right, draws - count))

    split(list(range(len(weights[0]))), step * batch_size, fractions.Fraction(step))
    return [counts[m] for m in range(len(weights[0]))]


@pytest.mark.parametrize("num_corpora", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_quotas_are_those_of_the_rule_told_with_fractions(num_corpora, batch_size):
    rng = np.random.default_rng(num_corpora)
    starts = np.array([0, 3, 4, 11])
    weights = rng.integers(1, 50, (4, num_corpora))
    # Sums of a power of two, so that the unit of the shares is exact.
    weights[:, 0] += 512 - weights.sum(1)
    quotas = _quotas.Quotas(starts, weights.astype(float), batch_size)
    for step in [*range(20), 1000, 1001]:
        want = halved_by_hand(starts.tolist(), weights, batch_size, step)
        assert quotas.counts(step).tolist() == want


def walked(weights, starts, batch_size, num_steps):
    """Yield after each step: due draws, draws, and the draws of the step."""
    quotas = _quotas.Quotas(starts, weights, batch_size)
    due, before = np.zeros(weights.shape[1]), np.zeros(weights.shape[1], np.int64)
    for step in range(num_steps):
        row = weights[np.searchsorted(starts, step, side="right") - 1]
        due = due + batch_size * row / row.sum()
        counts = quotas.counts(step + 1)
        yield row, due, counts, counts - before
        before = counts


def random_weights(rng, num_corpora, zeros):
    num_segments = int(rng.integers(1, 30))
    starts = np.concatenate([[0], np.cumsum(rng.integers(1, 9, num_segments - 1))])
    weights = rng.random((num_segments, num_corpora)) ** rng.choice([1, 6])
    weights *= rng.random(weights.shape) >= zeros
    weights[:, 0] += weights.sum(1) == 0
    return weights, starts


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_corpora", [1, 2, 3, 4, 5, 8, 16])
def test_shares_are_kept_within_half_a_draw_a_halving(num_corpora, seed):
    rng = np.random.default_rng([num_corpora, seed])
    weights, starts = random_weights(rng, num_corpora, zeros=0)
    batch_size = int(rng.integers(1, 12))
    bound = math.ceil(math.log2(num_corpora)) / 2
    for _, due, counts, drawn in walked(weights, starts, batch_size, 300):
        assert drawn.min() >= 0
        assert drawn.sum() == batch_size
        # What the sum of 300 floats may be off, and the unit of the weights.
        assert np.abs(counts - due).max() <= bound + 1e-6


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_corpora", [2, 3, 8])
def test_what_has_weight_0_is_not_drawn_and_gets_its_share_later(num_corpora, seed):
    rng = np.random.default_rng([num_corpora, seed])
    weights, starts = random_weights(rng, num_corpora, zeros=0.4)
    for row, due, counts, drawn in walked(weights, starts, 5, 300):
        assert drawn.min() >= 0
        assert drawn.sum() == 5
        assert drawn[row == 0].sum() == 0
        # Debts of those that pause are shared by the others, so they do not add up.
        assert np.abs(counts - due).max() < 2.5


def test_a_tiny_share_is_drawn_when_it_has_grown_to_a_draw():
    weights = np.array([[1e-4, 1.0, 1.0, 1e-4]])
    quotas = _quotas.Quotas(np.array([0]), weights, 4)
    assert quotas.counts(100).tolist()[::3] == [0, 0]
    for step in (10**5, 10**9, 10**12):
        due = step * 4 * weights[0] / weights.sum()
        assert np.abs(quotas.counts(step) - due).max() <= 1 + 1e-12 * step
    extreme = np.array([[1e-300, 1e308, 1e308]])
    quotas = _quotas.Quotas(np.array([0]), extreme, 4)
    assert quotas.counts(2**44).min() > 0


def test_a_million_changes_are_looked_up_not_walked():
    rng = np.random.default_rng(0)
    weights = rng.random((2**18, 3))
    quotas = _quotas.Quotas(np.arange(2**18), weights, 512)
    due = 512 * (weights / weights.sum(1, keepdims=True)).cumsum(0)
    for step in (2**18 - 1, 5, 2**17):
        assert np.abs(quotas.counts(step) - due[step - 1]).max() <= 1 + 1e-5
    again = pickle.loads(pickle.dumps(quotas))
    assert again.counts(12345).tolist() == quotas.counts(12345).tolist()


# The order


class Rows:
    def __init__(self, size, name):
        self.size, self.name = size, name

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"tokens": np.full(4, index), "first": np.int64(ord(self.name[0]))}


class Value:
    def __init__(self, modulus):
        self.modulus = modulus

    def __call__(self, record):
        return int(record["tokens"][0]) % self.modulus


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    metric = curriculum.function_metric(Value(97), name="value", dtype="int64")
    directory = tmp_path_factory.mktemp("index") / "index"
    return curriculum.analyze(Rows(1000, "x"), [metric], directory)


def paced(index, *, batch_size=16, total=40, **kw):
    pacing = LINEAR(5, max_difficulty=96, total=total)
    criteria = {"value": curriculum.Criterion(pacing, "value")}
    return curriculum.SampleOrder(index, criteria, batch_size=batch_size, seed=7, **kw)


WEIGHTS = {
    "a": 0.5,
    "b": LINEAR(0, max_difficulty=1, total=60, difficulty_step=0.125),
    "c": schedules.fixed_discrete_schedule([0.25, 2, 0], boundaries=[19, 49]),
}
ROWS = {"a": Rows(50, "a"), "b": Rows(1000, "b"), "c": Rows(70, "c")}


def mixed(index, **kw):
    kw = {"weights": WEIGHTS, "batch_size": 16, "seed": 3} | kw
    corpora = {"a": 50, "b": paced(index, batch_size=kw["batch_size"]), "c": 70}
    return curriculum.Mixture(corpora, **kw)


@pytest.fixture(scope="module")
def mixture(index):
    return mixed(index)


def of_corpus(mixture, samples):
    """The corpus of samples, and their numbers within it."""
    ends = np.cumsum(mixture.sizes)
    corpus = np.searchsorted(ends, samples, side="right")
    return corpus, samples - (ends - mixture.sizes)[corpus]


def test_batches_are_full_and_have_the_quotas(mixture):
    for step in [*range(80), 10**6, 10**10]:
        batch = mixture[step]
        corpus, _ = of_corpus(mixture, batch)
        want = mixture.counts(step + 1) - mixture.counts(step)
        assert np.bincount(corpus, minlength=3).tolist() == want.tolist()
        told = mixture.difficulties(step)
        weights = {n: w if n == "a" else w(step) for n, w in WEIGHTS.items()}
        for name, weight in weights.items():
            share = weight / sum(weights.values())
            assert told[f"share_{name}"] == pytest.approx(share, abs=1e-9)
    assert (np.diff([mixture.counts(t)[2] for t in range(50, 60)]) == 0).all()


def test_each_corpus_is_read_without_replacement(mixture):
    seen = {0: [], 2: []}
    for step in range(200):
        corpus, own = of_corpus(mixture, mixture[step])
        for number, samples in seen.items():
            samples += own[corpus == number].tolist()
    for number, size in ((0, 50), (2, 70)):
        whole = len(seen[number]) // size
        passes = np.array(seen[number][: whole * size]).reshape(whole, size)
        assert whole >= 2
        assert (np.sort(passes, axis=1) == np.arange(size)).all()
        assert passes[0].tolist() != passes[1].tolist()


def test_an_order_of_its_own_keeps_its_difficulty_at_every_step(mixture, index):
    order, values = paced(index), index.values("value")
    counts = np.zeros(1000)
    for step in range(300):
        told = mixture.difficulties(step)["b_value"]
        assert told == order.difficulties(step)["value"]
        corpus, own = of_corpus(mixture, mixture[step])
        assert (values[own[corpus == 1]] <= told).all()
        counts += np.bincount(own[corpus == 1], minlength=1000)
    assert counts.sum() == mixture.counts(300)[1]
    assert (counts > 0).all()
    assert mixture.num_eligible(0) == 50 + 70  # b has weight 0
    assert mixture.num_eligible(10**6) == 50 + 1000


def test_shares_are_exact_at_every_step_of_a_schedule():
    weights = {
        "a": 0.7,
        "b": LINEAR(0.1, max_difficulty=2, total=100, difficulty_step=0.01),
        "c": schedules.fixed_discrete_schedule([0.3, 0.05], boundaries=[60]),
        "d": lambda step: 0.5 + 0.4 * math.sin(step),
    }
    mixture = curriculum.Mixture(
        dict.fromkeys(weights, 10), weights=weights, batch_size=7, seed=0, num_steps=90
    )
    due = np.zeros(4)
    for step in range(300):
        assert np.abs(mixture.counts(step) - due).max() <= 1 + 1e-9
        clock = min(step, 90)  # later changes are not seen
        row = np.array([w if n == "a" else w(clock) for n, w in weights.items()])
        due += 7 * row / row.sum()
    assert mixture.difficulties(300)["share_b"] == pytest.approx(row[1] / row.sum())


@pytest.mark.parametrize("draw", ["stratified", "iid"])
def test_a_mixture_of_one_order_is_that_order(index, draw):
    order = paced(index, draw=draw)
    alone = curriculum.Mixture({"x": order}, weights={"x": 3}, batch_size=16, seed=0)
    for step in [*range(60), 10**6]:
        assert alone[step].tolist() == order[step].tolist()


@pytest.mark.parametrize("size", [50, 5000])
def test_a_mixture_of_one_plain_corpus_is_that_of_data_batches(size):
    rows = Rows(size, "x")
    alone = curriculum.Mixture({"x": size}, weights={"x": 1}, batch_size=16, seed=5)
    steps = curriculum.batches(alone.rows({"x": rows}), alone)
    plain = data.batches(rows, batch_size=16, seed=5)
    for step in (0, 1, 3, 400):
        for name in ("tokens", "sample_id"):
            np.testing.assert_array_equal(steps[step][name], plain[step][name])


def test_a_mixture_of_halves_of_equal_weight_takes_turns():
    halves = curriculum.Mixture(
        {"x": 100, "y": 100}, weights={"x": 1, "y": 1}, batch_size=4, seed=0
    )
    batches = np.array([halves[step] for step in range(25)])
    assert ((batches < 100).sum(1) == 2).all()
    first, second = batches[batches < 100], batches[batches >= 100] - 100
    assert first.tolist() != second.tolist(), "each has an order of its own"
    places = (batches < 100).mean(0)
    assert 0.1 < places.min() <= places.max() < 0.9, "no slot belongs to a corpus"


# Batches


def test_batches_carry_corpus_ids_step_and_shares(mixture, index):
    steps = curriculum.batches(mixture.rows(ROWS), mixture)
    for step in (0, 30, 59, 10**6):
        batch = steps[step]
        corpus, own = of_corpus(mixture, mixture[step])
        assert batch["corpus"].tolist() == corpus.tolist()
        assert batch["sample_id"].tolist() == own.tolist()
        assert batch["tokens"][:, 0].tolist() == own.tolist()
        assert batch["first"].tolist() == [ord("abc"[c]) for c in corpus]
        assert set(batch["step"]) == {step}
        told = mixture.difficulties(step)
        for name in ("share_a", "share_b", "share_c", "b_value"):
            assert set(batch[f"difficulty_{name}"]) == {told[name]}


@pytest.mark.parametrize("num_hosts", [1, 2, 4])
def test_hosts_hold_slices_of_the_same_batch(mixture, num_hosts):
    rows = mixture.rows(ROWS)
    hosts = [
        curriculum.batches(rows, mixture, process_index=h, process_count=num_hosts)
        for h in range(num_hosts)
    ]
    one = curriculum.batches(rows, mixture)
    for step in (0, 20, 51, 777):
        for name in ("sample_id", "corpus", "tokens"):
            parts = np.concatenate([host[step][name] for host in hosts])
            np.testing.assert_array_equal(parts, one[step][name])


@pytest.mark.parametrize("stop", [1, 19, 20, 37, 50, 10**7])
def test_a_run_goes_on_at_any_step(index, mixture, stop):
    sent = pickle.dumps(mixture)
    assert len(sent) < 50_000
    for again in (mixed(index), pickle.loads(sent)):
        assert again.fingerprint == mixture.fingerprint
        for step in range(stop, stop + 30):
            assert again[step].tolist() == mixture[step].tolist()


def test_it_composes_as_a_grain_dataset_with_lengths_and_the_loader(mixture):
    rows = mixture.rows(ROWS)
    records = curriculum.dataset(rows, mixture)
    batch = records.map(lambda r: r["sample_id"]).batch(16)[30]
    steps = curriculum.batches(rows, mixture)
    assert batch.tolist() == steps[30]["sample_id"].tolist()
    lengths = curriculum.LengthCurriculum(LINEAR(2, max_difficulty=4, total=40))
    assert lengths.batches(steps)[5]["tokens"].shape == (16, 2)
    iterator = data.prefetch(steps, start_step=20)
    assert next(iterator)["sample_id"].tolist() == steps[20]["sample_id"].tolist()
    iterator.close()
    sampler = curriculum.Sampler(mixture, num_steps=3)
    loader = grain.DataLoader(
        data_source=rows,
        sampler=sampler,
        shard_options=grain.sharding.NoSharding(),
        operations=[grain.transforms.Batch(16)],
    )
    for step, batch in enumerate(loader):
        assert batch["corpus"].tolist() == steps[step]["corpus"].tolist()


SCRIPT = """
import json, sys
from dataeff_jax import curriculum, data
import test_mixture as t

if __name__ == "__main__":
    mixture = t.mixed(curriculum.DifficultyIndex(sys.argv[1]))
    halves = [
        data.prefetch(
            curriculum.batches(
                mixture.rows(t.ROWS), mixture, process_index=h, process_count=2),
            start_step=int(sys.argv[2]), num_workers=workers, buffer_size=16)
        for h, workers in enumerate((0, 2))]
    found = []
    for _ in range(25):
        batches = [next(half) for half in halves]
        parts = [zip(b["corpus"].tolist(), b["sample_id"].tolist()) for b in batches]
        found.append([*parts[0], *parts[1]])
    for half in halves:
        half.close()
    print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_new_process_goes_on_with_other_workers_and_hosts(index, mixture, tmp_path):
    script = tmp_path / "go_on.py"
    script.write_text(SCRIPT)
    here = pathlib.Path(__file__).parent
    path = f"{here.parents[1]}:{here}"
    done = subprocess.run(
        [sys.executable, str(script), str(index.directory), "35"],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    steps = curriculum.batches(mixture.rows(ROWS), mixture)
    want = [
        np.stack([steps[step]["corpus"], steps[step]["sample_id"]], axis=1).tolist()
        for step in range(35, 60)
    ]
    assert json.loads(done.stdout) == want


def test_batches_are_trimmed_to_the_longest_row_of_any_corpus():
    sizes = {"a": 9, "b": 5}
    mixture = curriculum.Mixture(sizes, weights={"a": 1, "b": 1}, batch_size=4, seed=0)
    lengths = np.concatenate([np.arange(1, 10), [2] * 5])
    trimming = curriculum.Trimming(mixture, lengths, buckets=(4, 8, 16))
    for step in range(20):
        longest = lengths[mixture[step]].max()
        assert trimming.length_at(step) == min(b for b in (4, 8, 16) if b >= longest)


def test_the_order_of_the_names_does_not_matter(index, mixture):
    corpora = {"c": 70, "b": paced(index), "a": 50}
    weights = {name: WEIGHTS[name] for name in ("b", "c", "a")}
    again = curriculum.Mixture(corpora, weights=weights, batch_size=16, seed=3)
    assert again.names == ("a", "b", "c")
    assert again.fingerprint == mixture.fingerprint
    assert again[30].tolist() == mixture[30].tolist()


def test_settings_change_the_fingerprint(index, mixture):
    others = [
        mixed(index, seed=4),
        mixed(index, step_offset=1),
        mixed(index, batch_size=8),
        mixed(index, weights=WEIGHTS | {"a": 0.25}),
    ]
    assert len({m.fingerprint for m in (mixture, *others)}) == 5
    assert mixed(index, seed=4)[30].tolist() != mixture[30].tolist()


def test_a_slice_that_is_repeated_holds_only_what_was_asked_for():
    twelve = data.MemorySource({"labels": np.arange(12)})
    part, rest = data.random_split(twelve, sizes=(5, 7), seed=5)
    corpora = {"part": part, "rest": rest}
    mixture = curriculum.Mixture(
        {name: len(rows) for name, rows in corpora.items()},
        weights={"part": 1, "rest": 0},
        batch_size=5,
        seed=5,
    )
    steps = curriculum.batches(mixture.rows(corpora), mixture)
    chosen = sorted(int(part[i]["labels"]) for i in range(5))
    for step in range(4):
        assert sorted(steps[step]["labels"].tolist()) == chosen


# Errors


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 1}, r"corpora has \['a', 'b'\] and weights \['a'\]"),
        ({"a": 1, "c": 1}, "must name the same corpora"),
        ({"a": -1, "b": 1}, "weight of 'a' is -1 at step 0"),
        ({"a": math.nan, "b": 1}, "weight of 'a' is nan"),
        ({"a": math.inf, "b": 1}, "must be a finite number"),
        ({"a": True, "b": 1}, "weight of 'a' is True"),
        ({"a": "1", "b": 1}, "weight of 'a' is '1'"),
        ({"a": 0, "b": 0}, "All weights are 0 at step 0"),
        ({"a": LINEAR(0, max_difficulty=1, total=9), "b": 0}, "are 0 at step 0"),
        ({"a": lambda t: 1, "b": 1}, "weight of 'a' does not tell its end"),
    ],
)
def test_bad_weights_are_told_when_built(weights, message):
    with pytest.raises(ValueError, match=message):
        curriculum.Mixture({"a": 5, "b": 5}, weights=weights, batch_size=4, seed=0)


def test_a_schedule_that_goes_wrong_later_is_told_with_its_step():
    def falling(step):
        return 1 - step / 10

    with pytest.raises(ValueError, match=r"weight of 'a' is -0.1.* at step 11"):
        curriculum.Mixture(
            {"a": 5, "b": 5},
            weights={"a": falling, "b": 1},
            batch_size=4,
            seed=0,
            num_steps=20,
        )
    with pytest.raises(ValueError, match="All weights are 0 at step 10"):
        curriculum.Mixture(
            {"a": 5}, weights={"a": falling}, batch_size=4, seed=0, num_steps=10
        )


def test_corpora_that_do_not_fit_are_told_when_built(index):
    def make(corpus, **kw):
        kw = {"batch_size": 16, "seed": 0} | kw
        return curriculum.Mixture({"a": corpus}, weights={"a": 1}, **kw)

    for corpus in (0, -1, 2.5, "a", None, make(5)):
        with pytest.raises(ValueError, match="must be its number of samples"):
            make(corpus)
    with pytest.raises(ValueError, match="has batch_size=8; give it that of the mix"):
        make(paced(index, batch_size=8))
    with pytest.raises(ValueError, match="draw='parity'"):
        make(paced(index, draw="parity"))
    with pytest.raises(ValueError, match="batch_size=0"):
        make(5, batch_size=0)
    with pytest.raises(ValueError, match="seed=-1"):
        make(5, seed=-1)
    with pytest.raises(ValueError, match="corpora has"):
        curriculum.Mixture({}, weights={}, batch_size=1, seed=0)


def test_rows_that_do_not_fit_are_told(mixture):
    with pytest.raises(ValueError, match=r"rows of .*; the mixture is of"):
        mixture.rows({"a": ROWS["a"]})
    with pytest.raises(ValueError, match="'a' has 70 rows; the mixture counts on 50"):
        mixture.rows({**ROWS, "a": ROWS["c"], "c": ROWS["a"]})
    with pytest.raises(IndexError, match="index=1120"):
        mixture.rows(ROWS)[1120]
    with pytest.raises(IndexError, match="step=-1"):
        mixture[-1]
    with pytest.raises(IndexError, match="step=-1"):
        mixture.counts(-1)
