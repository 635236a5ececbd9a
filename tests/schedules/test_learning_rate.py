import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dataeff_jax import schedules

COSINE = schedules.warmup_cosine_schedule
LINEAR = schedules.warmup_linear_schedule
CONSTANT = schedules.warmup_constant_schedule
INVERSE_SQRT = schedules.warmup_inverse_sqrt_schedule

ALL = [
    COSINE(3e-4, warmup=100, total=1000),
    COSINE(3e-4, warmup=0, total=1000, final_ratio=0.0),
    LINEAR(3e-4, warmup=100, total=1000),
    CONSTANT(3e-4, warmup=100),
    INVERSE_SQRT(3e-4, warmup=100),
]


@pytest.mark.parametrize("clock", [0, 50, 100, 101, 550, 999, 1000, 5000])
def test_the_cosine_equals_its_formula(clock):
    schedule = COSINE(2.0, warmup=100, total=1000, final_ratio=0.25)
    if clock < 100:
        want = 2.0 * clock / 100
    else:
        done = min((clock - 100) / 900, 1)
        want = 2.0 * (0.25 + 0.75 * (1 + math.cos(math.pi * done)) / 2)
    assert schedule(clock) == pytest.approx(want, rel=1e-15)


def test_the_rate_follows_tokens_when_their_number_a_step_changes():
    schedule = LINEAR(1.0, warmup=1_000, total=21_000)
    tokens = 12 * 500
    assert schedule(tokens) == 0.75
    assert schedule(tokens + 1_000) == pytest.approx(0.70, abs=1e-15)


def test_a_longer_total_is_another_curve():
    # What a resumed run must not do without a word.
    assert COSINE(1.0, warmup=0, total=1000, final_ratio=0)(501) == pytest.approx(
        0.4984, abs=5e-5
    )
    assert COSINE(1.0, warmup=0, total=2000, final_ratio=0)(501) == pytest.approx(
        0.8530, abs=5e-5
    )


def test_constant_and_inverse_square_root():
    assert [CONSTANT(2.0, warmup=4)(c) for c in (0, 2, 4, 9)] == [0, 1, 2, 2]
    assert [INVERSE_SQRT(2.0, warmup=4)(c) for c in (0, 2, 4, 16)] == [0, 1, 2, 1]


@pytest.mark.parametrize(
    "number", [int, np.int64, np.float64], ids=lambda t: t.__name__
)
def test_clocks_of_64_bits_are_exact(number):
    clock, total = 2**40, 2**41
    assert LINEAR(1.0, warmup=0, total=total)(number(clock)) == 0.5
    after = LINEAR(1.0, warmup=0, total=total)(number(clock + 1))
    assert after == 1 - (clock + 1) / total
    assert after < 0.5


def test_a_counter_beyond_31_bits_gives_the_right_rate():
    rate = COSINE(1.0, warmup=10**9, total=4 * 10**9)(2_153_774_456)
    done = 1_153_774_456 / (3 * 10**9)
    assert rate == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * done)), rel=1e-15)


@pytest.mark.parametrize("schedule", ALL)
def test_traced_clocks_agree_in_float32(schedule):
    clocks = np.arange(0, 1200, 7)
    host = schedule(clocks)
    traced = jax.jit(schedule)(jnp.asarray(clocks, jnp.int32))
    assert host.dtype == np.float64
    assert traced.dtype == jnp.float32
    # 3e-4 times a few roundings of 2**-24.
    np.testing.assert_allclose(traced, host, rtol=1e-6, atol=3e-10)


@pytest.mark.parametrize("schedule", ALL)
def test_numbers_give_python_floats_and_no_rate_is_negative(schedule):
    values = [schedule(c) for c in range(0, 2000, 13)]
    assert {type(v) for v in values} == {float}
    assert min(values) >= 0
    assert max(values) <= 3e-4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: COSINE(1.0, warmup=100, total=100),
            "total=100 must exceed warmup=100",
        ),
        (lambda: LINEAR(1.0, warmup=-1, total=100), "warmup=-1"),
        (lambda: COSINE(-1.0, warmup=1, total=100), r"peak_value=-1\.0"),
        (lambda: COSINE(math.nan, warmup=1, total=100), "peak_value=nan"),
        (lambda: COSINE(1.0, warmup=1, total=9, final_ratio=2), "final_ratio=2"),
        (lambda: INVERSE_SQRT(1.0, warmup=0), "warmup=0"),
        (lambda: CONSTANT(1.0, warmup=-5), "warmup=-5"),
    ],
)
def test_arguments_out_of_range_are_told_when_built(make, message):
    with pytest.raises(ValueError, match=message):
        make()
