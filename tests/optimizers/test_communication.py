import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dataeff_jax import distributed, optimizers


def mean_over(devices, values, dtype):
    """Each device holds one row of values; returns their mean."""
    tx = optimizers.pmean_grads("data")

    def body(x):
        return tx.update({"g": x[0].astype(dtype)}, tx.init(None))[0]["g"]

    with jax.set_mesh(distributed.data_mesh(devices)):
        x = distributed.shard_batch({"x": values})["x"]
        return jax.jit(jax.shard_map(body, out_specs=jax.P()))(x)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("devices", [1, 2, 8])
def test_gradients_are_averaged_in_float32(devices, dtype):
    # 256 + 1 is 256 in bfloat16: a running sum of 8 bits would lose every 1, and a sum
    # of 60000s is beyond float16.
    values = np.ones((devices, 3), np.float32)
    values[0] = [256, 60000, 100]
    values[:, 1] = 60000
    want = np.asarray(jnp.asarray(values, dtype), np.float32).mean(axis=0)
    got = mean_over(devices, values, dtype)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, jnp.asarray(want, dtype))


def test_without_an_axis_gradients_pass_unchanged():
    tx = optimizers.pmean_grads(None)
    grads = {"a": jnp.ones(2), "b": None}
    assert tx.update(grads, tx.init(grads))[0] is grads
