"""1-bit Adam: both stages, their switch, and what must never happen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dataeff_jax import collectives, distributed, optimizers, testing, training

SMALL = collectives.Compression(min_size=0)
SHAPES = {"bias": (5,), "dead": (4, 3), "kernel": (7, 9)}


def gradients(n, steps, seed=0, shapes=None):
    """Different ones on each device; some of ``dead`` are 0 in the first ten steps."""
    rng = np.random.default_rng(seed)
    found = []
    for step in range(steps):
        tree = {
            name: rng.normal(0.2, 1, (n, *shape)).astype(np.float32)
            for name, shape in (shapes or SHAPES).items()
        }
        if step < 10 and "dead" in tree:
            tree["dead"][:, :2] = 0
        found.append(tree)
    return found


def start(seed=7):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}


def build(**options):
    options = {"freeze_step": 4, "axis_name": "data", "compression": SMALL} | options
    return optimizers.onebit_adam(0.01, **options)


def feed(tx, grads, n, **options):
    return testing.feed_gradients(tx, start(), grads, num_devices=n, **options)


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_it_equals_the_paper_in_float64(n, decay, one_bit_mean):
    b1, b2, eps, rate, freeze = 0.9, 0.99, 1e-8, 0.01, 4
    grads = gradients(n, 14)
    tx = build(freeze_step=freeze, b2=b2, weight_decay=decay)
    history, _ = feed(tx, grads, n)
    x = {k: v.astype(np.float64) for k, v in start().items()}
    mean = {k: one_bit_mean(n, s, compressed=len(s) > 1) for k, s in SHAPES.items()}
    m, v = ({k: np.zeros(s) for k, s in SHAPES.items()} for _ in range(2))
    for t, g in enumerate(grads, start=1):
        for k in SHAPES:
            if t <= freeze:
                average = g[k].astype(np.float64).mean(axis=0)
                m[k] = b1 * m[k] + (1 - b1) * average
                v[k] = b2 * v[k] + (1 - b2) * average**2
            else:
                mine = b1 * m[k] + (1 - b1) * g[k].astype(np.float64)
                m[k] = mean[k](mine, v[k] > 0)
            v_hat = v[k] / (1 - b2 ** min(t, freeze))
            update = m[k] / (1 - b1**t) / (np.sqrt(v_hat) + eps) + decay * x[k]
            x[k] = x[k] - rate * update
            # float32 against float64; no sign of this draw turns.
            np.testing.assert_allclose(
                history[t - 1][k], np.broadcast_to(x[k], (n, *SHAPES[k])), atol=2e-5
            )


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_the_warmup_on_one_device_is_optax_bit_for_bit(name):
    options = {"weight_decay": 0.1} if name == "adamw" else {}
    ours = optimizers.onebit_adam(3e-3, freeze_step=100, **options)
    theirs = getattr(optax, name)(3e-3, **options)
    grads = gradients(1, 50)

    def run(tx):
        params, state = start(), tx.init(start())

        @jax.jit
        def step(params, state, grads):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        for g in grads:
            params, state = step(params, state, {k: v[0] for k, v in g.items()})
        return params, state

    params, state = run(ours)
    expected, expected_state = run(theirs)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    jax.tree.map(np.testing.assert_array_equal, state[0].nu, expected_state[0].nu)


def test_the_warmup_on_many_devices_is_adam_on_the_mean_bit_for_bit():
    grads = gradients(8, 12)
    ours, _ = feed(build(freeze_step=100), grads, 8)
    dense = optax.chain(optimizers.pmean_grads("data"), optax.adam(0.01))
    theirs, _ = feed(dense, grads, 8)
    jax.tree.map(np.testing.assert_array_equal, ours[-1], theirs[-1])


def test_on_one_device_nothing_is_compressed_unless_forced():
    grads = gradients(1, 8)
    plain, _ = feed(build(), grads, 1)
    forced, states = feed(build(force_compress=True), grads, 1)
    assert np.abs(plain[-1]["kernel"] - forced[-1]["kernel"]).max() > 1e-3
    assert states[-1][0].feedback.worker["kernel"].any()


def test_coordinates_without_variance_stay_where_they_are():
    grads = gradients(8, 30)
    kept, states = feed(build(), grads, 8)
    np.testing.assert_array_equal(kept[-1]["dead"][0][:2], start()["dead"][:2])
    assert all(np.abs(x).max() < 10 for x in kept[-1].values())
    worker = states[-1][0].feedback.worker["dead"]
    assert not worker.reshape(8, -1)[:, :6].any()
    # Without the mask they take steps of their scale over eps.
    loose, _ = feed(build(zero_variance="keep"), grads, 8)
    assert np.abs(loose[-1]["dead"]).max() > 10


@pytest.mark.parametrize("step", [2, 7])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_gradient_on_one_device_skips_the_step_on_all(step, bad):
    grads = gradients(4, 10)
    tx = build(weight_decay=0.1)
    broken = [{k: v.copy() for k, v in g.items()} for g in grads]
    broken.insert(step, {k: v.copy() for k, v in grads[step].items()})
    broken[step]["kernel"][2, 3, 3] = bad
    history, states = feed(tx, broken, 4)
    jax.tree.map(np.testing.assert_array_equal, states[step], states[step - 1])
    jax.tree.map(np.testing.assert_array_equal, history[step], history[step - 1])
    undisturbed, _ = feed(tx, grads, 4)
    jax.tree.map(np.testing.assert_array_equal, history[-1], undisturbed[-1])


def test_a_stage_chosen_on_the_host_gives_the_same_numbers():
    grads = gradients(4, 10)
    dynamic, _ = feed(build(), grads, 4)
    static, _ = feed(
        build(), grads, 4, extra=lambda i: {"stage": optimizers.freeze_stage(i, 4)}
    )
    for one, other in zip(dynamic, static, strict=True):
        # Other programs may round differently.
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, atol=1e-6), one, other
        )


def test_the_variance_stays_from_the_freeze_on():
    _, states = feed(build(), gradients(4, 10), 4)
    frozen = states[3][0]
    for state in states[4:]:
        jax.tree.map(np.testing.assert_array_equal, state[0].nu, frozen.nu)
        assert state[0].nu_count == 4
    assert [s[0].nu_count for s in states[:4]] == [1, 2, 3, 4]
    assert not any(x.any() for x in jax.tree.leaves(frozen.feedback))


def test_sums_of_momenta_and_errors_balance():
    n, grads = 4, gradients(4, 24, shapes={"kernel": (7, 9)})
    tx = build()
    params = {"kernel": start()["kernel"]}
    _, states = testing.feed_gradients(tx, params, grads, num_devices=n)
    sent = got = 0.0
    for t in range(4, 24):
        before = states[t - 1][0].mu["kernel"].astype(np.float64)
        sent = sent + 0.9 * before + 0.1 * grads[t]["kernel"].mean(axis=0)
        got = got + states[t][0].mu["kernel"]
    plan = collectives.compression_plan(params, num_devices=n, compression=SMALL)
    pending = collectives.pending_mean(states[-1][0].feedback, plan)["kernel"]
    np.testing.assert_allclose(got, sent - pending, atol=1e-5)


# What is sent.


def programs(tx, stages, n=8, params=None, loss=testing.mlp_loss):
    """The compiled training step of each stage."""
    with jax.set_mesh(distributed.data_mesh(n)):
        state = training.TrainState.create(params or testing.mlp_params(), tx)
        step = training.data_parallel_step(loss, tx)
        batch = distributed.shard_batch(testing.mlp_batch())
        return {
            stage: step.lower(state, batch, jax.random.key(0), stage=stage).compile()
            for stage in stages
        }


@pytest.mark.parametrize("n", [2, 8])
def test_each_stage_sends_what_its_plan_declares(n):
    compiled = programs(build(), ["warmup", "compressed"], n)
    params = testing.mlp_params()
    plan = collectives.compression_plan(params, num_devices=n, compression=SMALL)
    collectives.check_collectives(
        compiled["warmup"], None, other_bytes=plan.dense_bytes
    )
    collectives.check_collectives(compiled["compressed"], plan)
    ops = [item.op for item in collectives.collective_report(compiled["compressed"])]
    assert sorted(ops) == ["all-gather", "all-reduce", "all-to-all"]


def test_clipping_sends_one_number_more():
    tx = build(max_grad_norm=1.0)
    plan = collectives.compression_plan(
        testing.mlp_params(), num_devices=8, compression=SMALL
    )
    program = programs(tx, ["compressed"])["compressed"]
    collectives.check_collectives(program, plan, other_bytes=7)


def test_the_program_of_both_stages_marks_them_as_branches():
    tx = build()
    with jax.set_mesh(distributed.data_mesh(8)):
        state = training.TrainState.create(testing.mlp_params(), tx)
        step = training.data_parallel_step(testing.mlp_loss, tx)
        batch = distributed.shard_batch(testing.mlp_batch())
        program = step.lower(state, batch, jax.random.key(0)).compile()
    report = collectives.collective_report(program)
    assert all(item.conditional for item in report)


# Clipping.


@pytest.mark.parametrize("limit", [0.0, 1.0])
@pytest.mark.parametrize("freeze", [1, 100])
def test_zero_gradients_are_clipped_to_zero(limit, freeze):
    grads = [jax.tree.map(np.zeros_like, g) for g in gradients(2, 3)]
    history, states = feed(build(max_grad_norm=limit, freeze_step=freeze), grads, 2)
    for name, value in start().items():
        np.testing.assert_array_equal(history[-1][name][0], value)
    assert not any(x.any() for x in jax.tree.leaves(states[-1][0].feedback))


def test_the_clipped_warmup_is_adam_behind_the_clipped_mean():
    grads = gradients(4, 5)
    ours, _ = feed(build(max_grad_norm=0.5, freeze_step=100), grads, 4)
    dense = optax.chain(
        optimizers.pmean_grads("data"),
        optimizers.clip_by_global_norm(0.5),
        optax.adam(0.01),
    )
    theirs, _ = feed(dense, grads, 4)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=1e-6), ours[-1], theirs[-1]
    )


def test_the_clipped_length_does_not_jump_at_the_freeze():
    grads = gradients(8, 80)
    _, states = feed(build(max_grad_norm=0.5, freeze_step=60), grads, 8)
    norms = [float(state[0].clip.global_norm) for state in states]
    warm, compressed = np.mean(norms[30:60]), np.mean(norms[60:])
    local = np.mean(
        [np.sqrt(sum((x[0] ** 2).sum() for x in g.values())) for g in grads]
    )
    assert local > 1.5 * warm  # what clipping by local norms would have seen
    assert compressed == pytest.approx(warm, rel=0.15)


def test_all_devices_clip_by_one_factor():
    grads = gradients(2, 1)
    grads[0] = {
        k: v * np.array([1, 10]).reshape(2, *[1] * (v.ndim - 1))
        for k, v in grads[0].items()
    }
    tx = optax.chain(
        optimizers.clip_by_shared_norm(1.0, axis_name="data"),
        optimizers.pmean_grads("data"),
        optax.sgd(1.0),
    )
    history, _ = feed(tx, grads, 2)
    squares = [sum((x[i] ** 2).sum() for x in grads[0].values()) for i in range(2)]
    for name, g in grads[0].items():
        expected = start()[name] - g.mean(axis=0) / np.sqrt(np.mean(squares))
        np.testing.assert_allclose(history[0][name][0], expected, atol=1e-5)


# Masks.


def test_frozen_parameters_have_no_state_and_are_not_sent():
    frozen = {"hidden": {"kernel": "frozen", "bias": "on"}, "output": "on"}
    inner = build(freeze_step=2, weight_decay=0.1)
    tx = optax.multi_transform(
        {"on": inner, "frozen": optimizers.set_to_zero()}, frozen
    )
    state, _, _ = testing.train(tx, num_devices=4, num_steps=6)
    params = testing.mlp_params()
    np.testing.assert_array_equal(
        state.params["hidden"]["kernel"], params["hidden"]["kernel"]
    )
    [errors] = [
        node
        for node in jax.tree.leaves(
            state.opt_state,
            is_leaf=lambda x: isinstance(x, collectives.ErrorFeedback),
        )
        if isinstance(node, collectives.ErrorFeedback)
    ]
    assert set(errors.worker) == {"output.kernel"}
    program = programs(tx, ["compressed"], 4)["compressed"]
    rest = {"hidden": {"bias": params["hidden"]["bias"]}, "output": params["output"]}
    plan = collectives.compression_plan(rest, num_devices=4, compression=SMALL)
    collectives.check_collectives(program, plan)


def test_a_decay_mask_may_be_a_prefix_and_an_unknown_name_is_told():
    grads = gradients(2, 6)
    masks = {"bias": False, "dead": False, "kernel": True}
    full, _ = feed(build(weight_decay=0.1, mask=masks), grads, 2)
    called, _ = feed(build(weight_decay=0.1, mask=lambda p: masks), grads, 2)
    jax.tree.map(np.testing.assert_array_equal, full[-1], called[-1])
    without, _ = feed(build(), grads, 2)
    np.testing.assert_array_equal(full[-1]["bias"], without[-1]["bias"])
    assert (full[-1]["kernel"] != without[-1]["kernel"]).any()
    with pytest.raises(ValueError, match="kernl"):
        feed(build(weight_decay=0.1, mask={"bias": False, "kernl": True}), grads, 2)


def test_momentum_masked_by_hand_is_zero_once_compression_begins():
    rows = np.arange(7).reshape(7, 1) < 5
    mask = {"bias": True, "dead": True, "kernel": np.broadcast_to(rows, (7, 9))}
    _, states = feed(build(momentum_mask=mask), gradients(2, 8), 2)
    assert states[3][0].mu["kernel"][5:].any()
    assert not states[-1][0].mu["kernel"][5:].any()
    assert states[-1][0].mu["kernel"][:5].all()


# State.


@pytest.mark.parametrize("n", [2, 8])
def test_state_takes_12_and_4_over_n_bytes_a_parameter(n):
    params = {"kernel": np.zeros((256, 256), np.float32)}
    tx = build()
    with jax.set_mesh(distributed.data_mesh(n)):
        state = jax.jit(tx.init)(distributed.replicate(params))
    held = sum(
        leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state)
    )
    assert held / 256**2 == pytest.approx(8 + 4 + 4 / n, rel=1e-3)


def test_moments_and_errors_may_be_narrower():
    compression = collectives.Compression(min_size=0, error_dtype="bfloat16")
    tx = build(mu_dtype=jnp.bfloat16, compression=compression)
    _, states = feed(tx, gradients(2, 8), 2)
    inner = states[-1][0]
    assert inner.mu["kernel"].dtype == inner.feedback.worker["kernel"].dtype
    assert inner.mu["kernel"].dtype == jnp.bfloat16
    assert inner.nu["kernel"].dtype == np.float32


def test_the_rate_may_come_with_the_update():
    grads = gradients(2, 6)
    fixed, _ = feed(build(), grads, 2)
    tx = optimizers.onebit_adam(
        None, freeze_step=4, axis_name="data", compression=SMALL
    )
    given, _ = feed(tx, grads, 2, extra=lambda i: {"learning_rate": 0.01})
    wrapped = optimizers.with_learning_rate(
        optimizers.onebit_adam, freeze_step=4, axis_name="data", compression=SMALL
    )
    outside, _ = feed(wrapped, grads, 2, extra=lambda i: {"learning_rate": 0.01})
    for other in (given, outside):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, atol=1e-6),
            fixed[-1],
            other[-1],
        )
    with pytest.raises(ValueError, match="learning_rate="):
        feed(tx, grads, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"b1": 1.0}, "b1=1.0"),
        ({"b2": -0.1}, "b2=-0.1"),
        ({"eps": -1.0}, "eps=-1.0"),
        ({"freeze_step": 0}, "freeze_step=0"),
        ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0"),
        ({"bias_correction": "moving"}, "bias_correction='moving'"),
        ({"zero_variance": "floor"}, "zero_variance='floor'"),
        ({"parity": "bagua"}, "parity='bagua'"),
        ({"stage": "frozen"}, "stage='frozen'"),
    ],
)
def test_values_out_of_range_are_told_when_built(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_training_over_nodes_keeps_replicas_equal():
    mesh = jax.make_mesh((4, 2), ("node", "local"))
    axes = ("node", "local")
    tx = optimizers.onebit_adam(0.03, freeze_step=4, axis_name=axes, compression=SMALL)
    with jax.set_mesh(mesh):
        state = training.TrainState.create(testing.mlp_params(), tx)
        step = training.data_parallel_step(testing.mlp_loss, tx, axis_name=axes)
        batch = {k: v for k, v in testing.mlp_batch().items() if k != "sample_id"}
        losses = []
        for _ in range(12):
            state, metrics = step(state, batch, jax.random.key(0))
            losses.append(training.read_metrics(metrics)["loss"])
    assert losses[-1] < losses[0]
    for leaf in jax.tree.leaves(state.params):
        copies = {np.asarray(s.data).tobytes() for s in leaf.addressable_shards}
        assert len(copies) == 1


def test_micro_batches_neither_count_nor_communicate():
    tx = build(freeze_step=10)
    state, _, _ = testing.train(tx, num_devices=2, num_steps=15, accumulation_steps=4)
    inner = state.opt_state[0]
    assert (int(inner.count), int(inner.nu_count)) == (15, 10)
    with jax.set_mesh(distributed.data_mesh(2)):
        step = training.data_parallel_step(testing.mlp_loss, tx, accumulation_steps=4)
        batch = distributed.shard_batch(testing.mlp_batch())
        program = step.lower(
            state, batch, jax.random.key(0), stage="compressed"
        ).compile()
    plan = collectives.compression_plan(
        testing.mlp_params(), num_devices=2, compression=SMALL
    )
    collectives.check_collectives(program, plan)
    assert {item.times for item in collectives.collective_report(program)} == {1}
