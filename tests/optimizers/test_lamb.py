import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dataeff_jax import optimizers

LAYERS = 3


def layers(seed):
    rng = np.random.default_rng(seed)
    return [
        {"kernel": rng.normal(size=(4, 2)) * 10.0**i, "bias": rng.normal(size=2)}
        for i in range(LAYERS)
    ]


def unstacked(seed):
    return jax.tree.map(
        lambda x: jnp.asarray(x, jnp.float32),
        {"head": layers(seed)[0]}
        | {f"block{i}": x for i, x in enumerate(layers(seed))},
    )


def stack(tree):
    blocks = [tree[f"block{i}"] for i in range(LAYERS)]
    return {
        "head": tree["head"],
        "blocks": jax.tree.map(lambda *x: jnp.stack(x), *blocks),
    }


def is_stacked(path):
    return path[0].key == "blocks"


def train(tx, params, grads):
    state = tx.init(params)
    for g in grads:
        updates, state = jax.jit(tx.update)(g, state, params)
        params = optax.apply_updates(params, updates)
    return params


def decay_kernels(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key == "kernel", params
    )


def close(one, two):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6), one, two)


@pytest.mark.parametrize("mask", [None, decay_kernels], ids=["all", "kernels"])
def test_unstacked_layers_equal_optax(mask):
    params, grads = unstacked(0), [unstacked(s) for s in range(1, 5)]
    want = train(optax.lamb(1e-2, weight_decay=0.1, mask=mask), params, grads)
    close(
        train(optimizers.lamb(1e-2, weight_decay=0.1, mask=mask), params, grads), want
    )


@pytest.mark.parametrize("mask", [None, decay_kernels], ids=["all", "kernels"])
def test_a_stack_of_layers_equals_the_layers_one_by_one(mask):
    params, grads = unstacked(0), [unstacked(s) for s in range(1, 5)]
    want = train(optax.lamb(1e-2, weight_decay=0.1, mask=mask), params, grads)
    tx = optimizers.lamb(1e-2, weight_decay=0.1, mask=mask, is_stacked=is_stacked)
    close(train(tx, stack(params), [stack(g) for g in grads]), stack(want))


def test_a_stack_taken_as_one_layer_is_something_else():
    params, grads = unstacked(0), [unstacked(1)]
    apart = train(
        optimizers.lamb(1e-2, is_stacked=is_stacked), stack(params), map(stack, grads)
    )
    together = train(optimizers.lamb(1e-2), stack(params), map(stack, grads))
    a, b = apart["blocks"]["kernel"], together["blocks"]["kernel"]
    assert not np.allclose(a, b, rtol=1e-3)


def scale(update, param, **kwargs):
    tx = optimizers.scale_by_layer_trust_ratio(**kwargs)
    return tx.update(update, tx.init(param), param)[0]


@pytest.mark.parametrize(("update", "param"), [(0, 1), (1, 0), (0, 0)])
def test_zero_norms_have_ratio_one(update, param):
    update = jnp.full((2, 3), update, jnp.float32)
    got = scale(update, jnp.full((2, 3), param, jnp.float32))
    np.testing.assert_array_equal(got, update)


def test_one_layer_of_zeros_in_a_stack_leaves_the_others():
    update = jnp.array([[0.0, 0.0], [3.0, 4.0]])
    param = jnp.array([[1.0, 1.0], [6.0, 8.0]])
    got = scale(update, param, is_stacked=lambda path: True)
    np.testing.assert_allclose(got, [[0, 0], [6, 8]], rtol=1e-6)


def test_the_ratio_stops_at_its_bound():
    got = scale(jnp.array([1e-3]), jnp.array([1e6]), max_ratio=10.0)
    np.testing.assert_allclose(got, [1e-2], rtol=1e-6)


def test_norms_of_float16_weights_are_finite():
    got = scale(jnp.ones(4, jnp.float16), jnp.full(4, 300, jnp.float16))
    assert got.dtype == jnp.float16
    np.testing.assert_array_equal(got, np.full(4, 300, np.float16))


def test_scalars_in_a_stack_are_layers_of_one_number():
    got = scale(
        jnp.array([1.0, 2.0]), jnp.array([3.0, -5.0]), is_stacked=lambda p: True
    )
    np.testing.assert_allclose(got, [3.0, 5.0], rtol=1e-6)


def test_errors_say_what_is_wrong():
    with pytest.raises(ValueError, match="max_ratio=0"):
        optimizers.scale_by_layer_trust_ratio(max_ratio=0)
    tx = optimizers.scale_by_layer_trust_ratio()
    with pytest.raises(ValueError, match="params"):
        tx.update(jnp.ones(2), tx.init(None))
