"""What a training step carries from one call to the next."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from dataeff_jax import distributed, typing


class TrainState(NamedTuple):
    """Step counter, parameters and optimizer state.

    Make it with :meth:`create` inside ``jax.set_mesh(mesh)``.

    Args:
      step: optimizer steps done, int32[].
      params: tree of arrays, equal on all devices.
      opt_state: state of the optimizer.

    Example:
      >>> state = TrainState.create({"w": jnp.ones(2)}, optax.adam(1e-3))
      >>> int(state.step), state.params["w"].shape
      (0, (2,))
    """

    step: typing.Array  # int32[], optimizer steps done, not micro-batches
    params: typing.Params
    opt_state: optax.OptState

    @classmethod
    def create(cls, params: typing.Params, tx: optax.GradientTransformation):
        """Copies the parameters to all devices of the mesh and starts the optimizer.

        The copies share no memory with ``params``, so a step may donate them.

        Args:
          params: tree of arrays.
          tx: the optimizer.

        Returns:
          A state at step 0, whose types a step does not change.
        """
        params = distributed.replicate(params)
        # Under jit every leaf gets a buffer and a mesh sharding of its own.
        opt_state = jax.jit(tx.init)(params)
        return cls(distributed.replicate(jnp.int32(0)), params, opt_state)
