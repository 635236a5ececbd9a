import itertools
import json
import pathlib
import pickle
import re

import numpy as np
import pytest

from dataeff_jax import curriculum, data, schedules

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "phases.md"
LINEAR = schedules.fixed_linear_schedule


def test_the_page_prints_what_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S))
    exec(code, {})
    printed = capsys.readouterr().out.splitlines()
    told = re.findall(r"^(?:\s*print\(.*\)  |)# ([\[U].*)$", code, re.M)
    assert printed == told


class Values:
    def __init__(self, values):
        self.values = [int(v) for v in values]

    def __call__(self, record):
        return self.values[record["row"]]


ROWS = data.MemorySource({"row": np.arange(60)})


def order_by(values, directory, *, seed, low=20, **kwargs):
    metric = curriculum.function_metric(Values(values), name="d", dtype="int64")
    index = curriculum.analyze(ROWS, [metric], directory)
    criterion = curriculum.Criterion(LINEAR(low, max_difficulty=100, total=30))
    kwargs = {"batch_size": 6} | kwargs
    return curriculum.SampleOrder(index, {"d": criterion}, seed=seed, **kwargs)


@pytest.fixture
def orders(tmp_path):
    return [
        order_by(np.arange(60), tmp_path / "up", seed=0),
        order_by(-np.arange(60), tmp_path / "down", seed=1, step_offset=21),
        order_by(np.arange(60) % 7, tmp_path / "other", seed=2),
    ]


def test_each_step_is_drawn_from_its_phase(orders):
    order = curriculum.PhasedOrder(list(zip((0, 20, 50), orders, strict=True)))
    for phase, (start, stop) in enumerate(((0, 20), (20, 50), (50, 200))):
        for step in (start, start + 1, stop - 1):
            own = orders[phase]
            assert order[step].tolist() == own[step - start].tolist()
            assert order.difficulties(step) == own.difficulties(step - start)
            assert order.num_eligible(step) == own.num_eligible(step - start)
    # Equally many are eligible on both sides of a cut where the pacing goes on.
    assert order.num_eligible(20) == orders[0].num_eligible(20)
    assert order[19].max() < 40 < order[20].min() + 40


def test_a_phased_order_gives_batches_for_any_hosts_and_pickles(orders):
    order = curriculum.PhasedOrder([(0, orders[0]), (20, orders[1])])
    again = pickle.loads(pickle.dumps(order))
    halves = [
        curriculum.batches(ROWS, again, process_index=h, process_count=2)
        for h in range(2)
    ]
    reader = data.prefetch(curriculum.batches(ROWS, order), buffer_size=16)
    for step in range(30):
        batch = next(reader)
        assert batch["sample_id"].tolist() == order[step].tolist()
        assert set(batch["difficulty_d"]) == {order.difficulties(step)["d"]}
        joined = np.concatenate([half[step]["row"] for half in halves])
        assert joined.tolist() == order[step].tolist()
    reader.close()


def test_a_run_goes_on_with_the_phases_it_was_drawn_from_only(orders):
    first, second, third = orders
    begun = curriculum.PhasedOrder([(0, first)])
    planned = curriculum.PhasedOrder([(0, first), (20, second)])
    other = curriculum.PhasedOrder([(0, first), (20, third)])
    early, late = begun.state(20), json.loads(json.dumps(planned.state(21)))
    assert len(json.dumps(late)) < 200
    # Before its first step is drawn, a phase may still be declared, or another one.
    for order in (begun, planned, other):
        assert order.resume(early) == 20
    assert planned.resume(late) == 21
    moved = curriculum.PhasedOrder([(0, first), (19, second)])
    for order in (begun, other, moved):
        with pytest.raises(ValueError, match=r"Up to step 21 .* another order"):
            order.resume(late)
    assert len({o.fingerprint for o in (begun, planned, other, moved)}) == 4


def test_a_plain_order_refuses_the_state_of_another(orders):
    first, second, _ = orders
    assert first.resume(first.state(7)) == 7
    with pytest.raises(ValueError, match=r"index, criteria, *seed"):
        second.resume(first.state(7))
    with pytest.raises(ValueError, match=r"lacks \['order'\]; it has \['step'\]"):
        first.resume({"step": 3})


@pytest.mark.parametrize("draw", ["stratified", "parity", "iid"])
def test_falling_difficulties_admit_what_they_say_at_every_step(tmp_path, draw):
    values = np.random.default_rng(0).integers(0, 50, (2, 60))
    metrics = [
        curriculum.function_metric(Values(v), name=f"d{i}", dtype="int64")
        for i, v in enumerate(values)
    ]
    index = curriculum.analyze(ROWS, metrics, tmp_path / "index")
    cycles = schedules.cyclic_schedule(20, max_difficulty=50, total=40, num_cycles=3)
    criteria = {
        "d0": curriculum.Criterion(cycles, "value"),
        "d1": curriculum.Criterion(LINEAR(25, max_difficulty=49, total=60), "value"),
    }
    make = {"batch_size": 6, "seed": 0, "draw": draw}
    with pytest.raises(ValueError, match=r"falls.*PhasedOrder.at_falls"):
        curriculum.SampleOrder(index, criteria, **make)
    order = curriculum.PhasedOrder.at_falls(index, criteria, **make)
    for step in range(80):
        told = {name: c.schedule(step + 1) for name, c in criteria.items()}
        pool = (values[0] <= told["d0"]) & (values[1] <= told["d1"])
        assert order.difficulties(step) == told
        assert order.num_eligible(step) == pool.sum()
        assert pool[order[step]].all()
    again = curriculum.PhasedOrder.at_falls(index, criteria, **make)
    assert again.fingerprint == order.fingerprint
    assert again[70].tolist() == order[70].tolist()


def test_without_a_fall_there_is_one_phase(orders):
    criterion = curriculum.Criterion(LINEAR(20, max_difficulty=100, total=30))
    index = orders[0]._settings[0]
    order = curriculum.PhasedOrder.at_falls(
        index, {"d": criterion}, batch_size=6, seed=0
    )
    for step in (*range(40), 10**6):
        assert order[step].tolist() == orders[0][step].tolist()


def test_orders_that_do_not_fit_together_are_refused(orders, tmp_path):
    first, second, _ = orders
    larger = order_by(np.arange(60), tmp_path / "up", seed=5, batch_size=12)
    for phases, message in [
        ([], r"begin at \[\]"),
        ([(1, first)], "must begin at 0"),
        ([(0, first), (0, second)], "later than the one before"),
        ([(0, first), (9, larger)], r"batch_size \[6, 12\]"),
        ([(0, first), (9, first)], r"seeds \[0, 0\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            curriculum.PhasedOrder(phases)
    order = curriculum.PhasedOrder([(0, first)])
    with pytest.raises(IndexError, match="step=-1"):
        order[-1]


def test_a_phase_with_an_empty_pool_is_named(orders):
    index = orders[0]._settings[0]
    values = itertools.chain([30, 40], itertools.repeat(-1))
    told = dict(zip(range(10), values, strict=False))
    criteria = {"d": curriculum.Criterion(told.__getitem__, "value")}
    with pytest.raises(ValueError, match="Phase 1, from step 2: No sample"):
        curriculum.PhasedOrder.at_falls(
            index, criteria, batch_size=6, seed=0, step_offset=0, num_steps=9
        )
