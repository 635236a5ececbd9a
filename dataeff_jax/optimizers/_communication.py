"""The link of an optimizer chain that communicates."""

import jax
import jax.numpy as jnp
import optax

from dataeff_jax import distributed, typing


def _differs(grad, axis_name) -> bool:
    """Whether a value is typed as possibly different on the devices of an axis."""
    names = {axis_name} if isinstance(axis_name, str) else set(axis_name)
    return bool(names & set(jax.typeof(grad).manual_axis_type.varying))


def mean_over_devices(grads, axis_name):
    """Means over an axis; 16-bit leaves are summed in float32 and cast back."""
    if not any(_differs(g, axis_name) for g in jax.tree.leaves(grads)):
        return grads  # each is its own mean
    dtypes = jax.tree.map(lambda g: g.dtype, grads)
    wide = jax.tree.map(
        lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads
    )
    mean = jax.lax.pmean(distributed.vary(wide, axis_name), axis_name)
    return jax.tree.map(lambda g, dtype: g.astype(dtype), mean, dtypes)


def set_to_zero() -> optax.GradientTransformation:
    """Replaces gradients by zeros that are equal on all devices: for frozen parameters.

    ``optax.set_to_zero`` makes zeros that are typed as different on the devices where
    the gradients are, so that nothing shows that the parameters stay the same.

    Returns:
      An ``optax.GradientTransformation`` without state, for ``optax.multi_transform``.

    Example:
      >>> tx = optax.multi_transform(
      ...     {"on": optax.sgd(1.0), "off": set_to_zero()}, {"a": "on", "b": "off"})
      >>> params = {"a": jnp.ones(1), "b": jnp.ones(1)}
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> updates["b"].tolist()
      [0.0]
    """

    def update_fn(updates, state, params=None):
        del params
        return jax.tree.map(lambda u: jnp.zeros(u.shape, u.dtype), updates), state

    return optax.GradientTransformation(optax.init_empty_state, update_fn)


def pmean_grads(axis_name: typing.AxisName | None) -> optax.GradientTransformation:
    """Averages gradients over the devices of an axis, in one collective.

    Put it first in the chain, before clipping: what follows then sees the same mean on
    every device. Compressed optimizers replace just this link. Gradients of 16 bits
    are summed in float32 and returned in their own dtype. Gradients that are typed as
    equal on all devices are their own mean and cost nothing.

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
            updates = mean_over_devices(updates, axis_name)
        return updates, state

    return optax.GradientTransformation(optax.init_empty_state, update_fn)
