"""Layers that the blocks are made of: norm, dropout per row, rotary positions."""

import jax
import jax.numpy as jnp
from flax import nnx

from dataeff_jax import typing


def normal(stddev: float) -> nnx.Initializer:
    """The papers' initialiser, a normal with the given deviation.

    Args:
        stddev: Standard deviation.

    Returns:
        An initialiser.

    Example:
        >>> normal(0.02)(jax.random.key(0), (2, 3), jnp.float32).shape
        (2, 3)
    """
    return nnx.initializers.normal(stddev)


class LayerNorm(nnx.Module):
    """Layer norm over the last axis, (x - mean) / sqrt(var + epsilon) * scale + bias.

    Statistics are float32, the output has the dtype of the input.

    Args:
        width: D.
        epsilon: Added to the variance; 1e-5 in GPT-2, 1e-12 in BERT.

    Example:
        >>> LayerNorm(4, epsilon=1e-5)(jnp.ones((2, 4))).shape
        (2, 4)

    References:
        Ba et al., Layer normalization, 2016, https://arxiv.org/abs/1607.06450
    """

    def __init__(self, width: int, *, epsilon: float):
        self.scale = nnx.Param(jnp.ones(width, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(width, jnp.float32))
        self.epsilon = epsilon

    def __call__(self, x: typing.Array) -> typing.Array:
        """Normalises x [..., D]."""
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(y), axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(variance + self.epsilon)
        shape = (1,) * (x.ndim - 1) + (-1,)
        y = y * self.scale[...].reshape(shape) + self.bias[...].reshape(shape)
        return y.astype(x.dtype)


class Linear(nnx.Module):
    """x kernel + bias, with float32 parameters and the compute dtype of `x`.

    Args:
        in_width: Last axis of the input.
        out_width: Last axis of the output.
        stddev: Standard deviation of the kernel's normal initialiser.
        rngs: Source of the key, nnx.Rngs.

    Example:
        >>> Linear(3, 4, stddev=0.02, rngs=nnx.Rngs(0))(jnp.ones((2, 3))).shape
        (2, 4)
    """

    def __init__(self, in_width: int, out_width: int, *, stddev: float, rngs: nnx.Rngs):
        shape = (in_width, out_width)
        self.kernel = nnx.Param(normal(stddev)(rngs.params(), shape, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(out_width, jnp.float32))

    def __call__(self, x: typing.Array) -> typing.Array:
        """Applies the layer to x [..., in_width]."""
        y = jnp.dot(x, self.kernel[...].astype(x.dtype))
        bias = self.bias[...].astype(x.dtype)
        return y + bias.reshape((1,) * (x.ndim - 1) + (-1,))


class Embedding(nnx.Module):
    """A table of vectors [V, D] under the name `embedding`.

    Args:
        size: Number of vectors, V.
        width: D.
        stddev: Standard deviation of the normal initialiser.
        rngs: Source of the key, nnx.Rngs.

    Example:
        >>> Embedding(5, 4, stddev=0.02, rngs=nnx.Rngs(0))(jnp.zeros(3, int)).shape
        (3, 4)
    """

    def __init__(self, size: int, width: int, *, stddev: float, rngs: nnx.Rngs):
        shape = (size, width)
        self.embedding = nnx.Param(normal(stddev)(rngs.params(), shape, jnp.float32))

    def __call__(self, ids: typing.Array) -> typing.Array:
        """Looks ids int32[...] up: [..., D], float32."""
        return jnp.take(self.embedding[...], ids, axis=0)


def fold_rows(keys: typing.KeyArray | None, data) -> typing.KeyArray | None:
    """Folds one number into the key of every row; None stays None.

    Args:
        keys: One key a row, [B], or None.
        data: An integer, possibly traced: a layer's index or a place in a layer.

    Returns:
        Keys [B] or None.

    Example:
        >>> fold_rows(jax.random.split(jax.random.key(0), 3), 1).shape
        (3,)
    """
    if keys is None:
        return None
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, data)


def dropout(
    x: typing.Array, *, rate: float, keys: typing.KeyArray | None
) -> typing.Array:
    """Zeroes entries with probability `rate` and scales the rest by 1 / (1 - rate).

    Each row draws from its own key, so that the result depends neither on the split of
    the batch over devices nor on accumulation.

    Args:
        x: [B, ...].
        rate: Probability, 0 to below 1.
        keys: One key a row, [B]; None means no dropout.

    Returns:
        The array, in the dtype of `x`.

    Example:
        >>> dropout(jnp.ones((2, 3)), rate=0.5, keys=None).sum().item()
        6.0
    """
    if keys is None or rate == 0.0:
        return x
    draw = jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, x.shape[1:]))
    return jnp.where(draw(keys), x / (1.0 - rate), jnp.zeros((), x.dtype))


def rotate(x: typing.Array, positions: typing.Array) -> typing.Array:
    """Rotary position embedding: pairs (x_i, x_{i + D/2}) turn by p 10000^(-2 i / D).

    Args:
        x: Queries or keys [B, S, H, D], D even.
        positions: int32[B, S], or [1, S] if all rows have the same.

    Returns:
        The rotated array, in the dtype of `x`.

    Example:
        >>> x = jnp.ones((1, 3, 2, 4))
        >>> bool((rotate(x, jnp.arange(3)[None])[:, 0] == x[:, 0]).all())
        True

    References:
        Su et al., RoFormer, 2021, https://arxiv.org/abs/2104.09864
    """
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions.astype(jnp.float32)[..., None] * frequency[None, None]
    cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]  # [B, S, 1, D/2]
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate(
        [left * cos - right * sin, right * cos + left * sin], axis=-1
    )
    return turned.astype(x.dtype)
