import fractions
import json
import math
import pathlib

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dataeff_jax import schedules

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"
CURRICULUM = json.loads((GOLDEN / "curriculum_scheduler.json").read_text())
RANDOM_LTD = json.loads((GOLDEN / "random_ltd_scheduler.json").read_text())

LINEAR = schedules.fixed_linear_schedule
ROOT = schedules.fixed_root_schedule
DISCRETE = schedules.fixed_discrete_schedule

SHAPES = {
    "linear": LINEAR,
    "root": ROOT,
    "sine": schedules.sine_schedule,
    "cosine": schedules.cosine_schedule,
    "exponential": schedules.exponential_schedule,
    "logarithmic": schedules.logarithmic_schedule,
    "stairs": lambda low, **kw: schedules.stepwise_schedule(low, num_stages=3, **kw),
}
CYCLIC = {
    "cyclic": lambda low, **kw: schedules.cyclic_schedule(low, num_cycles=3, **kw)
}


def from_deepspeed(config):
    kind, details = config["schedule_type"], config["schedule_config"]
    if kind == "fixed_discrete":
        return DISCRETE(details["difficulty"], boundaries=details["max_step"])
    return ROOT(
        config["min_difficulty"],
        max_difficulty=config["max_difficulty"],
        total=details["total_curriculum_step"],
        difficulty_step=details["difficulty_step"],
        root_degree=details.get("root_degree", 1),
        mode="deepspeed",
    )


@pytest.mark.parametrize("name", CURRICULUM["cases"])
def test_deepspeed_mode_has_the_recorded_difficulties(name):
    case = CURRICULUM["cases"][name]
    pacing = from_deepspeed(case["config"])
    for column in ("get_difficulty", "update_difficulty"):
        for step, want in zip(case["steps"], case[column], strict=True):
            if want is not None:
                assert (step, pacing(step)) == (step, want)


@pytest.mark.parametrize("name", CURRICULUM["errors"])
def test_what_the_original_refuses_is_refused_with_a_reason(name):
    case = CURRICULUM["errors"][name]
    config = case["config"]
    if name == "unknown_type":
        return  # our kinds are functions: there is no name to get wrong
    if name == "missing_total":
        with pytest.raises(TypeError, match="total"):
            LINEAR(1, max_difficulty=2, difficulty_step=8)
    elif "result" in case:
        assert from_deepspeed(config)(-1) == case["result"]
    elif name == "root2_negative_step":
        with pytest.raises(ValueError, match="clock=-1"):
            from_deepspeed(config)(-1)
    else:
        with pytest.raises(ValueError, match=r"difficult|total"):
            from_deepspeed(config)


@pytest.mark.parametrize("name", RANDOM_LTD["cases"])
def test_deepspeed_random_ltd_mode_has_the_recorded_lengths_and_counts(name):
    case = RANDOM_LTD["cases"][name]
    config = case["config"]
    schedule = config["random_ltd_schedule"]
    details = schedule["schedule_config"]
    pacing = LINEAR(
        schedule["min_value"],
        max_difficulty=schedule["max_value"],
        total=details["require_steps"],
        difficulty_step=details["seq_per_step"],
        mode="deepspeed_random_ltd",
    )
    layers, dropping = config["total_layer_num"], config["random_ltd_layer_num"]
    rows = case["rows_step_seq_consumed"]
    assert [pacing(step) for step, *_ in rows] == [length for _, length, _ in rows]
    last = rows[-1][0]
    if last <= 2000:
        kept = np.cumsum(pacing(np.arange(last + 1)))
        full = schedule["max_value"] * (layers - dropping)
        for step, _, consumed in rows:
            tokens = int(kept[step]) * dropping + full * (step + 1)
            assert tokens * config["global_batch_size"] == consumed


def layer_tokens(pacing, *, batch, layers, dropping, steps):
    kept = np.minimum(pacing(np.arange(steps)), pacing.max_difficulty)
    return int(batch * (dropping * kept.sum() + (layers - dropping) * steps * kept[-1]))


def test_the_published_counter_of_the_vision_recipe():
    pacing = LINEAR(
        *(32,),
        max_difficulty=197,
        total=3910,
        difficulty_step=8,
        mode="deepspeed_random_ltd",
    )
    assert pacing(3981) < 197 == pacing(3982)
    counted = layer_tokens(pacing, batch=32, layers=12, dropping=10, steps=5474)
    assert counted == 305_784_192


@pytest.mark.parametrize(
    ("layers", "micro_steps", "counted"), [(12, 1344, 2_148_032), (24, 1373, 2_147_024)]
)
def test_the_published_counters_of_the_language_recipes(layers, micro_steps, counted):
    # Two rows a micro step, two micro steps a step; all but two layers drop tokens.
    full = 1024
    pacing = LINEAR(
        *(128,),
        max_difficulty=full,
        total=400,
        difficulty_step=8,
        mode="deepspeed_random_ltd",
    )
    kept = np.minimum(pacing(np.arange(micro_steps) // 2), full)
    effective = (full * 2 + kept * (layers - 2)) // layers  # tokens of a row
    assert 2 * effective.sum() == counted


def test_published_change_points():
    rarity = ROOT(1, max_difficulty=100, total=110_000)
    for step, level in ((12, 2), (45, 3), (102, 4), (110_000, 100)):
        assert (rarity(step - 1), rarity(step)) == (level - 1, level)
    length = LINEAR(80, max_difficulty=2048, total=110_000, difficulty_step=8)
    for step, level in ((448, 88), (895, 96), (110_000, 2048)):
        assert (length(step - 1), length(step)) == (level - 8, level)
    steps = DISCRETE([1, 2, 3, 4, 5], boundaries=[2, 4, 6, 8])
    assert [steps(t) for t in range(1, 10)] == [1, 1, 2, 2, 3, 3, 4, 4, 5]
    assert not DISCRETE([4, 2], boundaries=[3]).is_monotone


@pytest.mark.parametrize("make", [LINEAR, ROOT])
def test_rounding_never_falls_below_the_minimum(make):
    pacing = make(12, max_difficulty=1008, total=100, difficulty_step=16)
    values = [pacing(t) for t in range(121)]
    assert values[0] in (12, 16)
    assert values == sorted(values)
    assert all(v % 16 == 0 or v == 12 for v in values)
    assert set(values[100:]) == {1008}


@pytest.mark.parametrize("name", SHAPES)
@hypothesis.given(
    low=st.integers(1, 300),
    span=st.integers(0, 3000),
    total=st.integers(1, 10**6),
    step=st.one_of(st.integers(1, 600), st.sampled_from([0.25, 0.5, 2.5])),
    clocks=st.lists(st.floats(-0.1, 1.2), min_size=2, max_size=8),
)
@hypothesis.settings(max_examples=25, deadline=None)
def test_strict_values_stay_in_range_never_fall_and_arrive(
    name, low, span, total, step, clocks
):
    high = low + span
    pacing = SHAPES[name](low, max_difficulty=high, total=total, difficulty_step=step)
    ordered = sorted({round(c * total) for c in clocks} | {0, total - 1, total})
    values = [pacing(t) for t in ordered]
    assert values == sorted(values)
    assert low <= values[0] <= values[-1] <= high
    assert all(v in (low, high) or v % step == 0 for v in values)
    assert pacing(total) == pacing(total + 1) == pacing(2**60) == high
    if name != "root":
        assert pacing(0) <= max(low, low // step * step)


@pytest.mark.parametrize(("make", "power"), [(LINEAR, 1), (ROOT, 2)])
@hypothesis.given(
    low=st.integers(0, 300),
    span=st.integers(1, 2000),
    total=st.integers(1, 10**6),
    step=st.integers(1, 64),
    place=st.floats(0, 1),
)
@hypothesis.settings(max_examples=60, deadline=None)
def test_a_level_begins_where_exact_arithmetic_says(
    make, power, low, span, total, step, place
):
    pacing = make(low, max_difficulty=low + span, total=total, difficulty_step=step)
    level = (low + int(place * span)) // step * step
    if level <= low:
        return
    # The first t with (level - low) / span <= (t / total) ** (1 / power).
    first = math.ceil(fractions.Fraction(level - low, span) ** power * total)
    assert pacing(first) >= level
    assert pacing(first - 1) < level


@pytest.mark.parametrize("name", [*SHAPES, *CYCLIC])
def test_traced_clocks_differ_by_one_step_at_few_clocks(name):
    make = (SHAPES | CYCLIC)[name]
    pacing = make(128, max_difficulty=2048, total=2000, difficulty_step=16)
    clocks = np.arange(0, 2200, 3)
    host = pacing(clocks)
    traced = np.asarray(jax.jit(pacing)(jnp.asarray(clocks)))
    assert host.dtype == np.int64
    assert traced.dtype == np.float32
    different = traced != host
    assert different.mean() < 0.01


@pytest.mark.parametrize("mode", ["deepspeed", "deepspeed_random_ltd"])
def test_deepspeed_modes_can_be_traced(mode):
    pacing = LINEAR(10, max_difficulty=100, total=50, difficulty_step=8, mode=mode)
    traced = jax.jit(pacing)(jnp.arange(70))
    assert np.mean(np.asarray(traced) != pacing(np.arange(70))) < 0.1
    discrete = DISCRETE([64, 128, 512], boundaries=[10, 20])
    np.testing.assert_array_equal(
        jax.jit(discrete)(jnp.arange(30)), discrete(np.arange(30))
    )
    assert float(jax.jit(discrete)(jnp.int32(11))) == 128


def test_deepspeed_mode_is_constant_from_its_total_on():
    pacing = LINEAR(
        32, max_difficulty=197, total=391, difficulty_step=8, mode="deepspeed"
    )
    assert pacing(pacing.total) == pacing(10**9) == 197


@pytest.mark.parametrize("number", [int, np.int32, np.int64, float, np.float64])
def test_numbers_give_python_numbers(number):
    value = LINEAR(2, max_difficulty=10, total=8)(number(4))
    assert (value, type(value)) == (6, int)
    value = LINEAR(0.5, max_difficulty=1, total=8, difficulty_step=0.25)(number(4))
    assert (value, type(value)) == (0.75, float)


def test_arrays_keep_their_shape():
    pacing = LINEAR(2, max_difficulty=10, total=8)
    assert pacing(np.arange(6).reshape(2, 3)).shape == (2, 3)
    assert pacing(np.zeros((0,), np.int64)).shape == (0,)
    assert pacing(np.array(4)) == 6


def test_token_clocks_beyond_31_bits_are_exact():
    total = 300 * 10**9
    pacing = LINEAR(0, max_difficulty=2000, total=total, difficulty_step=1)
    border = total // 2000 * 1234
    assert (pacing(border - 1), pacing(border)) == (1233, 1234)
    assert pacing(np.int64(border)) == 1234


def test_the_shapes_are_their_formulas():
    kw = {"max_difficulty": 1000, "total": 100, "difficulty_step": 1e-3}
    for t in (0, 13, 50, 99):
        p = t / 100
        wanted = {
            "sine": 1000 * math.sin(math.pi * p / 2),
            "cosine": 1000 - 1000 * math.cos(math.pi * p / 2),
            "logarithmic": 1000 * math.log(1 + (math.e - 1) * p),
            "stairs": 1000 * math.floor(3 * p) / 3,
        }
        for name, want in wanted.items():
            got = SHAPES[name](0, **kw)(t)
            assert want - 1e-3 - 1e-9 <= got <= want + 1e-9
        got = schedules.exponential_schedule(8, **kw)(t)
        assert got == pytest.approx(8 * 125**p, abs=1e-3)


def test_cycles_fall_and_the_last_one_arrives():
    pacing = schedules.cyclic_schedule(0, max_difficulty=9, total=30, num_cycles=3)
    assert [pacing(t) for t in range(30)] == [9 * (t % 10) // 10 for t in range(30)]
    assert pacing(30) == 9
    assert not pacing.is_monotone


def test_doublings_have_equal_times():
    pacing = schedules.power_of_two_schedule(8, max_difficulty=64, total=30)
    assert [pacing(t) for t in (0, 9, 10, 19, 20, 29, 30)] == [8, 8, 16, 16, 32, 32, 64]
    one = schedules.power_of_two_schedule(8, max_difficulty=8, total=30)
    assert one(0) == one(30) == 8


def test_durations_may_be_fractions_of_a_run():
    pacing = LINEAR(0, max_difficulty=10, total=0.5, run_total=200)
    assert (pacing.total, pacing(50), pacing(100)) == (100, 5, 10)
    pacing = DISCRETE([1, 2, 3], boundaries=[0.1, 0.5], run_total=100)
    assert [pacing(t) for t in (10, 11, 50, 51)] == [1, 2, 2, 3]


def test_a_function_is_rounded_and_kept_in_range():
    pacing = schedules.function_schedule(
        lambda t: 100 - t, min_difficulty=10, max_difficulty=90, difficulty_step=8
    )
    assert [pacing(t) for t in (0, 11, 30, 95)] == [90, 88, 64, 10]
    assert pacing.total is None
    np.testing.assert_array_equal(jax.jit(pacing)(jnp.arange(3)), [90, 90, 90])
    ends = schedules.function_schedule(
        lambda t: 0, min_difficulty=1, max_difficulty=4, total=3
    )
    assert [ends(t) for t in range(4)] == [1, 1, 1, 4]
    nan = schedules.function_schedule(
        lambda t: math.nan, min_difficulty=1, max_difficulty=4
    )
    with pytest.raises(ValueError, match="difficulty=nan must be finite"):
        nan(0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LINEAR(8, max_difficulty=4, total=10), "max_difficulty=4"),
        (lambda: LINEAR(8, max_difficulty=9, total=0), "total=0"),
        (lambda: LINEAR(8, max_difficulty=9, total=-1), "duration of -1"),
        (lambda: LINEAR(8, max_difficulty=9, total=0.5), "pass run_total"),
        (lambda: LINEAR(8, max_difficulty=9, total=True), "True"),
        (lambda: LINEAR("8", max_difficulty=9, total=1), "min_difficulty='8'"),
        (lambda: LINEAR(8, max_difficulty=math.nan, total=1), "max_difficulty=nan"),
        (
            lambda: LINEAR(8, max_difficulty=9, total=1, difficulty_step=0),
            "difficulty_step=0",
        ),
        (lambda: LINEAR(8, max_difficulty=9, total=1, mode="x"), "mode='x'"),
        (lambda: ROOT(8, max_difficulty=9, total=1, root_degree=0), "root_degree=0"),
        (lambda: DISCRETE([1, 2], boundaries=[5, 10]), "2 difficulties need 1"),
        (lambda: DISCRETE([1, 2, 3], boundaries=[5, 5]), "must rise"),
        (lambda: DISCRETE([], boundaries=[]), "0 difficulties"),
        (
            lambda: schedules.exponential_schedule(0, max_difficulty=9, total=1),
            "min_difficulty=0",
        ),
        (
            lambda: schedules.power_of_two_schedule(8, max_difficulty=24, total=1),
            "the nearest: 32",
        ),
        (
            lambda: schedules.stepwise_schedule(
                8, max_difficulty=9, total=1, num_stages=0
            ),
            "num_stages=0",
        ),
        (
            lambda: schedules.cyclic_schedule(
                8, max_difficulty=9, total=1, num_cycles=1.5
            ),
            r"num_cycles=1\.5",
        ),
        (
            lambda: schedules.function_schedule(3, min_difficulty=0, max_difficulty=1),
            "function=3",
        ),
    ],
)
def test_bad_arguments_are_told_when_built(make, message):
    with pytest.raises(ValueError, match=message):
        make()
