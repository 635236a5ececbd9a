"""Optimizers fed with gradients made by hand, a different one on each device."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import optax

from dataeff_jax import distributed, optimizers, typing


def feed_gradients(
    tx: optax.GradientTransformation,
    params: typing.Params,
    data: Iterable[typing.PyTree],
    *,
    num_devices: int,
    gradient: Callable[[typing.Params, Any], typing.Params] | None = None,
    state: optax.OptState | None = None,
    extra: Callable[[int], dict[str, Any]] | None = None,
) -> tuple[list[typing.Params], list[optax.OptState]]:
    """Applies an optimizer to given gradients, one after the other.

    Args:
      tx: the optimizer, communicating over ``"data"``.
      params: where to begin.
      data: for every step a tree of arrays ``[N, ...]``, a part for each device.
      num_devices: N.
      gradient: ``(a device's own params, its part of data) -> gradient``; None where
        the data are the gradients.
      state: where to go on, on the mesh or on the host; None for a new one.
      extra: step -> static extra arguments of the update.

    Returns:
      After every step the devices' own params ``[N, ...]``, and the state.

    Example:
      >>> import optax
      >>> from dataeff_jax import optimizers
      >>> tx = optax.chain(optimizers.pmean_grads("data"), optax.sgd(1.0))
      >>> history, _ = feed_gradients(
      ...     tx, {"w": np.zeros(1)}, [{"w": np.array([[1.0], [3.0]])}], num_devices=2)
      >>> history[0]["w"].tolist()
      [[-2.0], [-2.0]]
    """
    tx = optax.with_extra_args_support(tx)
    history, states, compiled = [], [], {}
    mesh = distributed.data_mesh(num_devices)
    with jax.set_mesh(mesh):
        by_device = jax.NamedSharding(mesh, jax.P("data"))
        params = distributed.replicate(params)
        fresh = jax.jit(tx.init)(params)
        if state is None:
            state = fresh
        else:
            state = jax.tree.map(
                lambda x, like: jax.device_put(np.asarray(x), like.sharding),
                state,
                fresh,
            )
        specs = distributed.specs_of(state)

        def build(static):
            def body(params, state, data):
                mine = jax.tree.map(lambda x: x[0], data)
                if gradient is not None:
                    here = optimizers.local_params(params, state)
                    mine = gradient(distributed.vary(here, "data"), mine)
                updates, state = tx.update(mine, state, params, **static)
                params = optax.apply_updates(params, updates)
                here = distributed.vary(optimizers.local_params(params, state), "data")
                return params, state, jax.tree.map(lambda x: x[None], here)

            return jax.jit(
                jax.shard_map(
                    body,
                    in_specs=(jax.P(), specs, jax.P("data")),
                    out_specs=(jax.P(), specs, jax.P("data")),
                )
            )

        for i, part in enumerate(data):
            static = extra(i) if extra is not None else {}
            run = compiled.setdefault(tuple(sorted(static.items())), build(static))
            part = jax.tree.map(lambda x: jax.device_put(x, by_device), part)
            params, state, here = run(params, state, part)
            history.append(jax.tree.map(np.asarray, here))
            states.append(jax.tree.map(np.asarray, state))
    return history, states
