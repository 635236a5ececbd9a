"""The fused loss against log_softmax, and what it keeps for the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dataeff_jax import models


def reference(hidden, embedding, bias, targets, weights):
    logits = jnp.einsum("td,vd->tv", hidden, embedding) + bias[None]
    log_probabilities = jax.nn.log_softmax(logits)
    right = jnp.take_along_axis(log_probabilities, targets[:, None], axis=-1)[:, 0]
    return -jnp.sum(right * weights)


def problem(tokens=21, width=8, vocab=32, seed=0):
    draw = np.random.default_rng(seed)
    return (
        jnp.asarray(draw.standard_normal((tokens, width)), jnp.float32),
        jnp.asarray(draw.standard_normal((vocab, width)), jnp.float32),
        jnp.asarray(draw.standard_normal(vocab), jnp.float32),
        jnp.asarray(draw.integers(0, vocab, tokens), jnp.int32),
        jnp.asarray(draw.integers(0, 2, tokens), jnp.float32),
    )


def ours(chunk_size):
    def loss(hidden, embedding, bias, targets, weights):
        return models.cross_entropy(
            hidden,
            embedding,
            targets,
            bias=bias,
            weights=weights,
            chunk_size=chunk_size,
        )

    return loss


@pytest.mark.parametrize("chunk_size", [1, 5, 7, 21, 512])
def test_value_and_gradients_equal_log_softmax(chunk_size):
    arrays = problem()
    numbers = (0, 1, 2, 4)
    loss = ours(chunk_size)
    value, gradients = jax.jit(jax.value_and_grad(loss, numbers))(*arrays)
    expected, theirs = jax.jit(jax.value_and_grad(reference, numbers))(*arrays)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(loss)(*arrays), expected, rtol=1e-6)
    for a, b in zip(gradients, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_gradients_scale_with_the_cotangent():
    hidden, embedding, _, targets, _ = problem()

    def loss(hidden, factor):
        return factor * models.cross_entropy(hidden, embedding, targets)

    gradient = jax.jit(jax.grad(loss))
    one, three = gradient(hidden, 1.0), gradient(hidden, 3.0)
    np.testing.assert_allclose(3 * one, three, rtol=1e-6)


def test_bfloat16_hidden_states_give_a_float32_loss_and_embedding_gradient():
    hidden, embedding, _, targets, _ = problem()

    def loss(hidden, embedding):
        return models.cross_entropy(hidden, embedding, targets)

    arguments = hidden.astype(jnp.bfloat16), embedding
    run = jax.jit(jax.value_and_grad(loss, (0, 1)))
    value, (dhidden, dembedding) = run(*arguments)
    assert (value.dtype, dhidden.dtype, dembedding.dtype) == (
        jnp.float32,
        jnp.bfloat16,
        jnp.float32,
    )
    np.testing.assert_allclose(value, loss(hidden, embedding), rtol=1e-2)


def test_the_backward_pass_keeps_nothing_over_tokens_and_vocabulary():
    hidden, embedding, bias, targets, weights = problem(tokens=64, vocab=48)

    def loss(hidden, embedding, bias):
        return ours(16)(hidden, embedding, bias, targets, weights)

    _, pull = jax.vjp(loss, hidden, embedding, bias)
    sizes = {leaf.size for leaf in jax.tree.leaves(pull)}
    assert max(sizes) < 64 * 48, sizes


def test_logits_exist_for_one_chunk_only():
    arrays = problem(tokens=64, vocab=48)
    text = str(jax.make_jaxpr(jax.grad(ours(16), (0, 1, 2)))(*arrays))
    assert "f32[16,48]" in text
    assert "f32[64,48]" not in text and "f32[4,16,48]" not in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": jnp.zeros(3, jnp.int32)}, "leading axes must be equal"),
        ({"weights": jnp.zeros(3)}, "must be that of targets"),
        ({"chunk_size": 0}, "chunk_size=0"),
    ],
    ids=["targets", "weights", "chunk"],
)
def test_what_does_not_fit_is_said(change, message):
    hidden, embedding, _, targets, _ = problem()
    arguments = {"hidden": hidden, "embedding": embedding, "targets": targets} | change
    with pytest.raises(ValueError, match=message):
        models.cross_entropy(**arguments)


def test_classification_counts_weighted_rows():
    logits = jnp.array([[2.0, 0.0], [0.0, 1.0], [5.0, 0.0]])
    labels = jnp.array([0, 0, 1])
    weights = jnp.array([1.0, 1.0, 0.0])
    expected = np.log1p(np.exp(-2.0)) + np.log1p(np.exp(1.0))
    loss = models.classification_loss(logits, labels, weights=weights)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert float(models.num_correct(logits, labels, weights=weights)) == 1.0
    assert float(models.num_correct(logits, labels)) == 1.0
