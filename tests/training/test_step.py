import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dataeff_jax import distributed, optimizers, testing, training

KEY = 7


def chain(axis_name="data"):
    return optax.chain(
        optimizers.pmean_grads(axis_name),
        optimizers.clip_by_global_norm(0.5),
        optimizers.with_learning_rate(optax.adamw, weight_decay=0.1),
    )


def reference(params, batches, *, steps_before=0, dtype=None):
    """The same training on one device, written without the library."""
    tx = optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.1)
    )
    params = jax.tree.map(jnp.asarray, params)
    opt_state, losses = tx.init(params), []
    for step, batch in enumerate(batches):
        key = jax.random.fold_in(jax.random.key(KEY), step)
        keys = jnp.stack(
            [jax.random.fold_in(key, r) for r in range(len(batch["inputs"]))]
        )

        def mean(params, batch=batch, keys=keys):
            total, weight = testing.mlp_loss(params, batch, keys)
            return total / weight

        loss, grads = jax.value_and_grad(mean)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return params, losses


def mesh_of(devices):
    if devices is None:
        return contextlib.nullcontext()
    return jax.set_mesh(distributed.data_mesh(devices))


def train(devices, batches, *, accumulation=1, params=None, loss=testing.mlp_loss):
    """Runs the library's step; devices=None means without a mesh."""
    axis = None if devices is None else "data"
    tx, losses = chain(axis), []
    step = training.data_parallel_step(
        loss, tx, axis_name=axis, accumulation_steps=accumulation
    )
    with mesh_of(devices):
        state = training.TrainState.create(params or testing.mlp_params(), tx)
        for batch in batches:
            del batch["sample_id"]
            device_batch = distributed.shard_batch(batch) if devices else batch
            state, metrics = step(
                state, device_batch, jax.random.key(KEY), learning_rate=1e-2
            )
            losses.append(training.read_metrics(metrics)["loss"])
    return jax.device_get(state), losses


def batches_of(weighted, count=4):
    return [testing.mlp_batch(s, rows=16, weighted=weighted) for s in range(count)]


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize(
    ("devices", "accumulation"),
    [(None, 1), (1, 1), (2, 1), (8, 1), (None, 4), (1, 4), (2, 4), (8, 2)],
)
def test_the_step_equals_a_hand_written_one(devices, accumulation, weighted):
    batches = batches_of(weighted)
    want_params, want_losses = reference(testing.mlp_params(), batches)
    state, losses = train(devices, batches, accumulation=accumulation)
    # Only the order of float32 sums differs. Adam divides by the gradient's size, so
    # parameters may move by the relative error of a gradient times the rate.
    np.testing.assert_allclose(losses, want_losses, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-6),
        state.params,
        jax.device_get(want_params),
    )
    assert state.step == len(batches)


def test_bfloat16_parameters_stay_bfloat16_and_agree_over_devices():
    params = testing.mlp_params(dtype=jnp.bfloat16)
    one, losses = train(1, batches_of(True), params=params)
    eight, losses_of_eight = train(8, batches_of(True), params=params)
    assert {x.dtype for x in jax.tree.leaves(one.params)} == {jnp.bfloat16.dtype}
    # A bfloat16 has 8 bits: one rounding of a gradient or parameter is 2**-8.
    np.testing.assert_allclose(losses, losses_of_eight, rtol=1e-2)
    for a, b in zip(
        jax.tree.leaves(one.params), jax.tree.leaves(eight.params), strict=True
    ):
        np.testing.assert_allclose(
            a.astype(np.float32), b.astype(np.float32), atol=2e-2
        )


def test_rows_without_any_weight_leave_a_finite_state():
    batch = testing.mlp_batch(weighted=True)
    batch["weights"][:] = 0
    state, losses = train(8, [batch])
    assert losses == [0.0]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


@pytest.fixture(params=[1, 2, 8])
def running(request):
    """A step with its state and batch, on some devices."""
    tx = chain()
    step = training.data_parallel_step(testing.mlp_loss, tx)
    with jax.set_mesh(distributed.data_mesh(request.param)):
        state = training.TrainState.create(testing.mlp_params(), tx)
        batch = distributed.shard_batch(testing.mlp_batch())
        yield step, state, batch


def test_the_second_call_does_not_compile(running, caplog):
    step, state, batch = running
    state, _ = step(state, batch, jax.random.key(0), learning_rate=1e-3)
    with jax.log_compiles():
        for rate in (2e-3, 5e-4):
            state, _ = step(state, batch, jax.random.key(0), learning_rate=rate)
    assert step._cache_size() == 1
    assert "Compiling" not in caplog.text


def test_the_type_of_the_state_does_not_change(running):
    step, state, batch = running
    before = jax.tree.map(jax.typeof, state)
    state, _ = step(state, batch, jax.random.key(0), learning_rate=1e-3)
    assert jax.tree.map(jax.typeof, state) == before


def with_errors(axis_name="data"):
    """A link in the place of `pmean_grads` that keeps what each device did not send."""

    def init_fn(params):
        devices = jax.sharding.get_abstract_mesh().shape[axis_name]
        return jax.tree.map(
            lambda p: jnp.zeros((devices, *p.shape), out_sharding=jax.P(axis_name)),
            params,
        )

    def update_fn(grads, errors, params=None):
        wanted = jax.tree.map(lambda g, e: g + e[0], grads, errors)
        sent = jax.tree.map(lambda x: jnp.sign(x) * jnp.mean(jnp.abs(x)), wanted)
        errors = jax.tree.map(lambda x, y: (x - y)[None], wanted, sent)
        return jax.lax.pmean(sent, axis_name), errors

    return optax.GradientTransformation(init_fn, update_fn)


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_a_link_may_keep_state_of_its_own_on_each_device(devices):
    tx = optax.chain(with_errors(), optax.sgd(0.1))
    step = training.data_parallel_step(testing.mlp_loss, tx)
    with jax.set_mesh(distributed.data_mesh(devices)):
        state = training.TrainState.create(testing.mlp_params(), tx)
        before = jax.tree.map(jax.typeof, state)
        batch = distributed.shard_batch(testing.mlp_batch())
        for _ in range(2):
            state, _ = step(state, batch, jax.random.key(0))
    assert jax.tree.map(jax.typeof, state) == before
    assert step._cache_size() == 1
    for error in jax.tree.leaves(state.opt_state):
        assert len(np.unique(np.asarray(error), axis=0)) == devices


def test_the_state_is_donated(running):
    step, state, batch = running
    step(state, batch, jax.random.key(0), learning_rate=1e-3)
    # Leaves that a step does not read, such as the last rate, are not given up.
    used = (state.step, state.params, optax.tree.get(state.opt_state, "mu"))
    assert all(x.is_deleted() for x in jax.tree.leaves(used))


def test_metrics_have_one_entry_a_device(running):
    step, state, batch = running
    _, metrics = step(state, batch, jax.random.key(0), learning_rate=1e-3)
    devices = len(batch["inputs"].addressable_shards)
    assert {k: v.shape for k, v in metrics.items()} == dict.fromkeys(
        ("loss_sum", "weight_sum", "grad_norm"), (devices,)
    )
    assert len(set(np.asarray(metrics["grad_norm"]))) == 1


def collectives(text):
    """Collective instructions of a compiled program, with their operands' shapes."""
    names = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    return re.findall(rf"= (.*?) ({names})(?:-start)?\(", text)


def compiled(weighted, accumulation, devices=8):
    tx = chain()
    step = training.data_parallel_step(
        testing.mlp_loss, tx, accumulation_steps=accumulation
    )
    with jax.set_mesh(distributed.data_mesh(devices)):
        state = training.TrainState.create(testing.mlp_params(), tx)
        batch = distributed.shard_batch(testing.mlp_batch(rows=16, weighted=weighted))
        lowered = step.lower(state, batch, jax.random.key(0), learning_rate=1e-3)
        return lowered.compile().as_text()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_constant_weights_cost_one_all_reduce_of_the_gradients(accumulation):
    (found,) = collectives(compiled(False, accumulation))
    assert found[1] == "all-reduce"
    sizes = [np.prod([int(n) for n in s.split(",")]) for s in shapes(found[0])]
    want = [x.size for x in jax.tree.leaves(testing.mlp_params())]
    assert sorted(sizes) == sorted(want)


def shapes(text):
    return [s or "1" for s in re.findall(r"f32\[([\d,]*)\]", text)]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_traced_weights_cost_one_scalar_more(accumulation):
    found = collectives(compiled(True, accumulation))
    assert [kind for _, kind in found] == ["all-reduce"] * 2
    assert min((shapes(text) for text, _ in found), key=len) == ["1"]


@pytest.mark.parametrize(("rows", "accumulation"), [(4, 1), (12, 1), (8, 2)])
def test_a_batch_that_does_not_divide_stops_before_compiling(rows, accumulation):
    def loss_fn(params, batch, keys):
        pytest.fail("traced")

    tx = chain()
    step = training.data_parallel_step(loss_fn, tx, accumulation_steps=accumulation)
    with jax.set_mesh(distributed.data_mesh(8)):
        state = training.TrainState.create(testing.mlp_params(), tx)
        batch = testing.mlp_batch(rows=rows)
        with pytest.raises(ValueError, match=rf"batch_size={rows} .* 8 devices"):
            step(state, batch, jax.random.key(0), learning_rate=1e-3)


def test_rows_that_are_not_cut_yet_are_cut_by_the_step():
    tx = chain()
    step = training.data_parallel_step(testing.mlp_loss, tx)
    batch = testing.mlp_batch()
    del batch["sample_id"]
    with jax.set_mesh(distributed.data_mesh(8)):
        state = training.TrainState.create(testing.mlp_params(), tx)
        _, metrics = step(state, batch, jax.random.key(KEY), learning_rate=1e-2)
    want = reference(testing.mlp_params(), [batch])[1]
    np.testing.assert_allclose(training.read_metrics(metrics)["loss"], want, rtol=1e-6)


def test_rows_of_different_number_are_an_error():
    tx = chain()
    step = training.data_parallel_step(testing.mlp_loss, tx)
    batch = {"inputs": np.zeros((8, 4)), "targets": np.zeros((16, 3))}
    with jax.set_mesh(distributed.data_mesh(8)):
        state = training.TrainState.create(testing.mlp_params(), tx)
        with pytest.raises(ValueError, match="one number of rows"):
            step(state, batch, jax.random.key(0), learning_rate=1e-3)


def test_a_step_outside_the_mesh_says_so():
    tx = chain()
    step = training.data_parallel_step(testing.mlp_loss, tx)
    state = training.TrainState.create(testing.mlp_params(), tx)
    with pytest.raises(ValueError, match=r"jax\.set_mesh"):
        step(state, testing.mlp_batch(), jax.random.key(0), learning_rate=1e-3)


def test_a_chain_that_does_not_communicate_says_so():
    tx = optax.sgd(0.1)
    step = training.data_parallel_step(testing.mlp_loss, tx)
    with jax.set_mesh(distributed.data_mesh(8)):
        state = training.TrainState.create(testing.mlp_params(), tx)
        batch = distributed.shard_batch(testing.mlp_batch())
        with pytest.raises(ValueError) as info:
            step(state, batch, jax.random.key(0))
    assert "pmean_grads('data')" in "".join(info.value.__notes__)


def test_accumulation_steps_must_be_positive():
    with pytest.raises(ValueError, match="accumulation_steps=0"):
        training.data_parallel_step(testing.mlp_loss, chain(), accumulation_steps=0)


def test_accumulation_counts_optimizer_steps():
    tx = chain()
    step = training.data_parallel_step(testing.mlp_loss, tx, accumulation_steps=4)
    with jax.set_mesh(distributed.data_mesh(1)):
        state = training.TrainState.create(testing.mlp_params(), tx)
        for seed in range(15):
            batch = distributed.shard_batch(testing.mlp_batch(seed, rows=32))
            state, _ = step(state, batch, jax.random.key(0), learning_rate=1e-3)
    assert int(state.step) == 15
    assert int(optax.tree.get(state.opt_state, "count")) == 15


def test_one_device_communicates_nothing():
    assert collectives(compiled(False, 1, devices=1)) == []


def test_a_key_that_the_batch_lacks_is_named_with_those_present():
    tx = optax.sgd(0.1)
    step = training.data_parallel_step(testing.mlp_loss, tx, axis_name=None)
    state = training.TrainState.create(testing.mlp_params(), tx)
    batch = {"inputs": np.zeros((2, 4), np.float32), "labels": np.zeros(2, np.int32)}
    with pytest.raises(ValueError, match=r"'targets'.* has \['inputs', 'labels'\]"):
        step(state, batch, jax.random.key(0))


@pytest.mark.parametrize(
    "result",
    [lambda x: x.sum(), lambda x: (x, 2), lambda x: (x.sum(), x), lambda x: (x.sum(),)],
    ids=["one value", "losses of rows", "weights of rows", "one in a tuple"],
)
def test_a_loss_that_is_no_pair_of_sums_is_refused(result):
    tx = optax.sgd(0.1)
    step = training.data_parallel_step(
        lambda params, batch, keys: result(params * batch["x"]), tx, axis_name=None
    )
    state = training.TrainState.create(jnp.ones(()), tx)
    with pytest.raises(ValueError, match=r"\(loss_sum, weight_sum\), two scalars"):
        step(state, {"x": np.ones(3, np.float32)}, jax.random.key(0))


def test_a_step_compiles_from_a_state_that_was_never_made():
    tx = chain()
    step = training.data_parallel_step(testing.mlp_loss, tx)
    with jax.set_mesh(distributed.data_mesh(8)):
        shapes = jax.eval_shape(
            lambda params: training.TrainState.create(params, tx), testing.mlp_params()
        )
        batch = distributed.shard_batch(testing.mlp_batch())
        args = batch, jax.random.key(0)
        executable = step.lower(shapes, *args, learning_rate=1e-3).compile()
        state = training.TrainState.create(testing.mlp_params(), tx)
        state, _ = executable(state, *args, learning_rate=1e-3)
    assert int(state.step) == 1
