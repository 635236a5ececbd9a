"""1-bit LAMB: the warm-up is LAMB, and layer coefficients stay in their bounds."""

import functools

import jax
import numpy as np
import optax
import pytest

from dataeff_jax import collectives, distributed, optimizers, testing

SMALL = collectives.Compression(min_size=0)
SHAPES = {"bias": (5,), "kernel": (7, 9), "other": (4, 8)}


def gradients(n, steps, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {k: rng.normal(0.2, 1, (n, *s)).astype(np.float32) for k, s in SHAPES.items()}
        for _ in range(steps)
    ]


def start(seed=7):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}


def build(**options):
    options = {"freeze_step": 4, "axis_name": "data", "compression": SMALL} | options
    return optimizers.onebit_lamb(0.01, **options)


def norm(x):
    return np.sqrt((x**2).sum())


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(("decay", "how"), [(0.0, "max"), (0.1, "mean")])
def test_it_equals_the_paper_in_float64(n, decay, how, one_bit_mean):
    b1, b2, eps, rate, freeze, beta = 0.9, 0.99, 1e-6, 0.01, 4, 0.9
    grads = gradients(n, 14)
    tx = build(b2=b2, weight_decay=decay, factor_reduction=how)
    history, _ = testing.feed_gradients(tx, start(), grads, num_devices=n)
    x = {k: v.astype(np.float64) for k, v in start().items()}
    mean = {k: one_bit_mean(n, s, compressed=len(s) > 1) for k, s in SHAPES.items()}
    m, v, fresh = ({k: np.zeros(s) for k, s in SHAPES.items()} for _ in range(3))
    ratios = {k: 0.0 for k in SHAPES}
    last = {k: 1.0 for k in SHAPES}
    for t, g in enumerate(grads, start=1):
        for k in SHAPES:
            average = g[k].astype(np.float64).mean(axis=0)
            old = m[k]
            if t <= freeze:
                m[k] = b1 * m[k] + (1 - b1) * average
                v[k] = b2 * v[k] + (1 - b2) * average**2
                fresh[k] = v[k]
            else:
                m[k] = mean[k](b1 * m[k] + (1 - b1) * g[k].astype(np.float64))
                rebuilt = (m[k] - b1 * old) / (1 - b1)
                fresh[k] = b2 * fresh[k] + (1 - b2) * rebuilt**2
            den = np.sqrt(v[k] / (1 - b2 ** min(t, freeze))) + eps
            p = m[k] / (1 - b1**t) / den
            u = p + decay * x[k]
            if t <= freeze:
                coefficient = np.clip(norm(x[k]) / norm(u), 0.01, 10)
                ratios[k] = beta * ratios[k] + (1 - beta) * coefficient
            else:
                factors = den / (np.sqrt(fresh[k] / (1 - b2**t)) + eps)
                f = factors.max() if how == "max" else factors.mean()
                if decay:
                    share = min(1, norm(p) / norm(u))
                    f = f * share + 1 - share
                f = np.clip(np.clip(f, 0.5, 4), 0.9 * last[k], 1.1 * last[k])
                last[k] = f
                coefficient = ratios[k] / (1 - beta**freeze) * f
            x[k] = x[k] - rate * coefficient * u
            # float32 against float64; no sign of this draw turns.
            np.testing.assert_allclose(history[t - 1][k][0], x[k], atol=2e-5)


def test_the_warmup_on_one_device_is_optax_lamb():
    ours = optimizers.onebit_lamb(
        0.01, freeze_step=100, weight_decay=0.1, max_coeff=None, min_coeff=None
    )
    theirs = optax.lamb(0.01, weight_decay=0.1)
    params = {"ours": start(), "theirs": start()}
    states = {"ours": ours.init(start()), "theirs": theirs.init(start())}
    for g in gradients(1, 10):
        g = {k: v[0] for k, v in g.items()}
        for name, tx in (("ours", ours), ("theirs", theirs)):
            updates, states[name] = tx.update(g, states[name], params[name])
            params[name] = optax.apply_updates(params[name], updates)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7),
        params["ours"],
        params["theirs"],
    )


def test_layers_of_a_stack_count_as_layers_of_their_own():
    n, grads = 4, gradients(4, 10)
    stacked = [
        {"stack": np.stack([g["kernel"], 100 * g["kernel"][::-1]], axis=1)}
        for g in grads
    ]
    apart = [{"a": g["stack"][:, 0], "b": g["stack"][:, 1]} for g in stacked]
    kernels = [start(1)["kernel"], start(2)["kernel"]]
    is_stacked = lambda path: True  # noqa: E731
    one, _ = testing.feed_gradients(
        build(
            is_stacked=is_stacked,
            compression=collectives.Compression(min_size=0, is_stacked=is_stacked),
        ),
        {"stack": np.stack(kernels)},
        stacked,
        num_devices=n,
    )
    two, _ = testing.feed_gradients(
        build(), {"a": kernels[0], "b": kernels[1]}, apart, num_devices=n
    )
    np.testing.assert_allclose(one[-1]["stack"][:, 0], two[-1]["a"], atol=1e-6)
    np.testing.assert_allclose(one[-1]["stack"][:, 1], two[-1]["b"], atol=1e-6)


def test_a_layer_without_momentum_has_finite_coefficients():
    grads = gradients(4, 10)
    for g in grads[:6]:
        g["other"][:] = 0
    for options in ({}, {"parity": "deepspeed"}):
        history, states = testing.feed_gradients(
            build(**options), start(), grads, num_devices=4
        )
        for value in jax.tree.leaves((history[-1], states[-1])):
            assert np.isfinite(value).all()
    assert states[4].momentum_scale["other"] == 1


def test_ratios_stop_at_their_bounds():
    grads = gradients(2, 1)
    huge = {k: 1e6 * v for k, v in start().items()}
    history, _ = testing.feed_gradients(
        build(max_coeff=10.0), huge, grads, num_devices=2
    )
    for name, value in huge.items():
        moved = norm(history[0][name][0].astype(np.float64) - value)
        size = np.sqrt(np.prod(SHAPES[name]))  # of Adam's first update
        # The difference of float32 values around 1e6.
        assert moved == pytest.approx(0.01 * 10 * size, rel=0.5)


def test_norms_of_float16_weights_do_not_overflow():
    tx = optimizers.onebit_lamb(0.1, freeze_step=2)
    params = {"kernel": np.full((20, 20), 300, np.float16)}
    state = tx.init(params)
    for _ in range(4):
        updates, state = tx.update(
            {"kernel": np.ones((20, 20), np.float16)}, state, params
        )
        params = optax.apply_updates(params, updates)
        assert np.isfinite(np.asarray(params["kernel"])).all()
        assert (np.asarray(params["kernel"]) < 300).all()
    assert params["kernel"].dtype == np.float16


def test_a_short_warmup_does_not_leave_the_coefficient_low():
    _, states = testing.feed_gradients(
        build(freeze_step=3), start(), gradients(2, 4), num_devices=2
    )
    mean = states[2].coefficient["kernel"] / (1 - 0.9**3)
    assert states[2].coefficient_count["kernel"] == 3
    # Ratios of the three steps lie between the smallest and largest of them.
    assert 0.3 < float(mean.squeeze()) < 3


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("step", [1, 6])
def test_a_bad_gradient_skips_the_step(step, bad):
    grads = gradients(4, 8)
    grads[step]["kernel"][1, 0, 0] = bad
    history, states = testing.feed_gradients(
        build(weight_decay=0.1), start(), grads, num_devices=4
    )
    jax.tree.map(np.testing.assert_array_equal, states[step], states[step - 1])
    jax.tree.map(np.testing.assert_array_equal, history[step], history[step - 1])
    assert (history[step + 1]["kernel"] != history[step]["kernel"]).any()


def test_state_takes_16_and_4_over_n_bytes_a_parameter():
    params = {"kernel": np.zeros((256, 256), np.float32)}
    with jax.set_mesh(distributed.data_mesh(8)):
        state = jax.jit(build().init)(distributed.replicate(params))
    held = sum(
        leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state)
    )
    assert held / 256**2 == pytest.approx(12 + 4 + 4 / 8, rel=1e-3)
