"""LAMB with a trust ratio for every layer, stacked layers included.

Yang You et al., "Large batch optimization for deep learning: training BERT in 76
minutes", https://arxiv.org/abs/1904.00962, algorithm 2.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def layer_norms(x: jax.Array, *, stacked: bool) -> jax.Array:
    """Norms in float32: of the whole leaf, or of each slice [L, 1, ...] of a stack."""
    x = x.astype(jnp.float32)
    axes = tuple(range(1, x.ndim)) if stacked else None
    return jnp.sqrt(jnp.sum(jnp.square(x), axis=axes, keepdims=True))


def scale_by_layer_trust_ratio(
    *,
    is_stacked: Callable[[Any], bool] | None = None,
    max_ratio: float | None = None,
) -> optax.GradientTransformation:
    """Scales the update of each layer by ``norm(params) / norm(update)``.

    A leaf that stacks the parameters of L layers counts as L layers. The ratio is 1
    where a norm is zero. Norms are taken in float32.

    Args:
      is_stacked: ``path -> bool``, whether the leaf at a path (a tuple of keys, as
        ``jax.tree_util`` gives them) stacks layers on its first axis; None means none.
      max_ratio: upper bound of the ratio; None means no bound.

    Returns:
      An ``optax.GradientTransformation`` without state; updates keep their shapes and
      dtypes.

    Raises:
      ValueError: if the bound is not positive.

    Example:
      >>> tx = scale_by_layer_trust_ratio(is_stacked=lambda path: True)
      >>> params = jnp.array([[2.0], [3.0]])
      >>> tx.update(jnp.array([[1.0], [0.5]]), tx.init(params), params)[0].tolist()
      [[2.0], [3.0]]
    """
    if max_ratio is not None and not max_ratio > 0:
        raise ValueError(f"max_ratio={max_ratio} must be positive, or None for none.")

    def scale(path, update, param):
        stacked = is_stacked is not None and is_stacked(path)
        param_norm = layer_norms(param, stacked=stacked)
        update_norm = layer_norms(update, stacked=stacked)
        zero = (param_norm == 0) | (update_norm == 0)
        ratio = jnp.where(zero, 1, param_norm / jnp.where(zero, 1, update_norm))
        if max_ratio is not None:
            ratio = jnp.minimum(ratio, max_ratio)
        return (update.astype(jnp.float32) * ratio).astype(update.dtype)

    def update_fn(updates, state, params=None):
        if params is None:
            raise ValueError(
                "the trust ratio needs params: update(grads, state, params)."
            )
        return jax.tree_util.tree_map_with_path(scale, updates, params), state

    return optax.GradientTransformation(optax.init_empty_state, update_fn)


def lamb(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    mask: Any = None,
    is_stacked: Callable[[Any], bool] | None = None,
    max_ratio: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Builds LAMB: Adam, weight decay, and a trust ratio for each layer.

    Equals ``optax.lamb`` on a tree whose layers are not stacked.

    Args:
      learning_rate: a number, or a schedule of the step.
      b1: decay of the mean of gradients.
      b2: decay of the mean of squared gradients.
      eps: added to the square root in Adam's denominator.
      weight_decay: strength of the decay, inside the trust ratio.
      mask: tree of bool, or a function ``params -> tree of bool``: True where weights
        decay; None means everywhere.
      is_stacked: ``path -> bool``, whether a leaf stacks layers on its first axis.
      max_ratio: upper bound of the trust ratio; None means no bound.

    Returns:
      The optimizer.

    Example:
      >>> tx = lamb(0.1)
      >>> params = jnp.array([3.0, 4.0])
      >>> updates, _ = tx.update(jnp.ones(2), tx.init(params), params)
      >>> updates.round(3).tolist()
      [-0.3540000021457672, -0.3540000021457672]

    References:
      You et al., "Large batch optimization for deep learning: training BERT in 76
      minutes", https://arxiv.org/abs/1904.00962, 2020
    """
    return optax.chain(
        optax.scale_by_adam(b1=b1, b2=b2, eps=eps),
        optax.add_decayed_weights(weight_decay=weight_decay, mask=mask),
        scale_by_layer_trust_ratio(is_stacked=is_stacked, max_ratio=max_ratio),
        optax.scale_by_learning_rate(learning_rate),
    )
