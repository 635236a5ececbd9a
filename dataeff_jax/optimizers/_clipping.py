"""Clipping by the norm of all gradients together.

Razvan Pascanu, Tomas Mikolov, Yoshua Bengio, "On the difficulty of training recurrent
neural networks", https://arxiv.org/abs/1211.5063, section 3.2.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from dataeff_jax import typing


class ClipByGlobalNormState(NamedTuple):
    """The norm that the last gradients had."""

    global_norm: jax.Array  # f32[], before clipping


def global_norm(tree: typing.PyTree) -> jax.Array:
    """Takes the Euclidean norm of all leaves together, in float32.

    Args:
      tree: arrays of any shape and dtype.

    Returns:
      float32[]; 0 for a tree without leaves.

    Example:
      >>> global_norm({"a": jnp.array([300.0], jnp.float16), "b": jnp.zeros(3)}).item()
      300.0
    """
    squares = [
        jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)
    ]
    return jnp.sqrt(sum(squares, jnp.float32(0)))


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Scales gradients down so that their global norm is at most a limit.

    ``g * min(1, max_norm / norm)``, with factor 1 where the norm is within the limit,
    so that gradients of zero stay zero under a limit of zero (no 0/0). The norm before
    clipping is kept in the state for the logs.

    Args:
      max_norm: the limit, at least 0.

    Returns:
      An ``optax.GradientTransformation``; updates keep their shapes and dtypes, the
      state holds ``global_norm`` float32[].

    Raises:
      ValueError: if the limit is negative.

    Example:
      >>> tx = clip_by_global_norm(1.0)
      >>> updates, state = tx.update({"w": jnp.array([3.0, 4.0])}, tx.init(None))
      >>> updates["w"].round(3).tolist(), state.global_norm.item()
      ([0.6000000238418579, 0.800000011920929], 5.0)

    References:
      Pascanu et al., "On the difficulty of training recurrent neural networks",
      https://arxiv.org/abs/1211.5063, 2012
    """
    if not isinstance(max_norm, jax.Array) and not max_norm >= 0:
        raise ValueError(f"max_norm={max_norm} must be at least 0.")

    def init_fn(params):
        del params
        return ClipByGlobalNormState(global_norm=jnp.zeros([], jnp.float32))

    def update_fn(updates, state, params=None):
        del state, params
        norm = global_norm(updates)
        factor = jnp.where(norm > max_norm, max_norm / jnp.where(norm > 0, norm, 1), 1)
        clipped = jax.tree.map(
            lambda g: (g.astype(jnp.float32) * factor).astype(g.dtype), updates
        )
        return clipped, ClipByGlobalNormState(global_norm=norm)

    return optax.GradientTransformation(init_fn, update_fn)
