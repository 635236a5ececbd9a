import pickle

import numpy as np
import pytest

from dataeff_jax import curriculum, data, schedules
from dataeff_jax.curriculum import _token_budget

BUCKETS = (8, 16, 32, 64)
ORDERS = ("dataloader", "random", "length", "bucketed")
LENGTHS = np.random.default_rng(0).integers(1, 65, 500)


def make(lengths=LENGTHS, **kw):
    kw = {"max_tokens": 256, "buckets": BUCKETS} | kw
    return curriculum.TokenBudget(lengths, **kw)


def epoch_of(budget, epoch):
    """The batches of an epoch."""
    first = sum(budget.num_steps(e) for e in range(epoch))
    return [budget[first + i] for i in range(budget.num_steps(epoch))]


def cut_by_hand(lengths, max_tokens, buckets, multiple=1, max_rows=10**9):
    """The rule, told over: try every longer batch, [(samples, rows, length)]."""
    result, start = [], 0
    while start < len(lengths):
        for end in range(start + 1, len(lengths) + 1):
            longest = max(lengths[start:end])
            length = min(b for b in buckets if b >= longest)
            rows = min(max_tokens // length, max_rows) // multiple * multiple
            if end - start > rows:
                break
            best = list(range(start, end)), rows, length
        result.append(best)
        start += len(best[0])
    return result


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("multiple", "max_rows"), [(1, 10**9), (2, 13)])
def test_batches_are_those_of_the_rule(seed, multiple, max_rows):
    lengths = np.random.default_rng(seed).integers(1, 65, 60)
    budget = make(lengths, order="dataloader", row_multiple=multiple, max_rows=max_rows)
    want = cut_by_hand(lengths.tolist(), 256, BUCKETS, multiple, max_rows)
    assert budget.num_steps(0) == len(want)
    for step, (samples, rows, length) in enumerate(want):
        assert budget[step].tolist() == samples + [-1] * (rows - len(samples))
        assert budget.length_at(step) == length


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("multiple", [1, 4])
def test_every_sample_comes_once_an_epoch_and_budgets_are_kept(order, multiple):
    budget = make(order=order, row_multiple=multiple, min_rows=4, max_rows=20)
    step = 0
    for epoch in range(3):
        batches = epoch_of(budget, epoch)
        samples = np.concatenate(batches)
        assert sorted(samples[samples >= 0].tolist()) == list(range(500))
        for batch in batches:
            length, real = budget.length_at(step), batch[batch >= 0]
            assert budget.epoch_at(step) == epoch
            assert (len(batch), length) in budget.shapes
            assert len(batch) * length <= 256
            assert len(batch) % multiple == 0
            assert len(batch) <= 20
            assert LENGTHS[real].max() <= length
            step += 1
        assert sorted((batch >= 0).sum() for batch in batches)[1] >= 4


def test_the_shapes_are_told_beforehand_one_for_each_bucket():
    assert make().shapes == ((32, 8), (16, 16), (8, 32), (4, 64))
    assert make([3, 60, 5]).shapes == ((32, 8), (4, 64))
    buckets = schedules.length_buckets(8, max_length=64, multiple=8, max_count=3)
    budget = make(buckets=buckets)
    assert len(budget.shapes) == 3
    found = {(len(budget[t]), budget.length_at(t)) for t in range(budget.num_steps(0))}
    assert found <= set(budget.shapes)


@pytest.mark.parametrize("order", ["random", "bucketed"])
def test_a_random_order_is_another_in_each_epoch_and_for_each_seed(order):
    def flat(seed, epoch):
        budget = make(seed=seed, order=order)
        return np.concatenate(epoch_of(budget, epoch)).tolist()

    assert flat(0, 0) == flat(0, 0)
    assert len({tuple(flat(s, e)) for s in (0, 1) for e in (0, 1)}) == 4


def test_an_order_by_length_pads_least():
    padded = {}
    for order in ORDERS:
        budget = make(order=order)
        steps = range(budget.num_steps(0))
        computed = sum(len(budget[t]) * budget.length_at(t) for t in steps)
        padded[order] = computed - LENGTHS.sum()
    assert padded["length"] < padded["random"]
    assert padded["length"] < padded["dataloader"]
    lengths = np.concatenate(epoch_of(make(order="length"), 0))
    assert (np.diff(LENGTHS[lengths[lengths >= 0]]) >= 0).all()


def test_buckets_in_random_order_pad_little_and_have_as_many_batches_in_each_epoch():
    plain, bucketed = make(order="random"), make()
    computed = {}
    for budget in (plain, bucketed):
        steps = range(budget.num_steps(0))
        sizes = [len(budget[t]) * budget.length_at(t) for t in steps]
        computed[budget] = sum(sizes)
    assert computed[bucketed] < 0.85 * computed[plain]
    epochs = [epoch_of(bucketed, epoch) for epoch in range(3)]
    assert len({len(batches) for batches in epochs}) == 1
    groups = [{frozenset(batch.tolist()) for batch in batches} for batches in epochs]
    assert groups[0] != groups[1], "other samples come together"
    lengths = [bucketed.length_at(t) for t in range(len(epochs[0]))]
    assert lengths != sorted(lengths)
    assert bucketed.epoch_at(10**12) == 10**12 // len(epochs[0])
    assert bucketed[10**12].tolist() == make(order="bucketed")[10**12].tolist()


@pytest.mark.parametrize("order", ORDERS)
def test_any_step_is_the_same_in_whatever_order_it_is_asked_for(order):
    budget = make(order=order)
    steps = sum(budget.num_steps(epoch) for epoch in range(3)) + 3
    want = [budget[step].tolist() for step in range(steps)]
    for step in (steps - 1, 0, steps // 2, 7):
        again = make(order=order)
        assert again[step].tolist() == want[step]
        assert again.fingerprint == budget.fingerprint
        sent = pickle.loads(pickle.dumps(budget))
        assert sent[step].tolist() == want[step]
    with pytest.raises(IndexError, match="step=-1"):
        budget[-1]


@pytest.mark.parametrize("size", [1000, 2000, 4000])
def test_one_pass_looks_at_every_sample_once(size):
    looked = []

    def levels():
        for level in np.random.default_rng(0).integers(0, 4, size).tolist():
            looked.append(level)
            yield level

    starts = list(_token_budget._cut(levels(), [32, 16, 8, 4]))
    assert len(looked) == size
    assert starts[0] == 0


def test_the_last_sample_is_not_lost_where_the_original_loses_it():
    # Ten samples of 10, at most 30 tokens: the original makes 3 batches of 9 samples.
    budget = make([10] * 10, max_tokens=30, buckets=(10,), order="dataloader")
    batches = epoch_of(budget, 0)
    assert [b.tolist() for b in batches] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
        [9, -1, -1],
    ]


# Learning rate


def test_learning_rates_scale_with_rows_or_tokens():
    budget = make([4, 4, 8, 64, 3], order="dataloader")
    assert [budget[t].tolist() for t in range(2)] == [[0, 1, 2, 3], [4] + [-1] * 31]
    scale = budget.learning_rate_scale
    assert scale(0, reference=2) == 4 / 2
    assert scale(1, reference=2) == 1 / 2
    assert scale(0, reference=16, method="sqrt") == 0.5
    assert scale(0, reference=160, unit="tokens") == (4 + 4 + 8 + 64) / 160
    assert scale(1, reference=12, unit="tokens", method="sqrt") == 0.5
    assert scale(0, reference=2, method="none") == 1
    cut = make([9, 9], buckets=(4,), too_long="truncate")
    assert cut.learning_rate_scale(0, reference=8, unit="tokens") == 1
    for kw in ({"method": "cubic"}, {"unit": "words"}, {"reference": 0}):
        with pytest.raises(ValueError, match="must be"):
            scale(0, **{"reference": 1, **kw})


# Batches


class Ragged:
    """Rows of their own length."""

    def __len__(self):
        return 500

    def __getitem__(self, index):
        tokens = np.arange(1, LENGTHS[index] + 1)
        return {"tokens": tokens, "targets": tokens + 1, "kind": np.int64(index % 3)}


class Full(Ragged):
    """The same rows, filled up to 64."""

    def __getitem__(self, index):
        record = super().__getitem__(index)
        tail = (0, 64 - LENGTHS[index])
        weights = np.pad(np.ones(LENGTHS[index], np.float32), tail)
        fields = {name: np.pad(record[name], tail) for name in ("tokens", "targets")}
        return {**fields, "kind": record["kind"], "weights": weights}


@pytest.mark.parametrize("order", ORDERS)
def test_batches_have_the_samples_and_what_is_padded_weighs_nothing(order):
    budget = make(order=order)
    steps, full = budget.batches(Ragged()), budget.batches(Full())
    seen = 0
    for step in range(budget.num_steps(0)):
        batch, samples = steps[step], budget[step]
        assert batch["sample_id"].tolist() == samples.tolist()
        assert batch["tokens"].shape == (len(samples), budget.length_at(step))
        assert set(batch["length"]) == {budget.length_at(step)}
        assert set(batch["step"]) == {step}
        for name in batch:
            np.testing.assert_array_equal(batch[name], full[step][name])
        wanted = np.where(samples >= 0, LENGTHS[samples], 0)
        np.testing.assert_array_equal(batch["weights"].sum(1), wanted)
        real = samples >= 0
        assert (batch["kind"][real] == samples[real] % 3).all()
        weighed = batch["weights"] > 0
        assert (batch["targets"] == batch["tokens"] + 1)[weighed].all()
        seen += int(batch["weights"].sum())
    assert seen == LENGTHS.sum()


@pytest.mark.parametrize("num_hosts", [1, 2, 4])
def test_hosts_hold_slices_of_the_same_batch(num_hosts):
    budget = make(row_multiple=4)
    hosts = [
        budget.batches(Ragged(), process_index=h, process_count=num_hosts)
        for h in range(num_hosts)
    ]
    one = budget.batches(Ragged())
    for step in (0, 5, budget.num_steps(0) - 1, budget.num_steps(0)):
        for name, want in one[step].items():
            parts = np.concatenate([host[step][name] for host in hosts])
            np.testing.assert_array_equal(parts, want)


def test_it_goes_on_at_a_step_and_transforms_records(tmp_path):
    documents = data.TokenDocuments([[1] * (n - 1) for n in LENGTHS], end_of_text=0)
    rows = curriculum.DocumentRows(documents, length=64)
    metric = curriculum.sequence_length(mask_field="segment_ids")
    index = curriculum.analyze(rows, [metric], tmp_path / "index")
    budget = make(index.values("sequence_length"))

    def told(record, step):
        return {**record, "twice": np.int64(2 * step)}

    steps = budget.batches(rows, transform=told)
    iterator = data.prefetch(steps, start_step=50)
    batch = next(iterator)
    iterator.close()
    assert set(batch["step"]) == {50}
    assert set(batch["twice"]) == {100}
    assert batch["sample_id"].tolist() == budget[50].tolist()
    counted = batch["weights"].sum(1)
    real = budget[50] >= 0
    np.testing.assert_array_equal(counted[real], LENGTHS[budget[50][real]])


# Errors


@pytest.mark.parametrize(
    ("kw", "message"),
    [
        ({"lengths": []}, "row_lengths must be integers"),
        ({"lengths": [1.5]}, "row_lengths must be integers"),
        ({"lengths": [3, 0, 5]}, "at least 1; sample 1 has 0"),
        ({"lengths": [3, 65, 70]}, "2 of 3 samples are longer .* 65 of sample 1"),
        ({"lengths": [65], "too_long": "drop"}, "All samples are longer"),
        ({"too_long": "keep"}, "too_long='keep'"),
        ({"order": "seqlen"}, "order='seqlen' must be one of dataloader"),
        ({"seed": -1}, "seed=-1"),
        ({"min_rows": 0}, "min_rows=0"),
        ({"row_multiple": 0}, "row_multiple=0"),
        ({"min_rows": 5}, "leave 4 rows of 64 tokens; at least 5"),
        ({"max_tokens": 63}, "max_tokens=63, .* leave 0 rows of 64 tokens"),
        ({"row_multiple": 5}, "leave 0 rows of 64 tokens; at least 5"),
        ({"max_rows": 3, "min_rows": 4}, "leave 3 rows of 8 tokens"),
        ({"buckets": (8, 8)}, "must rise"),
        ({"buckets": ()}, "must be integers"),
    ],
)
def test_bad_settings_are_told_when_built(kw, message):
    kw = {"lengths": LENGTHS} | kw
    with pytest.raises(ValueError, match=message):
        make(kw.pop("lengths"), **kw)


def test_samples_that_are_too_long_are_left_out_or_cut_where_that_is_said():
    lengths = [5, 70, 9]
    dropped = make(lengths, too_long="drop", order="dataloader")
    assert dropped[0][:3].tolist() == [0, 2, -1]
    assert dropped.samples.tolist() == [0, 2]
    cut = make(lengths, too_long="truncate", order="dataloader")
    assert cut[0].tolist() == [0, 1, 2, -1]
    assert cut.length_at(0) == 64


def test_rows_and_processes_that_do_not_fit_are_told():
    with pytest.raises(ValueError, match="500 row_lengths, but 2 rows"):
        make().batches([1, 2])
    with pytest.raises(ValueError, match="32 rows do not divide by process_count=3"):
        make().batches(Ragged(), process_count=3)
    with pytest.raises(ValueError, match="process_index=2"):
        make().batches(Ragged(), process_count=2, process_index=2)
