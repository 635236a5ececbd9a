import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dataeff_jax import optimizers

OPTIMIZERS = {
    "sgd": (optax.sgd, {"momentum": 0.9}),
    "adamw": (optax.adamw, {"b2": 0.95, "weight_decay": 0.1}),
    "lamb": (optimizers.lamb, {"weight_decay": 0.1}),
    "lion": (optax.lion, {}),
    "adafactor": (optax.adafactor, {}),
    "schedule_free": (optax.contrib.schedule_free_adamw, {}),
}


def params_of(dtype):
    rng = np.random.default_rng(0)
    return {"w": jnp.asarray(rng.normal(size=(4, 3)), dtype), "b": jnp.ones(3, dtype)}


def train(tx, params, steps, rate=None):
    """Descends a quadratic; rate is a function of the step, given as an argument."""
    state = tx.init(params)

    @jax.jit
    def step(params, state, extra):
        grads = jax.grad(lambda p: sum(jnp.sum(x**2) for x in jax.tree.leaves(p)))(
            params
        )
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    for i in range(steps):
        extra = {} if rate is None else {"learning_rate": rate(i)}
        params, state = step(params, state, extra)
    return params, state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rate_given_as_argument_equals_one_built_in(name):
    make, kwargs = OPTIMIZERS[name]
    params = params_of(jnp.float32)
    plain, _ = train(make(learning_rate=3e-3, **kwargs), params, 20)
    tx = optimizers.with_learning_rate(make, **kwargs)
    given, state = train(tx, params, 20, rate=lambda i: 3e-3)
    # A constant folded by the compiler may round differently from an argument.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), given, plain)
    assert state.learning_rate == np.float32(3e-3)


def test_a_schedule_on_the_host_equals_one_inside():
    params = params_of(jnp.float32)

    def schedule(i):
        return 1e-2 * 0.5 ** (i / 10)

    inside, _ = train(optax.adamw(schedule), params, 50)
    outside, _ = train(
        optimizers.with_learning_rate(optax.adamw), params, 50, rate=schedule
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), inside, outside
    )


def test_the_rate_stays_float32_with_bfloat16_parameters():
    params = {"w": jnp.ones(4, jnp.bfloat16)}
    tx = optimizers.with_learning_rate(optax.sgd)
    updates, state = tx.update(params, tx.init(params), params, learning_rate=3e-4)
    assert state.learning_rate.dtype == jnp.float32
    # bfloat16 would make 2.9945e-4 of it, 2e-3 away.
    np.testing.assert_allclose(state.learning_rate, 3e-4, rtol=1e-6)
    np.testing.assert_allclose(-np.asarray(updates["w"], np.float64), 3e-4, rtol=1e-6)


def test_parameters_keep_their_dtype():
    tx = optimizers.with_learning_rate(optax.adamw)
    params, _ = train(tx, params_of(jnp.bfloat16), 3, rate=lambda i: 1e-3)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.bfloat16.dtype}


def test_a_rate_changed_by_hand_is_used_at_once_and_survives_a_restore():
    tx = optimizers.with_learning_rate(optax.sgd)
    params = {"w": jnp.ones(2)}
    state = tx.init(params)
    for rate in (3e-4, 1e-4):
        updates, state = tx.update(params, state, params, learning_rate=rate)
        np.testing.assert_allclose(-updates["w"], rate, rtol=1e-6)
    copy = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), state)
    assert copy.learning_rate == np.float32(1e-4)


def test_a_missing_rate_is_told():
    tx = optimizers.with_learning_rate(optax.sgd)
    params = {"w": jnp.ones(2)}
    with pytest.raises(ValueError, match="learning_rate="):
        tx.update(params, tx.init(params), params)


def test_an_argument_that_does_not_fit_is_told_when_built():
    with pytest.raises(TypeError, match="momentun"):
        optimizers.with_learning_rate(optax.sgd, momentun=0.9)


def test_the_type_of_the_state_does_not_change():
    tx = optimizers.with_learning_rate(optax.adamw)
    params = params_of(jnp.float32)
    state = tx.init(params)
    _, new = tx.update(params, state, params, learning_rate=1e-3)
    assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, state)
