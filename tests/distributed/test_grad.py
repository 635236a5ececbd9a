import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dataeff_jax import distributed


def loss(w, x):
    return jnp.sum((x * w) ** 2)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_gradients_are_those_of_the_device_alone(count):
    mesh = distributed.data_mesh(count)
    rows = np.arange(8, dtype=np.float32)

    def body(w, x):
        value, grad = distributed.local_value_and_grad(loss, axis_name="data")(w, x)
        return value[None], grad[None]

    with jax.set_mesh(mesh):
        x = distributed.shard_batch({"x": rows})["x"]
        run = jax.shard_map(
            body, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P("data")
        )
        values, grads = jax.jit(run)(jnp.float32(3), x)
    squares = (rows.reshape(count, -1) ** 2).sum(axis=1)
    # Small integers: exact in float32.
    np.testing.assert_array_equal(values, 9 * squares)
    np.testing.assert_array_equal(grads, 6 * squares)


def test_without_an_axis_it_is_value_and_grad():
    x = jnp.arange(3.0)
    got = distributed.local_value_and_grad(loss, axis_name=None)(2.0, x)
    assert [float(v) for v in got] == [20.0, 20.0]


def test_vary_leaves_what_varies_already():
    def body(x):
        y = distributed.vary({"x": x, "c": jnp.float32(1)}, "data")
        assert all(jax.typeof(v).manual_axis_type.varying for v in y.values())
        return y["x"] + y["c"]

    with jax.set_mesh(distributed.data_mesh(2)):
        x = distributed.shard_batch({"x": np.zeros(2, np.float32)})["x"]
        jax.jit(jax.shard_map(body, out_specs=jax.P("data")))(x)


def test_specs_are_read_from_types_under_jit_too():
    with jax.set_mesh(distributed.data_mesh(2)):
        tree = {
            "w": distributed.replicate(jnp.ones((2, 3))),
            "x": distributed.shard_batch({"x": np.ones((2, 3), np.float32)})["x"],
        }
        want = {"w": jax.P(None, None), "x": jax.P("data", None)}
        assert distributed.specs_of(tree) == want
        seen = []
        jax.jit(lambda t: seen.append(distributed.specs_of(t)))(tree)
        assert seen == [want]
