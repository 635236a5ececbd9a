import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dataeff_jax import optimizers


def clip(grads, limit):
    tx = optimizers.clip_by_global_norm(limit)
    return tx.update(grads, tx.init(grads))


@pytest.mark.parametrize("limit", [0.1, 5.0, 13.0, 100.0])
def test_it_equals_optax(limit):
    grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.full((2, 2), 6.0)}
    tx = optax.clip_by_global_norm(limit)
    want, _ = tx.update(grads, tx.init(grads))
    got, state = clip(grads, limit)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)
    assert state.global_norm == 13.0


@pytest.mark.parametrize("limit", [1.0, 0.5, 0.0])
def test_zero_gradients_stay_zero_under_any_limit(limit):
    got, state = clip({"a": jnp.zeros(3)}, limit)
    np.testing.assert_array_equal(got["a"], np.zeros(3))
    assert state.global_norm == 0


def test_a_limit_of_zero_stops_every_update():
    got, _ = clip({"a": jnp.ones(3)}, 0.0)
    np.testing.assert_array_equal(got["a"], np.zeros(3))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_norms_of_narrow_gradients_are_finite(dtype):
    # 300 squared is beyond float16.
    got, state = clip({"a": jnp.full(4, 300, dtype)}, 1.0)
    assert state.global_norm == 600 or dtype == jnp.bfloat16
    assert state.global_norm.dtype == jnp.float32
    assert got["a"].dtype == dtype
    np.testing.assert_allclose(got["a"].astype(np.float32), 0.5, rtol=1e-2)


def test_a_non_finite_gradient_is_not_hidden():
    got, state = clip({"a": jnp.array([jnp.nan, 1.0])}, 1.0)
    assert np.isnan(state.global_norm)
    assert np.isnan(got["a"]).any()


def test_a_negative_limit_is_refused():
    with pytest.raises(ValueError, match="max_norm=-1"):
        optimizers.clip_by_global_norm(-1)
