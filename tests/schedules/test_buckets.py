import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dataeff_jax import schedules


@pytest.mark.parametrize("low", [1, 64, 80, 128, 500])
@pytest.mark.parametrize("multiple", [1, 8, 128, 1000])
@pytest.mark.parametrize("max_count", [None, 2, 5])
def test_buckets_rise_from_the_minimum_to_the_maximum(low, multiple, max_count):
    lengths = schedules.length_buckets(
        low, max_length=500, multiple=multiple, max_count=max_count
    )
    assert (lengths[0], lengths[-1]) == (low, 500)
    assert list(lengths) == sorted(set(lengths))
    assert all(length % multiple == 0 for length in lengths[1:-1])
    assert max_count is None or len(lengths) <= max_count


def test_values_snap_down_and_never_below_the_first():
    bucketed = schedules.bucketed_schedule(lambda t: t, buckets=(8, 16, 64))
    clocks = np.array([0, 7, 8, 15, 16, 63, 64, 1000])
    want = [8, 8, 8, 8, 16, 16, 64, 64]
    assert [bucketed(int(t)) for t in clocks] == want
    assert bucketed(clocks).tolist() == want
    assert jax.jit(bucketed)(jnp.asarray(clocks)).tolist() == want


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: schedules.length_buckets(0, max_length=9, multiple=1),
            "min_length=0",
        ),
        (
            lambda: schedules.length_buckets(10, max_length=9, multiple=1),
            "max_length=9",
        ),
        (lambda: schedules.length_buckets(1, max_length=9, multiple=0), "multiple=0"),
        (
            lambda: schedules.length_buckets(1, max_length=9, multiple=1, max_count=1),
            "max_count=1",
        ),
        (lambda: schedules.bucketed_schedule(abs, buckets=()), "at least one"),
        (lambda: schedules.bucketed_schedule(abs, buckets=(2, 1)), "must rise"),
    ],
)
def test_bad_arguments_are_told_when_built(make, message):
    with pytest.raises(ValueError, match=message):
        make()
