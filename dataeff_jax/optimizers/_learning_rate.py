"""Giving the learning rate to any optax optimizer at every update."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class WithLearningRateState(NamedTuple):
    """The last rate beside the state of the optimizer itself."""

    learning_rate: jax.Array  # f32[], the rate of the last update
    inner_state: optax.OptState


def with_learning_rate(
    optimizer: Callable[..., Any], **hyperparameters
) -> optax.GradientTransformationExtraArgs:
    """Builds an optimizer whose rate is an argument of ``update``.

    A schedule whose clock is tokens, or anything else the host counts, cannot live in
    the optimizer's step counter. Here the host computes the rate and the optimizer is
    applied as if built with it: ``optimizer(learning_rate=rate, **hyperparameters)``.
    The rate is float32 whatever the dtype of the parameters, and all other
    hyperparameters stay Python constants, so that the numbers equal those of the plain
    optimizer.

    Args:
      optimizer: a function like ``optax.adamw`` with an argument ``learning_rate``.
      **hyperparameters: its other arguments.

    Returns:
      A transformation with ``update(grads, state, params, learning_rate=...)``.

    Raises:
      TypeError: if the optimizer does not take one of the arguments.
      ValueError: by ``update``, when it gets no rate.

    Example:
      >>> tx = with_learning_rate(optax.sgd)
      >>> state = tx.init({"w": jnp.ones(1)})
      >>> updates, _ = tx.update({"w": jnp.ones(1)}, state, learning_rate=0.5)
      >>> updates["w"].tolist()
      [-0.5]
    """

    def build(rate):
        return optax.with_extra_args_support(
            optimizer(learning_rate=rate, **hyperparameters)
        )

    build(0.0)  # wrong arguments are told now, not in the first step

    def init_fn(params):
        return WithLearningRateState(
            learning_rate=jnp.zeros([], jnp.float32),
            inner_state=build(0.0).init(params),
        )

    def update_fn(updates, state, params=None, *, learning_rate=None, **extra_args):
        if learning_rate is None:
            raise ValueError(
                "this optimizer takes its rate at every update; call"
                " update(grads, state, params, learning_rate=...)."
            )
        rate = jnp.asarray(learning_rate, jnp.float32)
        updates, inner_state = build(rate).update(
            updates, state.inner_state, params, **extra_args
        )
        return updates, WithLearningRateState(rate, inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
