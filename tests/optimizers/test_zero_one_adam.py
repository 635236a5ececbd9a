"""0/1 Adam: local steps that devices take apart, and how they come together again."""

import collections as python_collections
import functools

import jax
import numpy as np
import pytest

from dataeff_jax import collectives, distributed, optimizers, testing, training

SMALL = collectives.Compression(min_size=0)
SHAPES = {"bias": (5,), "kernel": (7, 9)}
TIMES = {
    "var_freeze_step": 5,
    "var_update_scaler": 2,
    "local_step_scaler": 3,
    "local_step_clipper": 4,
}
EVERY = TIMES | {"local_step_clipper": 1}


def gradients(n, steps, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {k: rng.normal(0.2, 1, (n, *s)).astype(np.float32) for k, s in SHAPES.items()}
        for _ in range(steps)
    ]


def start(seed=7):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}


def build(rate=0.01, **options):
    options = {"axis_name": "data", "compression": SMALL, "b2": 0.99} | TIMES | options
    return optimizers.zero_one_adam(rate, **options)


def feed(tx, grads, n, **options):
    return testing.feed_gradients(tx, start(), grads, num_devices=n, **options)


def falling(step):
    return 0.01 * 0.9**step


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_it_equals_the_anchor_form_in_float64(n, decay, one_bit_mean):
    b1, b2, eps, last = 0.9, 0.99, 1e-8, 5
    grads = gradients(n, 18)
    history, _ = feed(build(falling, weight_decay=decay), grads, n)
    schedule = optimizers.ZeroOneSchedule(**TIMES)
    anchor = {k: v.astype(np.float64) for k, v in start().items()}
    m, v = ({k: np.zeros(s) for k, s in SHAPES.items()} for _ in range(2))
    new = lambda: {  # noqa: E731
        k: one_bit_mean(n, s, compressed=len(s) > 1) for k, s in SHAPES.items()
    }
    mean, count = new(), 0
    zeros = lambda: {k: np.zeros((n, *s)) for k, s in SHAPES.items()}  # noqa: E731
    mine, u, total, left = zeros(), zeros(), 0.0, 1.0
    for t, g in enumerate(grads, start=1):
        rate, kind = 0.01 * 0.9 ** (t - 1), schedule.kind(t - 1)
        count += kind == "full"
        if t == last + 1:
            mean, mine = new(), {k: np.stack([m[k]] * n) for k in SHAPES}
        step = rate / (1 - b1**t)
        if t > last:
            total = (1 - rate * decay) * total + step
            left = (1 - rate * decay) * left
        for k in SHAPES:
            gk = g[k].astype(np.float64)
            if t <= last:
                average = gk.mean(axis=0) if kind == "full" else mean[k](gk, v[k] > 0)
                m[k] = b1 * m[k] + (1 - b1) * average
                if kind == "full":
                    v[k] = b2 * v[k] + (1 - b2) * average**2
            den = np.sqrt(v[k] / (1 - b2**count)) + eps
            if t <= last:
                anchor[k] = anchor[k] - rate * (
                    m[k] / (1 - b1**t) / den + decay * anchor[k]
                )
                local = np.stack([anchor[k]] * n)
            else:
                mine[k] = b1 * mine[k] + (1 - b1) * gk
                u[k] = (1 - rate * decay) * u[k] + step * mine[k]
                if kind == "sync":
                    average = mean[k](u[k], v[k] > 0)
                    anchor[k] = left * anchor[k] - average / den
                    mine[k] = np.stack([average / total] * n)
                    u[k][:] = 0
                local = (1.0 if kind == "sync" else left) * anchor[k] - u[k] / den
            # float32 against float64; no sign of this draw turns.
            np.testing.assert_allclose(history[t - 1][k], local, atol=2e-5)
        if kind == "sync":
            total, left = 0.0, 1.0


def test_synchronising_at_every_step_without_compression_is_adam_with_frozen_nu():
    grads = gradients(1, 14)
    tx = build(**EVERY | {"var_update_scaler": 100})
    history, _ = feed(tx, grads, 1)
    frozen, _ = feed(
        optimizers.onebit_adam(0.01, b2=0.99, freeze_step=5, axis_name="data"), grads, 1
    )
    for one, other in zip(history, frozen, strict=True):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, atol=1e-6), one, other
        )


def test_momentum_after_a_synchronisation_is_the_mean_weighted_by_rates():
    grads = gradients(1, 12)
    history, states = feed(build(falling, bias_correction="none"), grads, 1)
    del history
    assert optimizers.ZeroOneSchedule(**TIMES).kind(9) == "sync"
    mu, weighted, total = states[7].local_mu["kernel"][0].astype(np.float64), 0.0, 0.0
    assert not states[7].drift["kernel"].any()
    for t in (9, 10):
        mu = 0.9 * mu + 0.1 * grads[t - 1]["kernel"][0]
        weighted = weighted + falling(t - 1) * mu
        total += falling(t - 1)
    np.testing.assert_allclose(states[9].mu["kernel"], weighted / total, atol=1e-6)


def test_decay_stays_out_of_the_momentum():
    grads = gradients(2, 14)
    _, plain = feed(build(), grads, 2)
    _, decayed = feed(build(weight_decay=0.1), grads, 2)
    for one, other in zip(plain, decayed, strict=True):
        # The weights of momenta differ by rate times decay, 1e-3, in an interval.
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, atol=1e-3), one.mu, other.mu
        )


def test_a_rate_of_zero_leaves_everything_finite():
    tx = build(lambda step: 0.01 * (step < 6))
    history, states = feed(tx, gradients(2, 16), 2)
    for leaf in jax.tree.leaves((history[-1], states[-1])):
        assert np.isfinite(leaf).all()
    np.testing.assert_array_equal(history[-1]["kernel"], history[8]["kernel"])


def test_devices_differ_between_synchronisations_and_agree_after_them():
    grads, schedule = gradients(4, 16), optimizers.ZeroOneSchedule(**TIMES)
    history, states = feed(build(), grads, 4)
    kinds = [schedule.kind(step) for step in range(16)]
    assert {"full", "onebit", "local", "sync"} == set(kinds)
    for kind, here, state in zip(kinds, history, states, strict=True):
        copies = {here["kernel"][i].tobytes() for i in range(4)}
        assert len(copies) == (4 if kind == "local" else 1)
        if kind == "sync":
            momenta = state.local_mu["kernel"]
            assert len({momenta[i].tobytes() for i in range(4)}) == 1


def test_devices_with_the_same_data_stay_together():
    grads = [
        {k: np.broadcast_to(v[:1], v.shape).copy() for k, v in g.items()}
        for g in gradients(4, 14)
    ]
    for here in feed(build(), grads, 4)[0]:
        assert all((here["kernel"][i] == here["kernel"][0]).all() for i in range(4))


def test_errors_begin_anew_where_the_unit_changes():
    _, states = feed(build(), gradients(4, 8), 4)
    assert states[4].feedback.worker["kernel"].any()
    once, _ = feed(build(), gradients(4, 6), 4)
    cleared = states[4]._replace(
        feedback=jax.tree.map(np.zeros_like, states[4].feedback)
    )
    # Going on from errors of zero gives the same as going on from those of gradients.
    again, _ = testing.feed_gradients(
        build(),
        {k: v[0] for k, v in feed(build(), gradients(4, 5), 4)[0][-1].items()},
        gradients(4, 6)[5:],
        num_devices=4,
        state=cleared,
    )
    jax.tree.map(np.testing.assert_array_equal, once[-1], again[-1])


def test_kinds_chosen_on_the_host_give_the_same_numbers():
    grads, schedule = gradients(4, 16), optimizers.ZeroOneSchedule(**TIMES)
    dynamic, _ = feed(build(), grads, 4)
    static, _ = feed(build(), grads, 4, extra=lambda i: {"stage": schedule.kind(i)})
    for one, other in zip(dynamic, static, strict=True):
        # Other programs may round differently.
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, atol=1e-6), one, other
        )


# Gradients that are not finite.


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("step", [1, 2])
def test_a_bad_gradient_skips_an_averaged_step(step, bad):
    grads = gradients(4, 5)
    grads[step]["kernel"][1, 0, 0] = bad
    history, states = feed(build(weight_decay=0.1), grads, 4)
    jax.tree.map(np.testing.assert_array_equal, states[step], states[step - 1])
    jax.tree.map(np.testing.assert_array_equal, history[step], history[step - 1])


@pytest.mark.parametrize("step", [8, 9])
def test_a_bad_gradient_drops_the_interval_on_all_devices(step):
    kinds = [optimizers.ZeroOneSchedule(**TIMES).kind(i) for i in range(12)]
    assert kinds[7:10] == ["sync", "local", "sync"]
    grads = gradients(4, 12)
    grads[step]["kernel"][1, 0, 0] = np.inf
    history, states = feed(build(weight_decay=0.1), grads, 4)
    before, after = states[7], states[9]
    jax.tree.map(np.testing.assert_array_equal, history[9], history[7])
    for field in ("mu", "local_mu", "drift", "feedback", "rate_sum", "unusable"):
        jax.tree.map(
            np.testing.assert_array_equal, getattr(after, field), getattr(before, field)
        )
    assert after.count == before.count + 2
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((history, states)))
    assert (history[11]["kernel"] != history[9]["kernel"]).any()


# What is sent.


def test_each_kind_sends_what_its_plan_declares():
    params = testing.mlp_params()
    plan = collectives.compression_plan(params, num_devices=8, compression=SMALL)
    declared = {
        "full": (None, plan.dense_bytes),
        "onebit": (plan, 0),
        "local": (None, 0),
        "sync": (plan, 0),
    }
    with jax.set_mesh(distributed.data_mesh(8)):
        state = training.TrainState.create(params, build())
        step = training.data_parallel_step(testing.mlp_loss, build())
        batch = distributed.shard_batch(testing.mlp_batch())
        for stage, (expected, other) in declared.items():
            lowered = step.lower(state, batch, jax.random.key(0), stage=stage)
            collectives.check_collectives(
                lowered.compile(), expected, other_bytes=other
            )


def test_the_gradient_is_taken_where_the_device_is():
    """Local steps on different data: the loss of each device's own parameters."""
    tx = build(0.05)
    with jax.set_mesh(distributed.data_mesh(2)):
        state = training.TrainState.create(testing.mlp_params(), tx)
        step = training.data_parallel_step(testing.mlp_loss, tx)
        batch = distributed.shard_batch(testing.mlp_batch())
        for _ in range(9):  # the last one is local
            state, _ = step(state, batch, jax.random.key(0))
        host = distributed.to_host(state)
        assert host.opt_state.drift["hidden"]["kernel"].any()
        _, metrics = step(state, batch, jax.random.key(0))
    losses = np.asarray(metrics["loss_sum"])
    rows = {k: np.asarray(v).reshape(2, 8, -1) for k, v in batch.items()}
    for i in range(2):
        part = {k: v[i] for k, v in rows.items()}
        own = host.opt_state._replace(
            drift=jax.tree.map(lambda x, i=i: x[i : i + 1], host.opt_state.drift)
        )
        expected, _ = testing.mlp_loss(own.local_params(host.params), part, None)
        anchor, _ = testing.mlp_loss(host.params, part, None)
        dropped = jax.vmap(
            lambda slot: jax.random.fold_in(
                jax.random.fold_in(jax.random.key(0), 9), slot
            )
        )(np.arange(8 * i, 8 * i + 8))
        with_keys, _ = testing.mlp_loss(own.local_params(host.params), part, dropped)
        assert losses[i] == pytest.approx(float(with_keys), rel=1e-5)
        assert abs(expected - anchor) > 1e-4


# When.


def counted(schedule, steps):
    return python_collections.Counter(schedule.kind(step) for step in range(steps))


def simulated(freeze, scaler, local_scaler, clipper, steps):
    """The rules of the original, counters and all."""
    kinds, interval, updates, local, since = [], 1, 0, 1, 0
    for t in range(1, steps + 1):
        if t <= freeze:
            full = t % interval == 0
            kinds.append("full" if full else "onebit")
            if full:
                updates += 1
                if updates == scaler:
                    updates, interval = 0, interval * 2
        else:
            kinds.append("sync" if t % local == 0 else "local")
            since += 1
            if since == local_scaler:
                since, local = 0, min(clipper, local * 2)
    return kinds


@pytest.mark.parametrize(
    "times", [(5, 2, 3, 4), (40, 3, 5, 6), (1, 1, 1, 1), (64, 1, 7, 16)]
)
def test_kinds_follow_the_counters_of_the_original(times):
    schedule = optimizers.ZeroOneSchedule(
        var_freeze_step=times[0],
        var_update_scaler=times[1],
        local_step_scaler=times[2],
        local_step_clipper=times[3],
    )
    expected = simulated(*times, 300)
    assert [schedule.kind(step) for step in range(300)] == expected
    on_device = jax.vmap(schedule.kind_on_device)(np.arange(300, dtype=np.int32))
    names = np.array(["full", "onebit", "local", "sync"])
    assert names[np.asarray(on_device)].tolist() == expected


def test_the_shipped_schedule_saves_what_it_promises():
    # BERT-Large's first phase: 12,500 updates until the variance freezes, 152,000 in
    # all; the half-life of the rate as the original's default has it.
    schedule = optimizers.ZeroOneSchedule(
        var_freeze_step=12501, local_step_scaler=32678
    )
    found = counted(schedule, 152_000)
    assert found["full"] == 153
    bits = 16 * found["full"] + found["onebit"] + found["sync"]
    onebit_adam = 16 * 23_000 + (152_000 - 23_000)
    assert 1 - bits / onebit_adam >= 0.84
    assert 1 - (152_000 - found["local"]) / 152_000 >= 0.5


def test_the_interval_may_follow_the_rate():
    schedule = optimizers.ZeroOneSchedule(
        var_freeze_step=4,
        local_step_clipper=4,
        local_step_policy="learning_rate",
        learning_rate=lambda step: 0.1 * 0.5 ** ((step - 4) // 6),
    )
    kinds = [schedule.kind(step) for step in range(30)]
    synced = [step for step, kind in enumerate(kinds) if kind == "sync"]
    assert synced[:6] == [4, 5, 6, 7, 8, 9]
    gaps = np.diff(synced)
    assert gaps.tolist() == sorted(gaps)
    assert set(gaps) == {1, 2, 4}
    assert [schedule.kind(step) for step in reversed(range(30))] == kinds[::-1]
    with pytest.raises(ValueError, match="on the host"):
        schedule.kind_on_device(np.int32(7))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"var_freeze_step": 0}, "var_freeze_step=0"),
        ({"local_step_clipper": 0}, "local_step_clipper=0"),
        ({"b1": 1.0}, "b1=1.0"),
        ({"parity": "bagua"}, "parity='bagua'"),
    ],
)
def test_values_out_of_range_are_told_when_built(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_a_policy_without_a_rate_is_refused():
    with pytest.raises(ValueError, match="learning_rate="):
        optimizers.ZeroOneSchedule(var_freeze_step=4, local_step_policy="learning_rate")


def test_state_takes_20_and_4_over_n_bytes_a_parameter():
    params = {"kernel": np.zeros((256, 256), np.float32)}
    with jax.set_mesh(distributed.data_mesh(8)):
        state = jax.jit(build().init)(distributed.replicate(params))
    held = sum(
        leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state)
    )
    assert held / 256**2 == pytest.approx(16 + 4 + 4 / 8, rel=1e-3)


def test_clipping_goes_by_the_norm_agreed_last():
    grads = gradients(4, 14)
    history, states = feed(build(max_grad_norm=0.5), grads, 4)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((history, states)))
    norms = [float(state.clip.global_norm) for state in states]
    kinds = [optimizers.ZeroOneSchedule(**TIMES).kind(i) for i in range(14)]
    for i, kind in enumerate(kinds):
        assert (i > 0 and norms[i] == norms[i - 1]) == (kind == "local")
