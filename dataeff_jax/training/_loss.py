"""Calling a user's loss function, with errors that say what is wrong with it."""

import jax
import jax.numpy as jnp


def call_loss(loss_fn, params, batch, keys):
    """Calls ``loss_fn(params, batch, keys)`` and checks what it returns.

    Args:
      loss_fn: returns ``(loss_sum, weight_sum)``.
      params: tree of arrays.
      batch: dict of arrays, [B, ...].
      keys: keys[B] or None.

    Returns:
      loss_sum float32[], and weight_sum as the function gave it.

    Raises:
      ValueError: if a key is missing, or the sums are no pair of scalars.

    Example:
      >>> call_loss(lambda p, b, k: (b["x"].sum(), 2), None, {"y": jnp.ones(2)}, None)
      Traceback (most recent call last):
      ...
      ValueError: the loss function asks for the key 'x', which is missing; the batch \
has ['y'].
    """
    try:
        sums = loss_fn(params, batch, keys)
    except KeyError as error:
        raise ValueError(
            f"the loss function asks for the key {error}, which is missing; the batch"
            f" has {sorted(batch)}."
        ) from error
    try:
        loss_sum, weight_sum = sums
        shapes = (jnp.shape(loss_sum), jnp.shape(weight_sum))
    except (TypeError, ValueError):
        loss_sum = weight_sum = None
        shapes = jax.tree.map(jnp.shape, sums)
    if shapes != ((), ()):
        raise ValueError(
            "the loss function must return (loss_sum, weight_sum), two scalars summed"
            f" over the rows, but it returned shapes {shapes}."
        )
    return jnp.asarray(loss_sum, jnp.float32), weight_sum
