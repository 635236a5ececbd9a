"""Clipping by the norm of all gradients together.

Razvan Pascanu, Tomas Mikolov, Yoshua Bengio, "On the difficulty of training recurrent
neural networks", https://arxiv.org/abs/1211.5063, section 3.2.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from dataeff_jax import typing
from dataeff_jax.optimizers import _communication


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
        factor = clip_factor(norm, max_norm)
        clipped = jax.tree.map(
            lambda g: (g.astype(jnp.float32) * factor).astype(g.dtype), updates
        )
        return clipped, ClipByGlobalNormState(global_norm=norm)

    return optax.GradientTransformation(init_fn, update_fn)


class SharedNormState(NamedTuple):
    """What clipping needs to know where only local gradients are at hand."""

    global_norm: jax.Array  # f32[], of the mean gradient; estimated where it is unknown
    norm_ratio: jax.Array  # f32[], root mean square of local norms over global_norm


def init_shared_norm() -> SharedNormState:
    """No norm yet, and local gradients taken as alike."""
    return SharedNormState(jnp.zeros([], jnp.float32), jnp.ones([], jnp.float32))


def _rms_over_devices(norm, axis_name):
    """Root of the mean square of a norm over devices: one scalar is sent."""
    square = jnp.square(norm)
    if axis_name is not None:
        square = _communication.mean_over_devices(square, axis_name)
    return jnp.sqrt(square)


def clip_factor(norm, max_norm):
    """What to multiply with so that a norm stays within a limit; no 0/0."""
    return jnp.where(norm > max_norm, max_norm / jnp.where(norm > 0, norm, 1), 1)


def clip_mean(mean, local, state: SharedNormState, *, max_norm, axis_name):
    """Clip the mean gradient by its norm, and learn how much longer local ones are."""
    norm = global_norm(mean)
    rms = _rms_over_devices(global_norm(local), axis_name)
    ratio = jnp.where(norm > 0, rms / jnp.where(norm > 0, norm, 1), state.norm_ratio)
    ratio = 0.9 * state.norm_ratio + 0.1 * jnp.maximum(ratio, 1)
    factor = clip_factor(norm, max_norm)
    return jax.tree.map(lambda g: g * factor, mean), SharedNormState(norm, ratio)


def clip_local(local, state: SharedNormState, *, max_norm, axis_name):
    """Clip local gradients by one factor, from the norms of all devices."""
    rms = _rms_over_devices(global_norm(local), axis_name)
    state = state._replace(global_norm=rms / state.norm_ratio)
    return clip_as_agreed(local, state, max_norm=max_norm), state


def clip_as_agreed(local, state: SharedNormState, *, max_norm):
    """Clip local gradients by the norm known already; nothing is sent."""
    factor = clip_factor(state.global_norm, max_norm)
    return jax.tree.map(lambda g: g.astype(jnp.float32) * factor, local)


def clip_by_shared_norm(
    max_norm: float, *, axis_name: typing.AxisName | None
) -> optax.GradientTransformation:
    """Scales gradients that differ between devices by one factor for all.

    Each device clipping by its own norm would weigh the devices differently. The norm
    here is the root of the mean square of the devices' norms; one float32 is sent. It
    is at least the norm of the mean gradient, so a limit chosen for that clips harder
    here: the compressed optimizers' ``max_grad_norm`` allows for the difference.

    Args:
      max_norm: the limit, at least 0.
      axis_name: the mesh axis inside ``shard_map``; None means one device.

    Returns:
      An ``optax.GradientTransformation``; the state holds ``global_norm`` float32[].

    Raises:
      ValueError: if the limit is negative.

    Example:
      >>> tx = clip_by_shared_norm(1.0, axis_name=None)
      >>> tx.update({"w": jnp.array([3.0, 4.0])}, tx.init(None))[0]["w"].round(3)
      Array([0.6, 0.8], dtype=float32)
    """
    if not isinstance(max_norm, jax.Array) and not max_norm >= 0:
        raise ValueError(f"max_norm={max_norm} must be at least 0.")

    def init_fn(params):
        del params
        return ClipByGlobalNormState(global_norm=jnp.zeros([], jnp.float32))

    def update_fn(updates, state, params=None):
        del state, params
        norm = _rms_over_devices(global_norm(updates), axis_name)
        factor = clip_factor(norm, max_norm)
        clipped = jax.tree.map(
            lambda g: (g.astype(jnp.float32) * factor).astype(g.dtype), updates
        )
        return clipped, ClipByGlobalNormState(global_norm=norm)

    return optax.GradientTransformation(init_fn, update_fn)
