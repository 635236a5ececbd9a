"""Reading shardings off the types of arrays."""

import jax

from dataeff_jax import typing


def specs_of(tree: typing.PyTree) -> typing.PyTree:
    """Reads the partition spec of every leaf from its type.

    In Explicit mode the sharding is part of ``jax.typeof(x)``, for traced arrays as
    well, so the ``out_specs`` of a step's state need not be written by hand.

    Args:
      tree: arrays of any shape, or tracers under ``jit``.

    Returns:
      The tree with a ``jax.P`` for each leaf.

    Example:
      >>> import jax.numpy as jnp
      >>> from dataeff_jax import distributed
      >>> with jax.set_mesh(distributed.data_mesh(1)):
      ...     specs_of({"w": jnp.ones(2)})
      {'w': P(None,)}
    """
    return jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, tree)
