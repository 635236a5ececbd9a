"""Layers that the blocks are made of: norm, dropout per row, rotary positions."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from dataeff_jax import typing
from dataeff_jax.models import _arrays


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
        arrays = _arrays.vary_together(x, self.scale[...], self.bias[...])
        return _layer_norm(self.epsilon, *arrays)


def _row(vector, like):
    """A vector [D] that broadcasts over the leading axes of `like` [..., D]."""
    return vector.reshape((1,) * (like.ndim - 1) + (-1,))


def _sum_rows(x):
    """Sum over all but the last axis, [..., D] -> [D]."""
    return jnp.sum(x, axis=tuple(range(x.ndim - 1)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer_norm(epsilon, x, scale, bias):
    return _layer_norm_forward(epsilon, x, scale, bias)[0]


def _layer_norm_forward(epsilon, x, scale, bias):
    y = x.astype(jnp.float32)
    mean = jnp.mean(y, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(y - mean), axis=-1, keepdims=True)
    rstd = jax.lax.rsqrt(variance + epsilon)
    out = (y - mean) * rstd * _row(scale, x) + _row(bias, x)
    # The input and two numbers a row are all that is kept; autodiff keeps far more.
    return out.astype(x.dtype), (x, mean, rstd, scale)


def _layer_norm_backward(epsilon, residuals, dout):
    x, mean, rstd, scale = residuals
    dout = dout.astype(jnp.float32)
    normal = (x.astype(jnp.float32) - mean) * rstd
    dnormal = dout * _row(scale, x)
    along = jnp.mean(dnormal * normal, axis=-1, keepdims=True)
    dx = rstd * (dnormal - jnp.mean(dnormal, axis=-1, keepdims=True) - normal * along)
    return dx.astype(x.dtype), _sum_rows(dout * normal), _sum_rows(dout)


_layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


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
        y = self.product(x)
        return y + _row(self.bias[...].astype(x.dtype), y)

    def product(self, x: typing.Array) -> typing.Array:
        """The matrix product alone, without the bias."""
        return jnp.dot(x, self.kernel[...].astype(x.dtype))


def biased_gelu(
    x: typing.Array, bias: typing.Array, *, approximate: bool
) -> typing.Array:
    """GELU of x + bias, which keeps x alone for the backward pass.

    y Phi(y) with y = x + bias; with `approximate` Phi(y) is
    (1 + tanh(sqrt(2 / pi) (y + 0.044715 y^3))) / 2.

    Args:
        x: The matrix product before its bias, [..., F].
        bias: float32[F].
        approximate: Whether to take the tanh form (GPT-2), not the exact one (BERT).

    Returns:
        The array, in the dtype of `x`.

    Example:
        >>> y = biased_gelu(jnp.ones((1, 2)), jnp.zeros(2), approximate=False)
        >>> bool(jnp.allclose(y, 0.8413447))
        True

    References:
        Hendrycks and Gimpel, GELUs, 2016, https://arxiv.org/abs/1606.08415
    """
    return _biased_gelu(approximate, *_arrays.vary_together(x, bias))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _biased_gelu(approximate, x, bias):
    y = x.astype(jnp.float32) + _row(bias, x)
    return (y * _gaussian_cdf(approximate, y)[0]).astype(x.dtype)


def _gaussian_cdf(approximate, y):
    """Phi(y) and its derivative, exact or in the tanh form."""
    if not approximate:
        density = jnp.exp(-0.5 * jnp.square(y)) * (0.5 / math.pi) ** 0.5
        return 0.5 * (1 + jax.lax.erf(y * 0.5**0.5)), density
    factor = (2 / math.pi) ** 0.5
    tanh = jnp.tanh(factor * (y + 0.044715 * y * y * y))
    slope = factor * (1 + 3 * 0.044715 * y * y)
    return 0.5 * (1 + tanh), 0.5 * (1 - tanh * tanh) * slope


def _biased_gelu_forward(approximate, x, bias):
    return _biased_gelu(approximate, x, bias), (x, bias)


def _biased_gelu_backward(approximate, residuals, dout):
    x, bias = residuals
    y = x.astype(jnp.float32) + _row(bias, x)
    cdf, density = _gaussian_cdf(approximate, y)
    dx = dout.astype(jnp.float32) * (cdf + y * density)
    return dx.astype(x.dtype), _sum_rows(dx)


_biased_gelu.defvjp(_biased_gelu_forward, _biased_gelu_backward)


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
