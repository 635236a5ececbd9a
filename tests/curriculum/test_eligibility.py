import itertools
import json
import pathlib

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from dataeff_jax import curriculum, schedules
from dataeff_jax.curriculum import _eligibility, _sorting

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"
CLUSTERS = json.loads((GOLDEN / "data_sampler_clusters.json").read_text())
LINEAR = schedules.fixed_linear_schedule


def clusters_of(metrics, criteria, *, step_offset=1, num_steps=None):
    """The first step and the samples of each cluster, and the stages."""
    stages = _eligibility.make_stages(
        criteria, step_offset=step_offset, num_steps=num_steps
    )
    num_samples = len(next(iter(metrics.values())))
    tau = np.zeros(num_samples, np.uint16)
    for name, criterion in criteria.items():
        values = np.asarray(metrics[name])
        order = np.argsort(values, kind="stable")
        _eligibility.raise_tau(tau, criterion, stages.difficulties[name], values, order)
    out = np.zeros(num_samples, np.int64)
    sizes = _sorting.group_samples(
        lambda piece: tau[piece], num_samples, len(stages.starts), out
    )
    edges = np.concatenate([[0], np.cumsum(sizes)])
    pairs = itertools.pairwise(edges)
    return stages, [out[low:high].tolist() for low, high in pairs]


def from_deepspeed(config):
    kind = {"percentile": "deepspeed_percentile"}
    details = config["schedule_config"]
    pacing = schedules.fixed_root_schedule(
        config["min_difficulty"],
        max_difficulty=config["max_difficulty"],
        total=details["total_curriculum_step"],
        difficulty_step=details["difficulty_step"],
        root_degree=details.get("root_degree", 1),
        mode="deepspeed",
    )
    difficulty_type = config["difficulty_type"]
    return curriculum.Criterion(pacing, kind.get(difficulty_type, difficulty_type))


@pytest.mark.parametrize("name", CLUSTERS["cases"])
def test_clusters_are_the_recorded_ones(name):
    case = CLUSTERS["cases"][name]
    metrics = {"a": CLUSTERS["metric_a"], "b": CLUSTERS["metric_b"]}
    criteria = {m: from_deepspeed(c) for m, c in case["metrics"].items()}
    stages, clusters = clusters_of(metrics, criteria)
    for row in case["steps"]:
        step = row["step"] - 1  # the original counts from 1
        stage = np.searchsorted(stages.starts, step, side="right") - 1
        for metric, difficulty in row["difficulties"].items():
            assert stages.difficulties[metric][stage] == difficulty
        if stages.starts[stage] == step:
            want = [s for cluster in row["new_cluster"] or [] for s in cluster]
            assert clusters[stage] == sorted(want)
        else:
            assert not row["new_cluster"]


def reference_clusters(metrics, criteria, num_steps):
    """The set algebra: intersect what each metric admits, take away what was there."""
    seen, found = set(), {}
    for step in range(num_steps):
        admitted = None
        for name, criterion in criteria.items():
            values = np.asarray(metrics[name])
            difficulty = criterion.schedule(step + 1)
            if criterion.difficulty_type == "value":
                samples = {i for i, v in enumerate(values) if v <= difficulty}
            else:
                rank = np.argsort(values, kind="stable")
                count = max(1, -int(-difficulty * len(values) // 100))
                samples = set(rank[:count].tolist())
            admitted = samples if admitted is None else admitted & samples
        new = (admitted or set()) - seen
        if new:
            found[step] = sorted(new)
        seen |= new
    return found


@hypothesis.given(
    data=st.data(),
    num_samples=st.integers(1, 40),
    kinds=st.lists(st.sampled_from(["value", "percentile"]), min_size=1, max_size=3),
)
@hypothesis.settings(max_examples=60, deadline=None)
def test_clusters_equal_the_set_algebra(data, num_samples, kinds):
    metrics, criteria = {}, {}
    for number, kind in enumerate(kinds):
        values = st.lists(
            st.integers(0, 12), min_size=num_samples, max_size=num_samples
        )
        metrics[str(number)] = data.draw(values)
        top = 12 if kind == "value" else 100
        pacing = LINEAR(
            data.draw(st.integers(0, top)),
            max_difficulty=data.draw(st.just(top)),
            total=data.draw(st.integers(1, 30)),
            difficulty_step=data.draw(st.integers(1, 20)),
        )
        criteria[str(number)] = curriculum.Criterion(pacing, kind)
    stages, clusters = clusters_of(metrics, criteria)
    got = {
        int(start): cluster
        for start, cluster in zip(stages.starts, clusters, strict=True)
        if cluster
    }
    assert got == reference_clusters(metrics, criteria, 40)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_the_order_does_not_depend_on_the_chunks(chunk, monkeypatch):
    rng = np.random.default_rng(0)
    metrics = {"a": rng.integers(0, 9, 50), "b": rng.random(50)}
    criteria = {
        "a": curriculum.Criterion(LINEAR(0, max_difficulty=8, total=9), "value"),
        "b": curriculum.Criterion(LINEAR(1, max_difficulty=100, total=20)),
    }
    want = clusters_of(metrics, criteria)[1]
    monkeypatch.setattr(_eligibility, "_CHUNK", chunk)
    monkeypatch.setattr(_sorting, "IN_MEMORY", 4 * chunk)
    assert clusters_of(metrics, criteria)[1] == want


@pytest.mark.parametrize("num_samples", [1, 2, 3, 5])
def test_percentile_edges(num_samples):
    count = curriculum.percentile_count
    assert count(0, num_samples) == count(0.0001, num_samples) == 1
    assert count(50, num_samples) == {1: 1, 2: 1, 3: 2, 5: 3}[num_samples]
    assert count(100, num_samples) == num_samples


@pytest.mark.parametrize("bad", [-1, 101, float("nan"), "50", None, True])
def test_what_is_no_percentile_is_refused(bad):
    with pytest.raises(ValueError, match=r"percentile=.* from 0 to 100"):
        curriculum.percentile_count(bad, 10)


def test_percentiles_count_decimals_as_written():
    # 1.1 / 100 * 1000 is 11.000000000000002 in float64.
    assert curriculum.percentile_count(1.1, 1000) == 11
    assert curriculum.percentile_count(np.float64(0.1), 1000) == 1


def test_equal_values_are_admitted_by_rank_or_all_by_value():
    values = np.array([3.0] * 60 + [5.0] * 30 + [9.0] * 10)
    order = np.argsort(values, kind="stable")
    by_rank = curriculum.Criterion(LINEAR(1, max_difficulty=100, total=100))
    percentiles = (1, 50, 61, 95, 100)
    assert [by_rank.count(p, values, order) for p in percentiles] == [*percentiles]
    by_value = curriculum.Criterion(LINEAR(3, max_difficulty=9, total=10), "value")
    assert [by_value.count(v, values, order) for v in (3, 3, 5, 9, 9)] == [
        *(60, 60, 90, 100, 100)
    ]
    assert by_value.count(2.9, values, order) == 0


def test_units_of_the_original_end_on_all_samples():
    criterion = curriculum.Criterion(
        LINEAR(1, max_difficulty=50, total=10), "deepspeed_percentile"
    )
    values = np.arange(107)
    assert [criterion.count(d, values, values) for d in (1, 49, 50)] == [2, 98, 107]


def test_stages_of_a_monotone_schedule_are_those_of_every_step():
    pacing = LINEAR(80, max_difficulty=2048, total=1100, difficulty_step=8)
    slow = schedules.function_schedule(
        pacing, min_difficulty=80, max_difficulty=2048, total=1100
    )
    tables = [
        _eligibility.make_stages(
            {"m": curriculum.Criterion(schedule, "value")},
            step_offset=offset,
            num_steps=None,
        )
        for schedule in (pacing, slow)
        for offset in (0, 1)
    ]
    for fast, dense in zip(tables[:2], tables[2:], strict=True):
        np.testing.assert_array_equal(fast.starts, dense.starts)
        assert fast.difficulties == dense.difficulties
    # Step t has the difficulty of the clock t + offset.
    np.testing.assert_array_equal(tables[1].starts[1:], tables[0].starts[1:] - 1)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            schedules.cyclic_schedule(0, max_difficulty=9, total=30, num_cycles=2),
            "falls from 8 to 0 at step",
        ),
        (lambda t: t, "pass num_steps"),
        (LINEAR(0, max_difficulty=9999, total=10**6), "larger difficulty_step"),
    ],
)
def test_schedules_that_make_no_stages_are_refused(schedule, message):
    criteria = {"m": curriculum.Criterion(schedule, "value")}
    with pytest.raises(ValueError, match=message):
        _eligibility.make_stages(criteria, step_offset=1, num_steps=None)


def test_any_function_makes_stages_up_to_a_step():
    criteria = {"m": curriculum.Criterion(lambda t: t // 3, "value")}
    stages = _eligibility.make_stages(criteria, step_offset=1, num_steps=7)
    assert stages.starts.tolist() == [0, 2, 5]
    assert stages.difficulties == {"m": [0, 1, 2]}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: curriculum.Criterion(3), "schedule=3"),
        (lambda: curriculum.Criterion(abs, "rank"), "difficulty_type='rank'"),
        (
            lambda: curriculum.Criterion(LINEAR(0, max_difficulty=101, total=9)),
            "percentile=101",
        ),
        (
            lambda: curriculum.Criterion(abs, "deepspeed_percentile"),
            "needs a schedule with a max_difficulty",
        ),
    ],
)
def test_bad_criteria_are_told_when_built(make, message):
    with pytest.raises(ValueError, match=message):
        make()
