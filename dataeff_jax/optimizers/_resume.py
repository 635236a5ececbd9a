"""Error feedback in checkpoints: on another number of devices, and in less space."""

import logging
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
import optax

from dataeff_jax import collectives, typing
from dataeff_jax.optimizers import _zero_one_adam

_logger = logging.getLogger(__name__)


def _is_feedback(node: Any) -> bool:
    return isinstance(node, collectives.ErrorFeedback)


def _is_local(node: Any) -> bool:
    return isinstance(node, _zero_one_adam.ZeroOneAdamState)


def _plan_of(feedback, sent, compression) -> collectives.Plan | None:
    """The plan that errors of these shapes were made for; None where there are none."""
    if not feedback.worker:
        return None
    devices, nodes = next(iter(feedback.worker.values())).shape[:2]
    plan = collectives.compression_plan(
        sent,
        num_devices=devices,
        num_local=devices // nodes,
        compression=compression,
    )
    wanted = {x.name: (devices, nodes, *x.part_shape) for x in plan.leaves}
    found = {name: errors.shape for name, errors in feedback.worker.items()}
    if wanted != found:
        raise ValueError(
            f"errors have the shapes {found}, but these parameters and this compression"
            f" need {wanted}; give the compression that the optimizer was built with."
        )
    return plan


def synchronise(
    params: typing.Params, opt_state: optax.OptState
) -> tuple[typing.Params, optax.OptState]:
    """Ends an interval of local steps, exactly and on the host.

    What the devices did by themselves since the last synchronisation is averaged in
    full precision. An interval in which a gradient was not finite is dropped.

    Args:
      params: whole arrays on the host (``distributed.to_host``).
      opt_state: the same, of any optimizer.

    Returns:
      New params and state; those given where no optimizer takes local steps.

    Example:
      >>> params = {"w": np.ones(2)}
      >>> synchronise(params, optax.adam(0.1).init(params))[0] is params
      True
    """

    def end(state):
        nonlocal params
        if not _is_local(state) or not np.asarray(state.went_local):
            return state
        usable = not np.any(np.asarray(state.unusable))
        params, state = _ended(params, state, usable)
        return state

    opt_state = jax.tree.map(end, opt_state, is_leaf=_is_local)
    return params, opt_state


def _ended(params, state, usable):
    """The interval's end for one state."""
    masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731

    def moved(nu, p, drift, decay):
        if masked(nu) or not usable:
            return p
        den = np.sqrt(nu * state.nu_scale) + state.eps
        new = decay * np.asarray(p, np.float32) - drift.mean(axis=0) / den
        return new.astype(p.dtype)

    def momentum(mu, drift, total):
        return drift.mean(axis=0) / total if usable and total > 0 else mu

    mu = jax.tree.map(momentum, state.mu, state.drift, state.rate_sum)
    params = jax.tree.map(
        moved, state.nu, params, state.drift, state.decay, is_leaf=masked
    )
    return params, state._replace(
        mu=mu,
        local_mu=jax.tree.map(
            lambda m, old: np.broadcast_to(m, old.shape).copy(), mu, state.local_mu
        ),
        drift=jax.tree.map(np.zeros_like, state.drift),
        rate_sum=jax.tree.map(np.zeros_like, state.rate_sum),
        decay=jax.tree.map(np.ones_like, state.decay),
        unusable=np.zeros_like(state.unusable),
    )


def resize_state(
    params: typing.Params,
    opt_state: optax.OptState,
    like: optax.OptState,
    *,
    compression: collectives.Compression | None = None,
    sent: Callable[[typing.Params], Any] | None = None,
) -> tuple[typing.Params, optax.OptState]:
    """Carries the state of a compressed optimizer over to another number of devices.

    Errors keep their mean (``collectives.resize_errors``), so nothing that is pending
    is lost. Local steps of 0/1 Adam are synchronised first.

    Args:
      params: whole arrays on the host (``distributed.to_host``).
      opt_state: the same, as it was on the old devices.
      like: the state of the same optimizer on the new devices, as ``tx.init`` makes it,
        or its shapes (``jax.eval_shape``) with shardings.
      compression: that of the optimizer; None for the defaults.
      sent: ``params -> tree`` that is compressed; None for the parameters themselves.
        Frozen parameters, which the optimizer does not see, must be left out.

    Returns:
      Params on the host, and the state on the devices of ``like`` where that has
      shardings.

    Raises:
      ValueError: if errors do not fit the parameters and the compression.

    Example:
      >>> from dataeff_jax import distributed, optimizers
      >>> tx, params = optimizers.onebit_adam(0.1, freeze_step=2), {"w": np.ones(3)}
      >>> state = tx.init(params)
      >>> resize_state(params, distributed.to_host(state), state)[1][0].count.item()
      0
    """
    params, opt_state = synchronise(params, opt_state)
    tree = params if sent is None else sent(params)

    def resize(old, new):
        if not _is_feedback(old):
            return old
        before = _plan_of(old, tree, compression)
        after = _plan_of(new, tree, compression)
        lost = sorted(old.worker.keys() - new.worker.keys())
        if lost:
            _logger.warning("errors of %s are dropped: not compressed any more", lost)
        if before is None or after is None:
            return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), new)
        return collectives.resize_errors(old, before, after)

    opt_state = jax.tree.map(resize, opt_state, like, is_leaf=_is_feedback)
    return params, jax.tree.map(_fit, opt_state, like)


def _fit(value, like):
    """Bring a per-device array to another number of devices, and to its place."""
    value = np.asarray(value)
    if value.shape != like.shape:  # equal on all devices after a synchronisation
        if value.shape[1:] != like.shape[1:]:
            raise ValueError(
                f"a state of shape {value.shape} does not fit {like.shape}; restore"
                " with the optimizer that the run was started with."
            )
        value = np.broadcast_to(value[:1], like.shape)
    value = value.astype(like.dtype)
    if getattr(like, "sharding", None) is None:
        return value
    return jax.make_array_from_callback(like.shape, like.sharding, lambda i: value[i])


def compact_errors(
    opt_state: optax.OptState,
    save: Literal["full", "mean", "none"],
    params: typing.Params,
    *,
    compression: collectives.Compression | None = None,
) -> optax.OptState:
    """Replaces errors by what is worth storing of them.

    Args:
      opt_state: whole arrays on the host (``distributed.to_host``).
      save: ``"full"``, all, for an exact resume: 4 N bytes a parameter; ``"mean"``, the
        mean of the workers' errors and the servers', 8 bytes a parameter, after which
        nothing pending is lost but devices do not go on bit by bit; ``"none"``.
      params: tree that is compressed.
      compression: that of the optimizer; None for the defaults.

    Returns:
      The state to store; :func:`expand_errors` is the inverse.

    Raises:
      ValueError: for another choice.

    Example:
      >>> compact_errors(optax.adam(0.1).init(np.ones(2)), "mean", np.ones(2))[0].count
      Array(0, dtype=int32)
    """
    if save not in ("full", "mean", "none"):
        raise ValueError(f"save={save!r} must be 'full', 'mean' or 'none'.")

    def compact(node):
        if not _is_feedback(node) or save == "full":
            return node
        plan = _plan_of(node, params, compression)
        if save == "none" or plan is None:
            return collectives.ErrorFeedback({}, {})
        worker, server = collectives.logical_errors(node, plan)
        mean = {name: x.mean(axis=0) for name, x in worker.items()}
        return collectives.ErrorFeedback(mean, server)

    return jax.tree.map(compact, opt_state, is_leaf=_is_feedback)


def expand_errors(
    stored: optax.OptState,
    like: optax.OptState,
    params: typing.Params,
    *,
    compression: collectives.Compression | None = None,
) -> optax.OptState:
    """Makes errors for the devices again of what :func:`compact_errors` left.

    Args:
      stored: a state after ``compact_errors``, with ``"mean"`` or ``"none"``.
      like: the state of the optimizer on the devices, with shardings.
      params: tree that is compressed.
      compression: that of the optimizer; None for the defaults.

    Returns:
      The state, placed as ``like``: every worker has the mean of the errors, or zeros.

    Example:
      >>> state = optax.adam(0.1).init(np.ones(2))
      >>> expand_errors(state, state, np.ones(2))[0].count
      Array(0, dtype=int32)
    """

    def expand(old, new):
        if not _is_feedback(old):
            return _fit(old, new)
        plan = _plan_of(new, params, compression)
        if plan is None or not old.worker:
            zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), new)
            return jax.tree.map(_fit, zeros, new)
        worker = {
            name: np.broadcast_to(x, (plan.nodes, *x.shape))
            for name, x in old.worker.items()
        }
        held = collectives.physical_errors(worker, old.server, plan)
        return jax.tree.map(_fit, held, new)

    return jax.tree.map(expand, stored, like, is_leaf=_is_feedback)


def state_shapes(
    tx: optax.GradientTransformation,
    params: typing.Params,
    *,
    num_devices: int,
    mesh: jax.sharding.Mesh | None = None,
) -> optax.OptState:
    """Shapes of a state as another number of devices would hold it.

    To restore a checkpoint that was written there, for :func:`resize_state`. Call it
    outside ``jax.set_mesh``.

    Args:
      tx: the optimizer, communicating over the axis ``"data"`` alone.
      params: arrays or shapes.
      num_devices: N at the time of writing.
      mesh: where to restore to: every device gets every leaf whole. None for shapes
        alone.

    Returns:
      ``jax.ShapeDtypeStruct`` for every leaf.

    Example:
      >>> from dataeff_jax import optimizers
      >>> tx = optimizers.onebit_adam(0.1, freeze_step=2, axis_name="data")
      >>> params = {"w": np.zeros((64, 64))}
      >>> state_shapes(tx, params, num_devices=4)[0].feedback.worker["w"].shape
      (4, 4, 1, 1, 1024)
    """
    then = jax.sharding.AbstractMesh(
        (num_devices,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,)
    )
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    with jax.sharding.use_abstract_mesh(then):
        shapes = jax.eval_shape(tx.init, params)
    sharding = None if mesh is None else jax.NamedSharding(mesh, jax.P())
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes
    )
