"""Kept tokens out of the residual stream, and back into it.

The three operations around a block that drops tokens. Each has the gradient of its own
reference: that of a gather adds into zeros, that of an overwriting scatter is zero at
the overwritten rows.

The kernels give one thread block to each kept row, so they read and write every kept
row once; `token_scatter` writes in place when the caller gives its array away. They
compile for the H200 without spills (18 to 62 registers a thread) and are NOT YET TIMED:
no table of bandwidth stands here, so the default is the reference.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.experimental import pallas as pl

from pallas_kernels import dispatch

_THREADS = 128  # of a warpgroup


def token_gather_reference(x: jax.Array, indices: jax.Array) -> jax.Array:
    """`token_gather` in jax.numpy.

    Args:
        x: [B, S, D].
        indices: int32[B, K].

    Returns:
        [B, K, D].

    Example:
        >>> x = jnp.arange(3.0).reshape(1, 3, 1)
        >>> token_gather_reference(x, jnp.array([[0, 2]])).ravel().tolist()
        [0.0, 2.0]
    """
    return jax.vmap(lambda x, i: x.at[i].get(mode="promise_in_bounds"))(x, indices)


def token_gather_norm_reference(
    x: jax.Array,
    indices: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    *,
    epsilon: float,
) -> tuple[jax.Array, jax.Array]:
    """`token_gather_norm` in jax.numpy.

    Args:
        x: [B, S, D].
        indices: int32[B, K].
        scale: float32[D].
        bias: float32[D].
        epsilon: Added to the variance.

    Returns:
        (rows [B, K, D], normalised rows [B, K, D]).

    Example:
        >>> x, one = jnp.array([[[1.0, -1.0]]]), jnp.ones(2)
        >>> index = jnp.zeros((1, 1), int)
        >>> y = token_gather_norm_reference(x, index, one, 0 * one, epsilon=0.0)[1]
        >>> y.ravel().tolist()
        [1.0, -1.0]
    """
    rows = token_gather_reference(x, indices)
    y = rows.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + epsilon)
    y = y * scale[None, None] + bias[None, None]
    return rows, y.astype(x.dtype)


def token_scatter_reference(
    x: jax.Array, indices: jax.Array, y: jax.Array
) -> jax.Array:
    """`token_scatter` in jax.numpy.

    Args:
        x: [B, S, D].
        indices: int32[B, K], without repetition in a row.
        y: [B, K, D].

    Returns:
        [B, S, D].

    Example:
        >>> x, y = jnp.zeros((1, 3, 1)), jnp.ones((1, 1, 1))
        >>> token_scatter_reference(x, jnp.array([[1]]), y).ravel().tolist()
        [0.0, 1.0, 0.0]
    """
    put = functools.partial(_overwrite, mode="promise_in_bounds", unique_indices=True)
    return jax.vmap(put)(x, indices, y)


def _overwrite(x, indices, y, **options):
    return x.at[indices].set(y, **options)


def _plgpu() -> Any:
    # Not at import time: it takes a second, and the reference does not need it.
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu


def _loader(width, interpret):
    """Loads a row [D] into registers, laid out alike whatever its dtype."""
    if interpret:
        return lambda ref, *row: ref[row]  # the interpreter knows no layouts
    elements = math.gcd(width // _THREADS, 4)
    layout = _plgpu().Layout.WG_STRIDED((width,), vec_size=elements)
    return lambda ref, *row: _plgpu().load(ref, row, layout=layout)


def _row_kernel(body, out_type, shape, interpret):
    """A kernel that runs `body` once for each kept row."""
    return _plgpu().kernel(
        body, out_type=out_type, grid=shape, grid_names=("b", "k"), interpret=interpret
    )


def _this_row():
    return jax.lax.axis_index("b"), jax.lax.axis_index("k")


def _token_gather_mosaic_gpu(x, indices, *, interpret):
    width = x.shape[2]
    load = _loader(width, interpret)

    def token_gather(x_ref, indices_ref, out_ref):
        b, k = _this_row()
        out_ref[b, k] = load(x_ref, b, indices_ref[b, k])

    out = jax.ShapeDtypeStruct((*indices.shape, width), x.dtype)
    return _row_kernel(token_gather, out, indices.shape, interpret)(x, indices)


def _token_gather_norm_mosaic_gpu(x, indices, scale, bias, *, epsilon, interpret):
    width = x.shape[2]
    load = _loader(width, interpret)

    def token_gather_norm(x_ref, indices_ref, scale_ref, bias_ref, row_ref, out_ref):
        b, k = _this_row()
        row = load(x_ref, b, indices_ref[b, k])
        row_ref[b, k] = row
        y = row.astype(jnp.float32)
        y = y - jnp.sum(y) / width
        y = y * jax.lax.rsqrt(jnp.sum(y * y) / width + epsilon)
        y = y * load(scale_ref, slice(None)) + load(bias_ref, slice(None))
        out_ref[b, k] = y.astype(x.dtype)

    out = jax.ShapeDtypeStruct((*indices.shape, width), x.dtype)
    run = _row_kernel(token_gather_norm, (out, out), indices.shape, interpret)
    return run(x, indices, scale, bias)


def _token_scatter_mosaic_gpu(x, indices, y, *, interpret):
    load = _loader(x.shape[2], interpret)

    def token_scatter(x_ref, indices_ref, y_ref):
        b, k = _this_row()
        x_ref[b, indices_ref[b, k]] = load(y_ref, b, k)

    plgpu = _plgpu()
    mesh = plgpu.Mesh(grid=indices.shape, grid_names=("b", "k"))
    x_ref = jax.new_ref(x, memory_space=plgpu.GMEM)
    run: Any = pl.kernel(token_scatter, mesh=mesh, interpret=interpret or False)
    run(x_ref, indices, y)
    return x_ref[...]


def token_gather(
    x: jax.Array,
    indices: jax.Array,
    *,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    """Rows of each sequence, out[b, k] = x[b, indices[b, k]].

    Args:
        x: [B, S, D].
        indices: int32[B, K], in range; checked under `checkify`.
        implementation: As of `dispatch.call`; the kernel takes D that are multiples
            of 128.

    Returns:
        [B, K, D].

    Raises:
        ValueError: If shapes do not fit.

    Example:
        >>> x = jnp.arange(3.0).reshape(1, 3, 1)
        >>> token_gather(x, jnp.array([[0, 2]])).ravel().tolist()
        [0.0, 2.0]
    """
    _check(x, indices)
    return _gather(implementation, *dispatch.vary_together(x, indices))


def token_gather_norm(
    x: jax.Array,
    indices: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    *,
    epsilon: float,
    implementation: dispatch.Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Rows of each sequence as they are and after a layer norm, read once.

    Args:
        x: [B, S, D].
        indices: int32[B, K], in range; checked under `checkify`.
        scale: float32[D].
        bias: float32[D].
        epsilon: Added to the variance.
        implementation: As of `dispatch.call`; the kernel takes D that are multiples
            of 128.

    Returns:
        (rows [B, K, D], normalised rows [B, K, D]), both in the dtype of x.

    Raises:
        ValueError: If shapes do not fit.

    Example:
        >>> x, one = jnp.array([[[1.0, -1.0]]]), jnp.ones(2)
        >>> index = jnp.zeros((1, 1), int)
        >>> token_gather_norm(x, index, one, one, epsilon=0.0)[1].ravel().tolist()
        [2.0, 0.0]
    """
    _check(x, indices)
    if not scale.shape == bias.shape == x.shape[2:]:
        raise ValueError(
            f"scale and bias have shapes {scale.shape} and {bias.shape}; both must be "
            f"[D] = {x.shape[2:]}."
        )
    arrays = dispatch.vary_together(x, indices, scale, bias)
    return _gather_norm(implementation, epsilon, *arrays)


def token_scatter(
    x: jax.Array,
    indices: jax.Array,
    y: jax.Array,
    *,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    """Each sequence with some rows overwritten, out[b, indices[b, k]] = y[b, k].

    Args:
        x: [B, S, D]; the kernel overwrites it in place where nobody else needs it.
        indices: int32[B, K], in range and without repetition in a row.
        y: [B, K, D], of x's dtype.
        implementation: As of `dispatch.call`; the kernel takes D that are multiples
            of 128.

    Returns:
        [B, S, D].

    Raises:
        ValueError: If shapes or dtypes do not fit.

    Example:
        >>> x, y = jnp.zeros((1, 3, 1)), jnp.ones((1, 1, 1))
        >>> token_scatter(x, jnp.array([[1]]), y).ravel().tolist()
        [0.0, 1.0, 0.0]
    """
    _check(x, indices)
    if y.shape != (*indices.shape, x.shape[2]) or y.dtype != x.dtype:
        raise ValueError(
            f"y is {y.dtype}{list(y.shape)}; it must be {x.dtype}[B, K, D] = "
            f"{[*indices.shape, x.shape[2]]}."
        )
    return _scatter(implementation, *dispatch.vary_together(x, indices, y))


def _check(x, indices):
    if x.ndim != 3 or indices.ndim != 2 or x.shape[0] != indices.shape[0]:
        raise ValueError(
            f"x has shape {x.shape} and indices {indices.shape}; they must be "
            "[B, S, D] and [B, K]."
        )
    inside = jnp.all((indices >= 0) & (indices < x.shape[1]))
    checkify.debug_check(inside, f"an index is not within the {x.shape[1]} tokens")


def _call(reference, kernel, implementation, *arrays):
    width, reason = arrays[0].shape[2], None
    if width % _THREADS:
        reason = f"a width of {width} is not a multiple of {_THREADS}"
    return dispatch.call(
        reference, kernel, *arrays, implementation=implementation, unsupported=reason
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(implementation, x, indices):
    kernel = _token_gather_mosaic_gpu
    return _call(token_gather_reference, kernel, implementation, x, indices)


def _gather_forward(implementation, x, indices):
    return _gather(implementation, x, indices), (x, indices)


def _gather_backward(implementation, residuals, cotangent):
    x, indices = residuals
    _, pull = jax.vjp(lambda x: token_gather_reference(x, indices), x)
    return (*pull(cotangent), _no_gradient(indices))


_gather.defvjp(_gather_forward, _gather_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather_norm(implementation, epsilon, *arrays):
    reference = functools.partial(token_gather_norm_reference, epsilon=epsilon)
    kernel = functools.partial(_token_gather_norm_mosaic_gpu, epsilon=epsilon)
    return _call(reference, kernel, implementation, *arrays)


def _gather_norm_forward(implementation, epsilon, *arrays):
    return _gather_norm(implementation, epsilon, *arrays), arrays


def _gather_norm_backward(implementation, epsilon, residuals, cotangents):
    x, indices, *affine = residuals
    reference = functools.partial(token_gather_norm_reference, epsilon=epsilon)
    _, pull = jax.vjp(lambda x, *affine: reference(x, indices, *affine), x, *affine)
    dx, dscale, dbias = pull(cotangents)
    return dx, _no_gradient(indices), dscale, dbias


_gather_norm.defvjp(_gather_norm_forward, _gather_norm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scatter(implementation, x, indices, y):
    kernel = _token_scatter_mosaic_gpu
    return _call(token_scatter_reference, kernel, implementation, x, indices, y)


def _scatter_forward(implementation, x, indices, y):
    # Not x, which may be overwritten: its gradient needs only where rows came from.
    return _scatter(implementation, x, indices, y), indices


def _scatter_backward(implementation, indices, cotangent):
    dy = token_gather_reference(cotangent, indices)
    dx = token_scatter_reference(cotangent, indices, jnp.zeros_like(dy))
    return dx, _no_gradient(indices), dy


_scatter.defvjp(_scatter_forward, _scatter_backward)


def _no_gradient(integers):
    return np.zeros(integers.shape, jax.dtypes.float0)
