"""Gather, compute, scatter, against a full-length computation with a dense mask."""

import functools

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dataeff_jax import models, token_dropping

BATCH, SIZE, WIDTH, HEADS = 3, 12, 16, 2
KEPT = np.array([[0, 2, 3, 7, 11], [1, 4, 5, 6, 9], [0, 1, 8, 10, 11]])


def block_of(**kwargs):
    sizes = {"width": WIDTH, "num_heads": HEADS, "ffw_width": 24, "stddev": 0.3}
    return models.Block(**sizes, **kwargs, rngs=nnx.Rngs(0))


def norm(x, p):
    mean = x.mean(-1, keepdims=True)
    var = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(var + 1e-5) * p["scale"] + p["bias"]


def turn(x, positions):
    half = x.shape[-1] // 2
    angle = positions[:, :, None, None] / 10000.0 ** (jnp.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def dense_layer(p, x, allowed, *, kind, positions):
    """The whole row with a dense mask, allowed [B, S, S]; written from the formulas."""

    def linear(x, p):
        return x @ p["kernel"] + p["bias"]

    def attend(x):
        parts = linear(x, p["qkv"]).reshape(BATCH, SIZE, 3, HEADS, WIDTH // HEADS)
        q, k, v = parts[:, :, 0], parts[:, :, 1], parts[:, :, 2]
        if kind == "rope":
            q, k = turn(q, positions), turn(k, positions)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(WIDTH // HEADS)
        some = allowed.any(-1)[:, None, :, None]
        scores = jnp.where(allowed[:, None], scores, -jnp.inf)
        weights = jax.nn.softmax(jnp.where(some, scores, 0.0), -1)
        out = jnp.einsum("bhqk,bkhd->bqhd", jnp.where(some, weights, 0.0), v)
        return linear(out.reshape(BATCH, SIZE, WIDTH), p["out"])

    def feed(x):
        approximate = kind != "post"
        return linear(jax.nn.gelu(linear(x, p["up"]), approximate), p["down"])

    with jax.numpy_rank_promotion("allow"):
        if kind == "post":
            x = norm(x + attend(x), p["norm1"])
            return norm(x + feed(x), p["norm2"])
        x = x + attend(norm(x, p["norm1"]))
        return x + feed(norm(x, p["norm2"]))


SEGMENTS = np.array(
    [
        [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3],
        [1, 1, 1, 1, 1, 1, 1, 2, 2, 0, 0, 0],
        [1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2],
    ]
)
PLACES = np.array(
    [
        [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3],
        [0, 1, 2, 3, 4, 5, 6, 0, 1, 0, 0, 0],
        [0, *range(11)],
    ]
)
CASES = {
    "causal": ({}, {}),
    "bidirectional": ({"causal": False}, {}),
    "post": ({"causal": False, "norm": "post", "activation": "gelu"}, {}),
    "padded": ({}, {"lengths": np.array([12, 5, 9], np.int32)}),
    "padded encoder": ({"causal": False}, {"lengths": np.array([12, 5, 9], np.int32)}),
    "packed": ({}, {"segment_ids": SEGMENTS}),
    "packed encoder": ({"causal": False}, {"segment_ids": SEGMENTS}),
    "rope": ({"rope": True}, {"positions": None}),
    "packed rope": ({"rope": True}, {"segment_ids": SEGMENTS, "positions": PLACES}),
}


@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_equal_a_dense_masked_reference(case):
    options, inputs = CASES[case]
    inputs = {k: None if v is None else jnp.asarray(v) for k, v in inputs.items()}
    graphdef, params = nnx.split(block_of(**options))
    kept = np.zeros((BATCH, SIZE), bool)
    np.put_along_axis(kept, KEPT, True, axis=1)
    allowed = kept[:, None, :] & kept[:, :, None]
    if options.get("causal", True):
        allowed = allowed & np.tri(SIZE, dtype=bool)[None]
    if "lengths" in inputs:
        real = np.arange(SIZE) < np.asarray(inputs["lengths"])[:, None]
        # Padding computes no attention of its own, either.
        allowed = allowed & real[:, None, :] & real[:, :, None]
    if "segment_ids" in inputs:
        same = SEGMENTS[:, :, None] == SEGMENTS[:, None, :]
        allowed = allowed & same & (SEGMENTS > 0)[:, :, None]
    places = PLACES if inputs.get("positions") is not None else np.arange(SIZE)[None]
    kind = "rope" if options.get("rope") else options.get("norm", "pre")

    def weigh(y):
        draw = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
        return jnp.sum(y * draw)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def ours(params, x):
        block = nnx.merge(graphdef, params)
        y = token_dropping.drop_tokens(block, x, jnp.asarray(KEPT), **inputs)
        return weigh(y), y

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def reference(params, x):
        p = nnx.to_pure_dict(params)
        y = dense_layer(p, x, jnp.asarray(allowed), kind=kind, positions=places)
        y = jnp.where(kept[..., None], y, x)
        return weigh(y), y

    x = np.random.default_rng(0).standard_normal((BATCH, SIZE, WIDTH)).astype("f")
    (_, y), gradients = ours(params, x)
    (_, want), wanted = reference(params, x)
    np.testing.assert_array_equal(np.asarray(y)[~kept], x[~kept])
    pairs = zip(
        jax.tree.leaves((y, gradients)), jax.tree.leaves((want, wanted)), strict=True
    )
    for got, expected in pairs:
        # Relative to the largest entry: float32 sums of a few hundred terms.
        error = np.abs(got - expected).max() / np.abs(expected).max()
        assert error < 1e-5


def test_the_gradient_is_that_of_indexing_by_autodiff():
    """Gather and scatter as JAX differentiates them, in isolation and together."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((BATCH, SIZE, 4)), "f")
    rows = np.arange(BATCH)[:, None]

    def block(x):
        return jnp.sin(x) * jnp.cumsum(x, axis=1)

    def plain(x):
        return jnp.sum(jnp.exp(x.at[rows, KEPT].set(block(x[rows, KEPT]))))

    def ours(x):
        return jnp.sum(jnp.exp(token_dropping.drop_tokens(block, x, jnp.asarray(KEPT))))

    np.testing.assert_allclose(jax.grad(ours)(x), jax.grad(plain)(x), rtol=1e-6)


def test_dropped_tokens_pass_by_bit_for_bit_in_16_bits():
    graphdef, params = nnx.split(block_of())
    x = jnp.asarray(np.random.default_rng(0).standard_normal((BATCH, SIZE, WIDTH)))
    x = x.astype(jnp.bfloat16)
    y = token_dropping.drop_tokens(nnx.merge(graphdef, params), x, jnp.asarray(KEPT))
    assert y.dtype == jnp.bfloat16
    dropped = np.ones((BATCH, SIZE), bool)
    np.put_along_axis(dropped, KEPT, False, axis=1)
    np.testing.assert_array_equal(np.asarray(y)[dropped], np.asarray(x)[dropped])


@pytest.mark.parametrize("rope", [False, True])
def test_no_kept_set_lets_a_causal_block_look_ahead(rope):
    block = block_of(rope=rope)
    keys = jax.random.split(jax.random.key(1), BATCH)
    call = jax.jit(lambda x, i: token_dropping.drop_tokens(block, x, i, positions=None))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((BATCH, SIZE, WIDTH)), "f")
    for num_kept in (1, 5, 11):
        kept = token_dropping.sample_token_indices(keys, SIZE, num_kept=num_kept)
        plain = np.asarray(call(x, kept))
        for place in (3, 7, 11):
            changed = np.asarray(call(x.at[:, place:].add(1.0), kept))
            np.testing.assert_array_equal(plain[:, :place], changed[:, :place])


def test_padding_is_found_by_what_was_kept():
    """Eight causal tokens, three of them padding, of which one is kept."""
    block = block_of()
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 8, WIDTH)), "f")
    kept, lengths = jnp.array([[1, 2, 5, 7]]), jnp.array([5], jnp.int32)
    seen = {}

    def look(x, *, lengths, mask):
        seen.update(lengths=lengths, mask=mask)
        return block(x, lengths=lengths)

    real = np.arange(8) < 5
    mask = (np.tri(8, dtype=bool) & real[None])[None, None]
    y = token_dropping.drop_tokens(look, x, kept, lengths=lengths, mask=mask)
    assert seen["lengths"].tolist() == [2]
    assert seen["mask"][0, 0].astype(int).tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 0, 0],
    ]
    alone = block(x[:, 1:3])
    np.testing.assert_allclose(y[:, 1:3], alone, atol=1e-6)
    others = np.array([0, 3, 4, 6])
    np.testing.assert_array_equal(y[:, others], x[:, others])


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x, *, mask=None):
        attend = linen.MultiHeadDotProductAttention(num_heads=2)
        x = x + attend(linen.LayerNorm()(x), mask=mask)
        return x + linen.Dense(x.shape[-1])(linen.gelu(linen.LayerNorm()(x)))


def test_a_linen_block_drops_by_the_pure_core():
    block = LinenBlock()
    x = jnp.asarray(np.random.default_rng(0).standard_normal((BATCH, SIZE, WIDTH)), "f")
    mask = jnp.tril(jnp.ones((1, 1, SIZE, SIZE), bool))
    params = block.init(jax.random.key(0), x)

    def apply(x, **kwargs):
        return block.apply(params, x, **kwargs)

    with jax.numpy_rank_promotion("allow"):
        y = token_dropping.drop_tokens(apply, x, jnp.asarray(KEPT), mask=mask)
        for row in range(BATCH):
            kept = KEPT[row]
            alone = apply(x[row : row + 1, kept], mask=mask[..., :5, :5])
            np.testing.assert_allclose(y[row, kept], alone[0], atol=1e-5)
    dropped = np.setdiff1d(np.arange(SIZE), KEPT[0])
    np.testing.assert_array_equal(y[0, dropped], x[0, dropped])


def test_a_block_may_return_more_than_tokens():
    x, kept = jnp.ones((1, 4, 2)), jnp.array([[0, 3]])
    y, count = token_dropping.drop_tokens(lambda x: (-x, x.shape[1]), x, kept)
    assert count == 2
    assert y[0, :, 0].tolist() == [-1, 1, 1, -1]


def test_all_tokens_kept_call_the_block_as_it_is():
    x, kept = jnp.ones((1, 4, 2)), jnp.arange(4)[None]
    marker = object()
    assert token_dropping.drop_tokens(lambda x, a: a, x, kept, a=marker) is marker


@pytest.mark.parametrize(
    ("kept", "arguments", "message"),
    [
        (np.zeros((2, 3), int), {}, r"\[B, K\]"),
        (np.zeros((1, 0), int), {}, "1 <= K"),
        (np.zeros((1, 5), int), {}, "K <= S"),
        (np.array([[0, 2]]), {"bias": jnp.ones((1, 2, 4, 4))}, "'bias' has shape"),
    ],
)
def test_what_does_not_fit_is_refused(kept, arguments, message):
    with pytest.raises(ValueError, match=message):
        token_dropping.drop_tokens(
            lambda x, **_: x, jnp.ones((1, 4, 2)), jnp.asarray(kept), **arguments
        )


def test_a_block_that_changes_its_tokens_shape_is_refused():
    with pytest.raises(ValueError, match="keeps the shape"):
        token_dropping.drop_tokens(
            lambda x: x[..., :1], jnp.ones((1, 4, 2)), jnp.array([[0, 2]])
        )
