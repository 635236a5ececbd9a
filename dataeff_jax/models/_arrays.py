"""Small helpers on arrays that several parts of a model share."""

from typing import Any

import jax
import jax.numpy as jnp

from dataeff_jax import typing


def canonical_dtype(dtype) -> jnp.dtype:
    """The compute dtype behind a name or a dtype.

    Args:
        dtype: ``jnp.float32``, ``jnp.bfloat16``, ``jnp.float16`` or their names.

    Returns:
        The dtype.

    Raises:
        ValueError: If it is none of the three.

    Example:
        >>> canonical_dtype("bfloat16")
        dtype(bfloat16)
    """
    allowed = ("float32", "bfloat16", "float16")
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in allowed:
        raise ValueError(
            f"dtype={dtype!r} is not a compute dtype; use one of {', '.join(allowed)}."
        )
    return jnp.dtype(name)


def vary_together(*arrays: typing.Array | None) -> tuple[Any, ...]:
    """Types arrays as varying over every manual axis that one of them varies over.

    A `custom_vjp` inside `shard_map(check_vma=True)` must return cotangents that vary
    as its arguments do. Casting the arguments first leaves the sum over devices to the
    transpose of the cast, outside the rule. Outside `shard_map` nothing happens.

    Args:
        arrays: Arrays, or None, which is passed through.

    Returns:
        The same values in the same order.

    Example:
        >>> vary_together(jnp.ones(2), None)[1] is None
        True
    """
    axes: list[frozenset] = [
        frozenset() if a is None else jax.typeof(a).manual_axis_type.varying
        for a in arrays
    ]
    union = frozenset().union(*axes)
    return tuple(
        a if a is None or own == union else _vary(a, union - own)
        for a, own in zip(arrays, axes, strict=True)
    )


def _vary(array, axes):
    return jax.lax.pcast(array, tuple(sorted(axes)), to="varying")
