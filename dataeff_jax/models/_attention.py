"""Attention: one function for causal, padded and packed sequences.

The *blocked* form follows FlashAttention (Dao et al., arXiv:2205.14135) in plain XLA:
queries are taken in blocks, each block sees only the keys it may attend to, masks are
built per block from positions and segment ids, and the backward pass recomputes the
scores from the saved log-normaliser. No [S, S] array exists in memory.

Short sequences (up to `_MAX_UNROLLED` blocks) unroll the query blocks, each with its
own static number of keys; longer ones scan over pairs of blocks with an online softmax,
so that neither compile time nor memory per pair grows with S. Few blocks are unrolled
because compilers for GPUs take seconds for each, and on CPUs the scan is as fast.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from dataeff_jax import typing
from dataeff_jax.models import _arrays

Implementation = Literal["blocked", "cudnn", "xla"]

_BLOCK = 128  # queries a block where blocks are unrolled
_MAX_UNROLLED = 4  # blocks; beyond that, pairs of blocks are scanned
_PAIR_BLOCK = 256  # queries and keys a block where pairs are scanned
_LONG = 2048  # from here blocks are twice as large: steps of the scan are not free
_MASKED = -1e30  # score of a masked pair; finite, so that no inf - inf appears
_FLOOR = -1e29  # lowest maximum of a row: exp(_MASKED - _FLOOR) is exactly 0


def attention(
    q: typing.Array,
    k: typing.Array,
    v: typing.Array,
    *,
    causal: bool,
    segment_ids: typing.Array | None = None,
    lengths: typing.Array | None = None,
    implementation: Implementation | None = None,
) -> typing.Array:
    """Softmax attention, softmax(q k^T / sqrt(D) + mask) v, per head.

    Tokens attend within their own segment; segment 0 and tokens at or after `lengths`
    are padding, which nobody attends to and whose own output and gradients are zero.
    Scores and sums are float32 whatever the dtype of the inputs.

    Args:
        q: Queries [B, S, H, D].
        k: Keys [B, S, H, D].
        v: Values [B, S, H, D].
        causal: Whether a token sees only itself and tokens before it.
        segment_ids: int32[B, S], the document of each token, 0 for padding.
        lengths: int32[B], the number of tokens of each row that are not padding.
        implementation: "blocked" (plain XLA, never an S x S array), "cudnn" (GPU,
            16-bit) or "xla" (`jax.nn.dot_product_attention`'s dense form). None takes
            "cudnn" on a GPU for 16-bit inputs without segment ids, else "blocked".

    Returns:
        The output [B, S, H, D] in the dtype of `q`.

    Raises:
        ValueError: If `segment_ids` meet an implementation other than "blocked", or
            shapes do not fit.

    Example:
        >>> x = jnp.ones((1, 4, 2, 8))
        >>> attention(x, x, x, causal=True).shape
        (1, 4, 2, 8)

    References:
        Dao et al., FlashAttention, 2022, https://arxiv.org/abs/2205.14135
    """
    _check(q, k, v, segment_ids, lengths, implementation)
    implementation = implementation or _default(q, segment_ids)
    if implementation != "blocked":
        return _library(q, k, v, causal, lengths, implementation)
    segment_ids = _segments(segment_ids, lengths, q.shape[1])
    q, k, v, segment_ids = _arrays.vary_together(q, k, v, segment_ids)
    out = _blocked(causal, _turn(q), _turn(k), _turn(v), segment_ids)
    return jnp.swapaxes(jnp.asarray(out), 1, 2)


def _turn(x: typing.Array) -> typing.Array:
    """[B, S, H, D] -> [B, H, S, D]."""
    return jnp.swapaxes(x, 1, 2)


def _check(q, k, v, segment_ids, lengths, implementation):
    if not (q.ndim == 4 and q.shape == k.shape == v.shape):
        raise ValueError(
            f"q, k, v have shapes {q.shape}, {k.shape}, {v.shape}; "
            "all three must be [B, S, H, D]."
        )
    if segment_ids is not None and segment_ids.shape != q.shape[:2]:
        raise ValueError(
            f"segment_ids has shape {segment_ids.shape}; it must be [B, S] = "
            f"{q.shape[:2]}."
        )
    if lengths is not None and lengths.shape != q.shape[:1]:
        raise ValueError(
            f"lengths has shape {lengths.shape}; it must be [B] = {q.shape[:1]}."
        )
    if implementation not in (None, "blocked", "cudnn", "xla"):
        raise ValueError(
            f"implementation={implementation!r} is unknown; use None, 'blocked', "
            "'cudnn' or 'xla'."
        )
    if segment_ids is not None and implementation in ("cudnn", "xla"):
        raise ValueError(
            f"implementation={implementation!r} cannot take segment_ids; use "
            "'blocked' or None for packed rows."
        )


def _default(q, segment_ids) -> Implementation:
    # cuDNN takes 16-bit inputs and heads of up to 128 that are multiples of 8.
    fits = q.dtype.itemsize == 2 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 128
    on_gpu = jax.default_backend() in ("gpu", "cuda")
    return "cudnn" if segment_ids is None and fits and on_gpu else "blocked"


def _library(q, k, v, causal, lengths, implementation):
    """`jax.nn.dot_product_attention`, with padding that gives zeros, never NaN."""
    # An empty row would have no key at all: let it see one and drop the result.
    seen = None if lengths is None else jnp.maximum(lengths, 1)
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        is_causal=causal,
        query_seq_lengths=seen,
        key_value_seq_lengths=seen,
        implementation=implementation,
    )
    if lengths is None:
        return out
    real = jnp.arange(q.shape[1])[None] < lengths[:, None]
    return jnp.where(real[..., None, None], out, jnp.zeros((), out.dtype))


def _segments(segment_ids, lengths, size):
    """Segment ids [B, S] with padding at 0, or None if every token is real."""
    if lengths is None:
        return segment_ids
    real = jnp.arange(size)[None] < lengths[:, None]
    return real.astype(jnp.int32) if segment_ids is None else segment_ids * real


def _is_short(size):
    return size <= _BLOCK * _MAX_UNROLLED


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked(causal, q, k, v, segment_ids):
    return _blocked_forward(causal, q, k, v, segment_ids)[0]


def _blocked_forward(causal, q, k, v, segment_ids):
    rule = _unrolled_forward if _is_short(q.shape[2]) else _pairs_forward
    out, lse = rule(causal, q, k, v, segment_ids)
    return out, (q, k, v, segment_ids, out, lse)


def _blocked_backward(causal, residuals, dout):
    q, k, v, segment_ids, out, lse = residuals
    rule = _unrolled_backward if _is_short(q.shape[2]) else _pairs_backward
    # delta = sum_j p_j dp_j, the part of softmax's gradient that rows share.
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    dq, dk, dv = rule(causal, q, k, v, segment_ids, lse, dout, delta)
    no_gradient = None if segment_ids is None else _no_gradient(segment_ids)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), no_gradient


_blocked.defvjp(_blocked_forward, _blocked_backward)


def _no_gradient(integers):
    return np.zeros(integers.shape, jax.dtypes.float0)


def _dot(equation, x, y):
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


def _scores(q, k, allowed):
    """Masked scores float32[B, H, Q, K]; `allowed` broadcasts to them or is None."""
    scores = _dot("bhqd,bhkd->bhqk", q, k) * (q.shape[-1] ** -0.5)
    return scores if allowed is None else jnp.where(allowed, scores, _MASKED)


def _allowed(causal, rows, columns, segment_ids, rows_at, columns_at):
    """Which pairs of a block may attend, [B or 1, 1, Q, K], or None for all.

    Args:
        causal: Whether the diagonal passes through the block.
        rows: Number of queries.
        columns: Number of keys.
        segment_ids: The pair (queries' [B, Q], keys' [B, K]) or None.
        rows_at: Position of the first query.
        columns_at: Position of the first key.
    """
    allowed = None
    if causal:
        query = rows_at + jax.lax.broadcasted_iota(jnp.int32, (rows, columns), 0)
        key = columns_at + jax.lax.broadcasted_iota(jnp.int32, (rows, columns), 1)
        allowed = (query >= key)[None, None]
    if segment_ids is None:
        return allowed
    query, key = segment_ids
    same = (query[:, :, None] == key[:, None, :]) & (query[:, :, None] != 0)
    return same[:, None] if allowed is None else allowed & same[:, None]


def _query_blocks(causal, q, segment_ids):
    """Static (start, stop, number of keys, mask) of each block of queries."""
    size = q.shape[2]
    for start in range(0, size, _BLOCK):
        stop = min(start + _BLOCK, size)
        keys = stop if causal else size
        segments = segment_ids
        if segments is not None:
            segments = segments[:, start:stop], segments[:, :keys]
        mask = _allowed(causal, stop - start, keys, segments, start, 0)
        yield start, stop, keys, mask


def _unrolled_forward(causal, q, k, v, segment_ids):
    out, lse = [], []
    for start, stop, keys, mask in _query_blocks(causal, q, segment_ids):
        scores = _scores(q[:, :, start:stop], k[:, :, :keys], mask)
        top = jnp.maximum(jnp.max(scores, axis=-1), _FLOOR)
        weights = jnp.exp(scores - top[..., None])
        total = jnp.sum(weights, axis=-1)
        block = _dot("bhqk,bhkd->bhqd", weights.astype(v.dtype), v[:, :, :keys])
        out.append((block / _or_one(total)[..., None]).astype(q.dtype))
        lse.append(_log_normaliser(top, total))
    return jnp.concatenate(out, axis=2), jnp.concatenate(lse, axis=2)


def _or_one(total):
    return jnp.where(total == 0, jnp.ones_like(total), total)


def _log_normaliser(top, total):
    # 0 for a row without keys: exp(_MASKED - 0) is 0 in the backward pass, too.
    return jnp.where(total == 0, jnp.zeros_like(top), top + jnp.log(_or_one(total)))


def _unrolled_backward(causal, q, k, v, segment_ids, lse, dout, delta):
    dq, dk, dv = [], [], []
    for start, stop, keys, mask in _query_blocks(causal, q, segment_ids):
        rows = slice(start, stop)
        block_dq, block_dk, block_dv = _block_backward(
            q[:, :, rows],
            k[:, :, :keys],
            v[:, :, :keys],
            mask,
            lse[:, :, rows],
            dout[:, :, rows],
            delta[:, :, rows],
        )
        dq.append(block_dq)
        dk.append(block_dk)
        dv.append(block_dv)
    return jnp.concatenate(dq, axis=2), _add_prefixes(dk), _add_prefixes(dv)


def _add_prefixes(parts):
    """Sum of [B, H, D, K_i], prefixes of one array, as [B, H, S, D]."""
    columns = []
    for start in range(0, parts[-1].shape[-1], _BLOCK):
        stop = start + _BLOCK
        seen = [p[..., start:stop] for p in parts if p.shape[-1] > start]
        columns.append(functools.reduce(jnp.add, seen))
    return jnp.concatenate(columns, axis=-1).swapaxes(2, 3)


def _block_backward(q, k, v, mask, lse, dout, delta):
    """Gradients of one block, float32: dq [B, H, Q, D], dk and dv [B, H, D, K].

    Those of keys and values come out transposed: matrix products on CPUs are twice as
    fast when the small operand is the one to be turned.
    """
    weights = jnp.exp(_scores(q, k, mask) - lse[..., None])  # [B, H, Q, K]
    dv = _dot("bhqd,bhqk->bhdk", dout, weights.astype(dout.dtype))
    dweights = _dot("bhqd,bhkd->bhqk", dout, v)
    dscores = weights * (dweights - delta[..., None]) * (q.shape[-1] ** -0.5)
    dscores = dscores.astype(q.dtype)
    dq = _dot("bhqk,bhkd->bhqd", dscores, k)
    dk = _dot("bhqd,bhqk->bhdk", q, dscores)
    return dq, dk, dv


def _pair_block(size):
    return _PAIR_BLOCK if size < _LONG else 2 * _PAIR_BLOCK


def _pairs(causal, blocks):
    """All pairs (query block, key block) that attend, row by row: int32[P, 2]."""
    return np.array(
        [(i, j) for i in range(blocks) for j in range(i + 1 if causal else blocks)],
        np.int32,
    )


def _pad_to_blocks(causal, arrays, segment_ids, block):
    """Pads axis 2 of `arrays` to whole blocks, with padding marked where it matters."""
    size = arrays[0].shape[2]
    extra = -size % block
    if extra == 0:
        return arrays, segment_ids
    if segment_ids is None and not causal:
        # Causal rows never look at the padding behind them; these would.
        segment_ids = jnp.ones((arrays[0].shape[0], size), jnp.int32)
    if segment_ids is not None:
        segment_ids = jnp.pad(segment_ids, ((0, 0), (0, extra)))
    widths = ((0, 0), (0, 0), (0, extra))
    padded = tuple(
        jnp.pad(x, widths + ((0, 0),) * (x.ndim - 3)) if x.ndim > 2 else x
        for x in arrays
    )
    return padded, segment_ids


def _take(x, index, block, axis=2):
    return jax.lax.dynamic_slice_in_dim(x, index * block, block, axis)


def _put(x, value, index, block):
    return jax.lax.dynamic_update_slice_in_dim(x, value, index * block, 2)


def _pair_mask(causal, segment_ids, i, j, block):
    segments = segment_ids
    if segments is not None:
        segments = _take(segments, i, block, 1), _take(segments, j, block, 1)
    return _allowed(causal, block, block, segments, i * block, j * block)


def _pairs_forward(causal, q, k, v, segment_ids):
    size, block = q.shape[2], _pair_block(q.shape[2])
    (q, k, v), segment_ids = _pad_to_blocks(causal, (q, k, v), segment_ids, block)
    (segment_ids,) = _vary_like(q, segment_ids)

    def step(carry, pair):
        i, j = pair[0], pair[1]
        out, top, total = (_take(x, i, block) for x in carry)
        mask = _pair_mask(causal, segment_ids, i, j, block)
        scores = _scores(_take(q, i, block), _take(k, j, block), mask)
        new = _online_softmax(out, top, total, scores, _take(v, j, block))
        carry = (_put(x, y, i, block) for x, y in zip(carry, new, strict=True))
        return tuple(carry), None

    start = _vary_like(
        q,
        jnp.zeros(q.shape, jnp.float32),
        jnp.full(q.shape[:3], _FLOOR, jnp.float32),
        jnp.zeros(q.shape[:3], jnp.float32),
    )
    pairs = _pairs(causal, q.shape[2] // block)
    (out, top, total), _ = jax.lax.scan(step, start, pairs)
    out = (out / _or_one(total)[..., None]).astype(q.dtype)
    return out[:, :, :size], _log_normaliser(top, total)[:, :, :size]


def _online_softmax(out, top, total, scores, v):
    """Adds a block of keys to the running (sum of w v, maximum, sum of w)."""
    new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
    shrink = jnp.exp(top - new_top)
    weights = jnp.exp(scores - new_top[..., None])
    total = total * shrink + jnp.sum(weights, axis=-1)
    out = out * shrink[..., None] + _dot("bhqk,bhkd->bhqd", weights.astype(v.dtype), v)
    return out, new_top, total


def _pairs_backward(causal, q, k, v, segment_ids, lse, dout, delta):
    size, block = q.shape[2], _pair_block(q.shape[2])
    (q, k, v, lse, dout, delta), segment_ids = _pad_to_blocks(
        causal, (q, k, v, lse, dout, delta), segment_ids, block
    )
    (segment_ids,) = _vary_like(q, segment_ids)

    def step(carry, pair):
        dq, dk, dv = carry
        i, j = pair[0], pair[1]
        block_dq, block_dk, block_dv = _block_backward(
            _take(q, i, block),
            _take(k, j, block),
            _take(v, j, block),
            _pair_mask(causal, segment_ids, i, j, block),
            _take(lse, i, block),
            _take(dout, i, block),
            _take(delta, i, block),
        )
        dq = _put(dq, _take(dq, i, block) + block_dq, i, block)
        dk = _put(dk, _take(dk, j, block) + block_dk.swapaxes(2, 3), j, block)
        dv = _put(dv, _take(dv, j, block) + block_dv.swapaxes(2, 3), j, block)
        return (dq, dk, dv), None

    zeros = _vary_like(q, *(jnp.zeros(q.shape, jnp.float32),) * 3)
    pairs = _pairs(causal, q.shape[2] // block)
    gradients, _ = jax.lax.scan(step, zeros, pairs)
    return tuple(x[:, :, :size] for x in gradients)


def _vary_like(q, *arrays):
    return _arrays.vary_together(q, *arrays)[1:]
