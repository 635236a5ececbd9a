"""Losses: cross entropy that never keeps log-probabilities over the vocabulary.

A vocabulary of 50,000 words makes the logits of 8,192 tokens a 1.6 GB array, and
autodiff of log_softmax keeps it (and a copy) until the backward pass. `cross_entropy`
works through the tokens in chunks and forms softmax - onehot at once, so what the
backward pass receives is the finished gradient: [T, D] and [V, D].
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dataeff_jax import typing
from dataeff_jax.models import _arrays

_LOGITS = 2**26  # logits of a chunk: 256 MiB in float32


def cross_entropy(
    hidden: typing.Array,
    embedding: typing.Array,
    targets: typing.Array,
    *,
    bias: typing.Array | None = None,
    weights: typing.Array | None = None,
    chunk_size: int | None = None,
) -> typing.Array:
    """Summed cross entropy of tied-embedding logits, sum_t w_t (lse_t - z_t[target_t]).

    z = hidden embedding^T + bias, in float32. Under `jax.grad` the forward pass forms
    (softmax - onehot) w per chunk and multiplies it out to the gradients of `hidden`,
    `embedding` and `bias`; logits of one chunk are all that ever exists.

    Args:
        hidden: Final hidden states [..., D], in the compute dtype.
        embedding: Output embedding [V, D].
        targets: int32[...], the right word of each token.
        bias: float32[V] or None.
        weights: float32[...] of each token, 0 where it is not counted; None means 1.
        chunk_size: Tokens a chunk; None means as many as have 2**26 logits (256 MiB).

    Returns:
        float32[], the sum (not the mean) over all tokens.

    Raises:
        ValueError: If shapes do not fit or `chunk_size` is below 1.

    Example:
        >>> hidden, embedding = jnp.zeros((2, 3, 8)), jnp.ones((16, 8))
        >>> loss = cross_entropy(hidden, embedding, jnp.zeros((2, 3), jnp.int32))
        >>> bool(jnp.allclose(loss, 6 * jnp.log(16.0)))
        True
    """
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets has shape {targets.shape} but hidden has {hidden.shape}; the "
            "leading axes must be equal."
        )
    if weights is not None and weights.shape != targets.shape:
        raise ValueError(
            f"weights has shape {weights.shape}; it must be that of targets, "
            f"{targets.shape}."
        )
    if chunk_size is None:
        chunk_size = max(_LOGITS // embedding.shape[0], 1)
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be at least 1.")
    hidden = hidden.reshape(-1, hidden.shape[-1])  # [T, D]
    targets = targets.reshape(-1)
    weights = None if weights is None else weights.reshape(-1).astype(jnp.float32)
    arrays = _arrays.vary_together(hidden, embedding, bias, targets, weights)
    return _cross_entropy(chunk_size, *arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(chunk_size, hidden, embedding, bias, targets, weights):
    table = embedding.astype(hidden.dtype)

    def step(total, part):
        hidden, targets, weights = part
        losses, _, _ = _chunk_losses(hidden, table, bias, targets)
        return total + jnp.sum(losses * weights), None

    parts = _chunks(chunk_size, hidden, targets, weights)
    (total,) = _vary_like(hidden, jnp.zeros((), jnp.float32))
    return _scan(step, total, parts)[0]


def _cross_entropy_forward(chunk_size, hidden, embedding, bias, targets, weights):
    """The loss, and as residuals its gradients for a cotangent of 1."""
    table = embedding.astype(hidden.dtype)

    def step(carry, part):
        total, dtable, dbias = carry
        hidden, targets, weights = part
        losses, logits, lse = _chunk_losses(hidden, table, bias, targets)
        dlogits = _softmax_minus_onehot(logits, lse, targets) * weights[:, None]
        dbias = None if dbias is None else dbias + jnp.sum(dlogits, axis=0)
        dlogits = dlogits.astype(hidden.dtype)
        dhidden = _dot("tv,vd->td", dlogits, table).astype(hidden.dtype)
        dtable = dtable + _dot("tv,td->vd", dlogits, hidden)
        return (total + jnp.sum(losses * weights), dtable, dbias), (dhidden, losses)

    zeros = (jnp.zeros((), jnp.float32), jnp.zeros(embedding.shape, jnp.float32))
    zeros += (None if bias is None else jnp.zeros(bias.shape, jnp.float32),)
    parts = _chunks(chunk_size, hidden, targets, weights)
    carry, (dhidden, losses) = _scan(step, _vary_like(hidden, *zeros), parts)
    total, dtable, dbias = carry
    dbias = None if bias is None else jnp.asarray(dbias, bias.dtype)
    dhidden = dhidden.reshape(-1, hidden.shape[-1])[: hidden.shape[0]]
    dweights = None if weights is None else losses.reshape(-1)[: hidden.shape[0]]
    gradients = (
        dhidden,
        dtable.astype(embedding.dtype),
        dbias,
        np.zeros(targets.shape, jax.dtypes.float0),
        dweights,
    )
    return total, gradients


def _cross_entropy_backward(chunk_size, gradients, cotangent):
    dhidden, dtable, dbias, dtargets, dweights = gradients

    def scale(x):
        return None if x is None else (x * cotangent).astype(x.dtype)

    return scale(dhidden), scale(dtable), scale(dbias), dtargets, scale(dweights)


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def _scan(step, carry, parts):
    """`lax.scan`; a single chunk runs without the loop, which would copy its arrays."""
    if parts[0].shape[0] > 1:
        return jax.lax.scan(step, carry, parts)
    carry, out = step(carry, tuple(part[0] for part in parts))
    return carry, jax.tree.map(lambda x: x[None], out)


def _dot(equation, x, y):
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


def _vary_like(x, *arrays):
    return _arrays.vary_together(x, *arrays)[1:]


def _chunks(chunk_size, hidden, targets, weights):
    """Tokens in chunks [N, C, ...]; what fills the last one has weight 0."""
    tokens = hidden.shape[0]
    chunk_size = min(chunk_size, max(tokens, 1))
    extra = -tokens % chunk_size
    if weights is None:
        (weights,) = _vary_like(hidden, jnp.ones(tokens, jnp.float32))
    hidden = jnp.pad(hidden, ((0, extra), (0, 0)))
    shape = (-1, chunk_size)
    return (
        hidden.reshape(*shape, hidden.shape[-1]),
        jnp.pad(targets, (0, extra)).reshape(shape),
        jnp.pad(weights, (0, extra)).reshape(shape),
    )


def _chunk_losses(hidden, table, bias, targets):
    """Losses [T], logits [T, V] and log-normaliser [T] of one chunk, float32."""
    logits = _dot("td,vd->tv", hidden, table)
    logits = logits if bias is None else logits + bias.astype(jnp.float32)[None]
    lse = jax.nn.logsumexp(logits, axis=-1)
    right = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return lse - right, logits, lse


def _softmax_minus_onehot(logits, lse, targets):
    probabilities = jnp.exp(logits - lse[:, None])
    words = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 1)
    return jnp.where(words == targets[:, None], probabilities - 1, probabilities)


def token_losses(
    hidden: typing.Array,
    embedding: typing.Array,
    targets: typing.Array,
    *,
    bias: typing.Array | None = None,
) -> typing.Array:
    """Cross entropy of each token, the terms of `cross_entropy`; not for training.

    Args:
        hidden: Final hidden states [..., D], in the compute dtype.
        embedding: Output embedding [V, D].
        targets: int32[...], the right word of each token.
        bias: float32[V] or None.

    Returns:
        float32[...].
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    table = embedding.astype(hidden.dtype)
    chunk_size = max(_LOGITS // embedding.shape[0], 1)

    def step(_, part):
        return None, _chunk_losses(part[0], table, bias, part[1])[0]

    parts = _chunks(chunk_size, flat, targets.reshape(-1), None)
    losses = _scan(step, None, parts)[1].reshape(-1)
    return losses[: targets.size].reshape(targets.shape)


def classification_loss(
    logits: typing.Array, labels: typing.Array, *, weights: typing.Array | None = None
) -> typing.Array:
    """Summed cross entropy of a few classes, sum_b w_b (lse_b - z_b[label_b]).

    Args:
        logits: [B, C].
        labels: int32[B].
        weights: float32[B], 0 where a row is padding; None means 1.

    Returns:
        float32[].

    Example:
        >>> float(classification_loss(jnp.zeros((1, 4)), jnp.array([2]))) > 1.38
        True
    """
    logits = logits.astype(jnp.float32)
    right = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - right
    return jnp.sum(losses if weights is None else losses * weights)


def num_correct(
    logits: typing.Array, labels: typing.Array, *, weights: typing.Array | None = None
) -> typing.Array:
    """Number of rows whose largest logit is the label's; divide by the weights' sum.

    Args:
        logits: [B, C].
        labels: int32[B].
        weights: float32[B], 0 where a row is padding; None means 1.

    Returns:
        float32[].

    Example:
        >>> float(num_correct(jnp.eye(3), jnp.array([0, 1, 0])))
        2.0
    """
    right = (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)
    return jnp.sum(right if weights is None else right * weights)


def weight_sum(batch: typing.Batch, count: int) -> typing.Array | float:
    """What a summed loss is divided by: the weights' sum, or `count` without weights.

    Args:
        batch: A batch, with or without "weights".
        count: Number of predictions of the batch.

    Returns:
        float32[], or a Python float, which needs no sum over devices.

    Example:
        >>> weight_sum({}, 12)
        12.0
    """
    weights = batch.get("weights")
    return float(count) if weights is None else jnp.sum(weights.astype(jnp.float32))
