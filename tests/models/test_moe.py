"""A mixture of experts against loops over rows, tokens and experts."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dataeff_jax import distributed, models, optimizers, token_dropping, training
from dataeff_jax.models import _flops, _moe

WIDTH, EXPERTS = 8, 4


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def route_in_numpy(logits, selected, capacity, real):
    """(expert, gate) pairs of each token that found room, and the two losses."""
    tokens, experts = logits.shape
    probabilities = softmax(logits)
    order = np.argsort(-probabilities, axis=1, kind="stable")[:, :selected]
    gates = np.take_along_axis(probabilities, order, 1)
    if selected > 1:
        gates = gates / gates.sum(1, keepdims=True)
    load, pairs = np.zeros(experts, int), [[] for _ in range(tokens)]
    choices = np.zeros(experts)
    for rank in range(selected):
        for token in range(tokens):
            if not real[token]:
                continue
            expert = order[token, rank]
            choices[expert] += 1
            if load[expert] < capacity:
                pairs[token].append((expert, gates[token, rank], load[expert]))
                load[expert] += 1
    count = max(real.sum(), 1)
    share = choices / (selected * count)
    balance = experts * np.sum(share * probabilities[real].sum(0) / count)
    lse = np.log(np.exp(logits).sum(1))
    return pairs, balance, np.sum(lse[real] ** 2) / count


@pytest.mark.parametrize("selected", [1, 2, 4])
@pytest.mark.parametrize("capacity", [1, 3, 12])
def test_routing_equals_a_loop_over_tokens(selected, capacity):
    logits = np.random.default_rng(0).standard_normal((3, 12, EXPERTS)).astype("f")
    real = np.ones((3, 12), bool)
    real[1, 7:], real[2] = False, False
    call = jax.jit(
        functools.partial(_moe.route, num_selected=selected, capacity=capacity)
    )
    found = jax.device_get(call(jnp.asarray(logits), real=jnp.asarray(real)))
    for row in range(3):
        pairs, balance, z = route_in_numpy(logits[row], selected, capacity, real[row])
        for token in range(12):
            want = {e * capacity + place: gate for e, gate, place in pairs[token]}
            slots = found.slots[row, token]
            got = dict(zip(slots, found.gates[row, token], strict=True))
            got.pop(EXPERTS * capacity, None)
            assert got.keys() == want.keys()
            for slot, gate in want.items():
                np.testing.assert_allclose(got[slot], gate, rtol=1e-5)
        np.testing.assert_allclose(found.balance[row], balance, rtol=1e-5)
        np.testing.assert_allclose(found.router_z[row], z, rtol=1e-5)


def block_of(**kwargs):
    options = {"num_experts": EXPERTS, "balance_weight": 0.5, "router_z_weight": 0.25}
    sizes = {"width": WIDTH, "num_heads": 2, "ffw_width": 12, "stddev": 0.5}
    return models.MoEBlock(**options, **sizes, **kwargs, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(("selected", "factor"), [(1, 1.0), (2, 1.25), (2, 0.5)])
def test_the_experts_compute_what_dense_loops_compute(selected, factor):
    block = block_of(num_selected=selected, capacity_factor=factor)
    x = np.random.default_rng(0).standard_normal((2, 10, WIDTH)).astype("f")
    got, loss = block._mix(jnp.asarray(x), None)
    p = jax.device_get(nnx.to_pure_dict(nnx.state(block)))
    capacity = math.ceil(factor * selected * 10 / EXPERTS)
    real = np.ones(10, bool)
    for row in range(2):
        logits = x[row] @ p["router"]["kernel"] + p["router"]["bias"]
        pairs, balance, z = route_in_numpy(logits, selected, capacity, real)
        np.testing.assert_allclose(loss[row], 0.5 * balance + 0.25 * z, rtol=1e-5)
        for token in range(10):
            want = np.zeros(WIDTH)
            for e, gate, _ in pairs[token]:
                up, down = p["experts_up"], p["experts_down"]
                hidden = gelu(x[row, token] @ up["kernel"][e] + up["bias"][e])
                want += gate * (hidden @ down["kernel"][e] + down["bias"][e])
            np.testing.assert_allclose(got[row, token], want, atol=1e-4)


def test_one_expert_with_room_for_all_is_the_dense_block():
    options = {"num_experts": 1, "num_selected": 1, "capacity_factor": 1.0}
    sizes = {"width": WIDTH, "num_heads": 2, "ffw_width": 12}
    moe = models.MoEBlock(**options, **sizes, rngs=nnx.Rngs(0))
    dense = models.Block(**sizes, rngs=nnx.Rngs(0))
    for mine, theirs in ((dense.up, moe.experts_up), (dense.down, moe.experts_down)):
        mine.kernel[...], mine.bias[...] = theirs.kernel[...][0], theirs.bias[...][0]
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 6, WIDTH)), "f")
    np.testing.assert_allclose(moe(x)[0], dense(x), atol=1e-6)


SIZES = {
    "vocab_size": 32,
    "max_length": 12,
    "num_layers": 3,
    "width": WIDTH,
    "num_heads": 2,
}


@functools.cache
def build(**kwargs):
    return nnx.jit(
        lambda: models.GPT(**SIZES, num_experts=EXPERTS, **kwargs, rngs=nnx.Rngs(0))
    )()


def batch_of(rows=8):
    tokens = np.random.default_rng(1).integers(0, 32, (rows, 13)).astype(np.int32)
    lengths = (np.arange(rows) % 6 + 7).astype(np.int32)
    weights = (np.arange(12) < lengths[:, None]).astype(np.float32)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "lengths": lengths,
        "weights": weights,
    }


def row_keys(rows=8):
    return jax.random.split(jax.random.key(3), rows)


@functools.partial(jax.jit, static_argnums=0)
def _loss(graphdef, params, batch, keys):
    return nnx.merge(graphdef, params).loss(batch, keys=keys)[0]


def loss_of(model, batch, keys):
    return _loss(*nnx.split(model), batch, keys)


def test_training_adds_the_auxiliary_loss_and_evaluation_does_not():
    batch = batch_of()
    model = build()
    silent = nnx.clone(model)
    silent.blocks.balance_weight = silent.blocks.router_z_weight = 0.0
    plain = loss_of(silent, batch, row_keys())
    np.testing.assert_array_equal(loss_of(model, batch, None), plain)
    _, extra = jax.jit(
        lambda m: m._hidden_states(batch["tokens"], lengths=batch["lengths"])
    )(model)
    added = np.sum(np.asarray(extra) * batch["weights"].sum(1))
    got = loss_of(model, batch, row_keys()) - plain
    np.testing.assert_allclose(got, added, rtol=1e-4)


@pytest.mark.parametrize("change", [{"layers": "unroll"}, {"remat": "block"}])
@pytest.mark.parametrize("kept", [None, 5])
def test_how_the_stack_runs_changes_nothing(change, kept):
    def found(model):
        if kept is not None:
            model = token_dropping.with_random_ltd(model, num_kept=kept)
        return loss_of(model, batch_of(), row_keys())

    np.testing.assert_allclose(found(build(**change)), found(build()), rtol=1e-6)


def test_experts_see_kept_tokens_only():
    block = block_of(capacity_factor=0.75)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 12, WIDTH)), "f")
    kept = jnp.array([[0, 3, 4, 9], [1, 2, 8, 11]])
    y, loss = token_dropping.drop_tokens(block, x, kept)
    rows = jnp.arange(2)[:, None]
    # Capacity, routing and losses are those of a row of four tokens.
    alone, loss_alone = block(x[rows, kept])
    np.testing.assert_array_equal(y[rows, kept], alone)
    np.testing.assert_array_equal(loss, loss_alone)
    np.testing.assert_array_equal(y[0, 1:3], x[0, 1:3])


@functools.cache
def one_step(num_devices, accumulation_steps):
    model = token_dropping.with_random_ltd(build(), num_kept=6)
    graphdef, params = nnx.split(model, nnx.Param)
    tx = optax.chain(optimizers.pmean_grads("data"), optax.sgd(0.5))
    with jax.set_mesh(distributed.data_mesh(num_devices)):
        step_fn = training.data_parallel_step(
            lambda params, batch, keys: nnx.merge(graphdef, params).loss(
                batch, keys=keys
            ),
            tx,
            accumulation_steps=accumulation_steps,
        )
        state = training.TrainState.create(jax.tree.map(jnp.copy, params), tx)
        batch = distributed.shard_batch(batch_of())
        return jax.device_get(step_fn(state, batch, jax.random.key(0))[0].params)


@pytest.mark.parametrize(("num_devices", "accumulation_steps"), [(8, 1), (1, 4)])
def test_a_step_does_not_depend_on_devices_or_accumulation(
    num_devices, accumulation_steps
):
    pairs = zip(
        jax.tree.leaves(one_step(num_devices, accumulation_steps)),
        jax.tree.leaves(one_step(1, 1)),
        strict=True,
    )
    for got, want in pairs:
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_decay_takes_the_kernels_of_experts_and_not_their_biases():
    mask = nnx.to_pure_dict(models.decay_mask(nnx.state(build())))["blocks"]
    assert mask["experts_up"] == {"kernel": True, "bias": False}
    assert mask["router"] == {"kernel": True, "bias": False}


def test_the_compiler_counts_the_operations_of_the_formula():
    sizes = {"vocab_size": 64, "max_length": 256, "num_layers": 2, "width": 512}
    model = nnx.eval_shape(
        lambda: models.GPT(
            **sizes, num_heads=4, num_experts=4, layers="unroll", rngs=nnx.Rngs(0)
        )
    )
    graphdef, params = nnx.split(model)
    tokens = jax.ShapeDtypeStruct((1, 256), jnp.int32)
    call = jax.jit(lambda p, t: nnx.merge(graphdef, p)(t))
    counted = call.lower(params, tokens).compile().cost_analysis()["flops"]
    # Norms, softmax and GELU are not in the formula.
    assert abs(counted / model.forward_flops(256) - 1) < 0.03


def test_capacity_is_exact():
    capacity = functools.partial(_flops.expert_capacity, num_selected=1)
    assert capacity(10, num_experts=11, capacity_factor=1.1) == 1
    assert capacity(11, num_experts=11, capacity_factor=1.1) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_selected": 5}, "num_selected=5"),
        ({"num_selected": 0}, "num_selected=0"),
        ({"capacity_factor": 0.0}, "capacity_factor"),
        ({"norm": "post"}, "norm='pre'"),
    ],
)
def test_what_cannot_be_built_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        block_of(**change)
