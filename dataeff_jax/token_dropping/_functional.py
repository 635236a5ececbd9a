"""Token dropping around any function of a sequence: gather, compute, scatter.

Random-LTD, Yao et al., https://arxiv.org/abs/2211.11586, algorithm 1. Nothing here
knows a neural-network library: `block_fn` may close over the parameters of any.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from dataeff_jax import typing
from dataeff_jax.models import _arrays

ArgumentKind = Literal["tokens", "pairs", "lengths", "shared"]

#: How arguments of a block follow its tokens, by name.
ARGUMENT_KINDS: Mapping[str, ArgumentKind] = {
    "positions": "tokens",
    "segment_ids": "tokens",
    "mask": "pairs",
    "lengths": "lengths",
    "keys": "shared",
    "rngs": "shared",
}


def drop_tokens(
    block_fn: Callable[..., Any],
    x: typing.Array,
    indices: typing.Array,
    *,
    kinds: Mapping[str, ArgumentKind] | None = None,
    **arguments: Any,
) -> Any:
    """Runs a block on the kept tokens of each row; the others pass by unchanged.

    x'[b, K_b] = block_fn(x[b, K_b]), x' = x elsewhere. The gradient at a dropped token
    is that of its output; at a kept token it comes through the block alone.

    Indices are sorted, so causal order holds among the kept tokens. Whatever else the
    block is told about its tokens is gathered with them, by name (`ARGUMENT_KINDS`):
    "tokens" are [B or 1, S, ...], "pairs" [B or 1, ..., S, S] (masks, biases),
    "lengths" int[B] count tokens from the left, "shared" stays as it is. A block that
    uses positions must be given them: `positions=None` stands for 0 to S - 1.

    Args:
        block_fn: Takes x [B, K, D] and the arguments by name, returns [B, K, D] or a
            tuple that begins so.
        x: [B, S, D].
        indices: int32[B, K], strictly increasing; see `sample_token_indices`.
        kinds: Kinds of further arguments of the block, or other kinds of these.
        **arguments: What the block takes besides x.

    Returns:
        [B, S, D], or a tuple that begins so; K = S calls the block as it is.

    Raises:
        ValueError: If shapes do not fit, or an array has S along an axis but no kind.

    Example:
        >>> x = jnp.arange(4.0).reshape(1, 4, 1)
        >>> drop_tokens(lambda x: -x, x, jnp.array([[1, 3]])).ravel().tolist()
        [0.0, -1.0, 2.0, -3.0]

    References:
        Yao et al., Random-LTD, 2022, https://arxiv.org/abs/2211.11586
    """
    _check(x, indices)
    if indices.shape[1] == x.shape[1]:
        return block_fn(x, **arguments)
    kinds = {**ARGUMENT_KINDS, **(kinds or {})}
    kept = {
        name: _follow(name, value, kinds.get(name), indices, x.shape[1])
        for name, value in arguments.items()
    }
    x, indices = _arrays.vary_together(x, indices)
    tokens, rest = _take(x, indices)
    out = block_fn(tokens, **kept)
    y, *others = out if isinstance(out, tuple) else (out,)
    if y.shape != tokens.shape:
        raise ValueError(
            f"the block turned {tokens.shape} into {y.shape}; only a block that keeps "
            "the shape of its tokens can drop some of them."
        )
    x = _put(*_arrays.vary_together(rest.astype(y.dtype), indices, y))
    return (x, *others) if isinstance(out, tuple) else x


def _check(x, indices):
    fits = x.ndim == 3 and indices.ndim == 2 and x.shape[0] == indices.shape[0]
    if not (fits and 1 <= indices.shape[1] <= x.shape[1]):
        raise ValueError(
            f"x has shape {x.shape} and indices {indices.shape}; they must be "
            "[B, S, D] and [B, K] with 1 <= K <= S."
        )


def _follow(name, value, kind, indices, size):
    """What the block is told about the kept tokens."""
    if value is None:
        return indices if name == "positions" else None
    if kind == "tokens":
        return _gather(_rows(value, indices), indices)
    if kind == "pairs":
        return jax.vmap(_gather_pairs)(_rows(value, indices), indices)
    if kind == "lengths":
        return jnp.sum(indices < value[:, None], axis=1, dtype=value.dtype)
    if kind is None and size in getattr(value, "shape", ()):
        raise ValueError(
            f"the block's argument {name!r} has shape {value.shape}, with an axis as "
            f"long as the sequence, {size}; say how it follows the kept tokens with "
            f"kinds={{{name!r}: 'tokens'}}, 'pairs', 'lengths' or 'shared'."
        )
    return value


def _rows(value, indices):
    """An array of one row for all as an array of one a row."""
    return jnp.broadcast_to(value, (indices.shape[0], *value.shape[1:]))


def _gather_pairs(pairs, indices):
    """[..., S, S] -> [..., K, K]."""
    return jnp.take(jnp.take(pairs, indices, axis=-2), indices, axis=-1)


def _gather(x, indices):
    """x [B, S, ...] at [B, K] -> [B, K, ...]."""
    return jax.vmap(lambda x, i: x.at[i].get(**_SORTED))(x, indices)


def _scatter(x, indices, y):
    """x [B, S, D] with its rows at [B, K] overwritten by y [B, K, D]."""
    return jax.vmap(lambda x, i, y: x.at[i].set(y, **_SORTED))(x, indices, y)


_SORTED: dict[str, Any] = {
    "unique_indices": True,
    "indices_are_sorted": True,
    "mode": "promise_in_bounds",
}


# The two belong together: `_put` sends the whole gradient to what passed by, also at
# the kept rows, where it does not belong; `_take` overwrites these rows. So the
# backward pass is a gather and an overwriting scatter, too, not two scatters and a sum.


@jax.custom_vjp
def _take(x, indices):
    """The kept tokens, and x as what passes by."""
    return _gather(x, indices), x


def _take_forward(x, indices):
    return _take(x, indices), indices


def _take_backward(indices, cotangents):
    return _scatter(cotangents[1], indices, cotangents[0]), _no_gradient(indices)


_take.defvjp(_take_forward, _take_backward)


@jax.custom_vjp
def _put(rest, indices, y):
    """What passed by, with the kept tokens returned."""
    return _scatter(rest, indices, y)


def _put_forward(rest, indices, y):
    return _put(rest, indices, y), indices


def _put_backward(indices, cotangent):
    return cotangent, _no_gradient(indices), _gather(cotangent, indices)


_put.defvjp(_put_forward, _put_backward)


def _no_gradient(integers):
    return np.zeros(integers.shape, jax.dtypes.float0)
