import numpy as np
import pytest

from dataeff_jax import schedules


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (150, 150),
        (0.15, 150),
        (1, 1),
        (1.0, 1000),
        (0, 0),
        (0.0, 0),
        (np.int64(2**40), 2**40),
        (np.float32(0.5), 500),
        (0.0006, 1),
    ],
)
def test_integers_are_counts_and_floats_are_fractions(value, count):
    got = schedules.resolve_duration(value, 1000)
    assert got == count
    assert type(got) is int


@pytest.mark.parametrize(
    "value", [100.0, 1.5, -0.1, float("nan"), -3, True, "0.1", None]
)
def test_what_could_be_meant_either_way_is_refused(value):
    with pytest.raises(ValueError, match="a duration of"):
        schedules.resolve_duration(value, 1000)


def test_a_fraction_that_rounds_to_nothing_is_refused():
    with pytest.raises(ValueError, match=r"0\.0001 of a run of 1000 .* 0\.001"):
        schedules.resolve_duration(0.0001, 1000)
