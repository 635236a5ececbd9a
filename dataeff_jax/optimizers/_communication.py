"""The link of an optimizer chain that communicates."""

import jax
import jax.numpy as jnp
import optax

from dataeff_jax import typing


def _mean_over_devices(grads, axis_name):
    """Means over an axis; 16-bit leaves are summed in float32 and cast back."""
    dtypes = jax.tree.map(lambda g: g.dtype, grads)
    wide = jax.tree.map(
        lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads
    )
    mean = jax.lax.pmean(wide, axis_name)
    return jax.tree.map(lambda g, dtype: g.astype(dtype), mean, dtypes)


def pmean_grads(axis_name: typing.AxisName | None) -> optax.GradientTransformation:
    """Averages gradients over the devices of an axis, in one collective.

    Put it first in the chain, before clipping: what follows then sees the same mean on
    every device. Compressed optimizers replace just this link. Gradients of 16 bits
    are summed in float32 and returned in their own dtype.

    Args:
      axis_name: the mesh axis inside ``shard_map``; None means one device and no
        communication.

    Returns:
      An ``optax.GradientTransformation`` without state. Updates keep their shapes and
      dtypes and come out equal on all devices.

    Example:
      >>> tx = optax.chain(pmean_grads(None), optax.sgd(1.0))
      >>> updates, _ = tx.update({"w": jnp.ones(2)}, tx.init({"w": jnp.ones(2)}))
      >>> updates["w"].tolist()
      [-1.0, -1.0]
    """

    def update_fn(updates, state, params=None):
        del params
        if axis_name is not None:
            updates = _mean_over_devices(updates, axis_name)
        return updates, state

    return optax.GradientTransformation(optax.init_empty_state, update_fn)
