"""The data-parallel training step: one ``jit(shard_map(body))``."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dataeff_jax import distributed, typing
from dataeff_jax.training import _loss, _state

Metrics = dict[str, jax.Array]


def row_keys(
    key: typing.KeyArray, batch_rows: int, axis_name: typing.AxisName | None
) -> typing.KeyArray:
    """Makes one key for each row that this device holds.

    The key is folded with the row's slot in the global batch, never with the device, so
    that random draws do not depend on the number of devices.

    Args:
      key: key of the step.
      batch_rows: rows on this device.
      axis_name: the mesh axis; None means one device.

    Returns:
      keys[batch_rows].

    Example:
      >>> row_keys(jax.random.key(0), 3, None).shape
      (3,)
    """
    first = 0 if axis_name is None else jax.lax.axis_index(axis_name) * batch_rows
    slots = first + jnp.arange(batch_rows)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, slots)


def _micro_batches(tree, count: int):
    """Cuts the rows of each leaf: [B, ...] -> [count, B / count, ...]."""
    return jax.tree.map(
        lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), tree
    )


def _static_weight(weight) -> float | None:
    """The weight as a number, where the loss function gives one that is not traced."""
    return float(weight) if isinstance(weight, int | float | np.generic) else None


def _sums(loss_fn, params, batch, keys, axis_name, accumulation_steps):
    """Sums loss, weight and gradient over this device's rows, in float32.

    Returns (loss_sum, weight_sum, grads, normalized). Where weights are Python numbers
    the gradient is divided by their sum already (normalized), inside the loss, which
    costs no pass over the gradients.
    """
    normalized = []  # filled while tracing

    def loss_of(params, batch, keys):
        loss_sum, weight = _loss.call_loss(loss_fn, params, batch, keys)
        static = _static_weight(weight)
        normalized[:] = [static is not None]
        scale = 1.0 if static is None else 1 / (static * accumulation_steps)
        return loss_sum * scale, (loss_sum, jnp.float32(weight))

    grad_of = distributed.local_value_and_grad(
        loss_of, axis_name=axis_name, has_aux=True
    )

    def of_micro_batch(batch, keys):
        (_, sums), grads = grad_of(params, batch, keys)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        return distributed.vary((*sums, grads), axis_name)

    if accumulation_steps == 1:
        total = of_micro_batch(batch, keys)
    else:

        def add(total, micro):
            return jax.tree.map(jnp.add, total, of_micro_batch(*micro)), None

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        start = distributed.vary((jnp.float32(0), jnp.float32(0), zeros), axis_name)
        micros = _micro_batches((batch, keys), accumulation_steps)
        total, _ = jax.lax.scan(add, start, micros)
    return *total, normalized[0]


def _grad_scale(weight_sum, normalized: bool, axis_name):
    """N / W, so that the mean over N devices is the gradient of the global mean."""
    if normalized:
        return 1.0
    devices, total = 1, weight_sum
    if axis_name is not None:
        devices = jax.lax.axis_size(axis_name)
        total = jax.lax.psum(weight_sum, axis_name)
    return devices / jnp.where(total > 0, total, 1)  # all rows may be padding


def _norm_metrics(opt_state) -> Metrics:
    """The gradient norm, where a link of the chain keeps one."""
    found = optax.tree.get_all_with_path(opt_state, "global_norm")
    return {"grad_norm": found[0][1]} if found else {}


def _local_params(params, opt_state):
    """Where this device takes its gradient.

    Optimizers whose devices go on by themselves between messages keep the difference in
    a state that offers ``local_params(params)``.
    """
    offers = lambda state: hasattr(state, "local_params")  # noqa: E731
    for state in jax.tree.leaves(opt_state, is_leaf=offers):
        if offers(state):
            params = state.local_params(params)
    return params


def _body(loss_fn, tx, axis_name, accumulation_steps, static):
    """Makes the step of one device."""

    def body(state, batch, key, extra_args):
        rows = jax.tree.leaves(batch)[0].shape[0]
        keys = row_keys(jax.random.fold_in(key, state.step), rows, axis_name)
        loss_sum, weight_sum, grads, normalized = _sums(
            loss_fn,
            _local_params(state.params, state.opt_state),
            batch,
            keys,
            axis_name,
            accumulation_steps,
        )
        scale = _grad_scale(weight_sum, normalized, axis_name)
        grads = jax.tree.map(
            lambda g, p: (g * scale).astype(p.dtype), grads, state.params
        )
        updates, opt_state = tx.update(
            grads, state.opt_state, state.params, **extra_args, **static
        )
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss_sum": loss_sum, "weight_sum": weight_sum}
        metrics |= _norm_metrics(opt_state)
        metrics = jax.tree.map(
            lambda x: distributed.vary(x, axis_name)[None], metrics
        )  # [1] on a device, [N] together
        return _state.TrainState(state.step + 1, params, opt_state), metrics

    return body


def _check_rows(batch, num_devices: int, accumulation_steps: int) -> None:
    rows = {name: jnp.shape(value)[:1] for name, value in batch.items()}
    if not rows or len(set(rows.values())) != 1 or not all(rows.values()):
        raise ValueError(
            f"a batch is a dict of arrays with one number of rows, but got {rows}."
        )
    distributed.check_batch_size(
        next(iter(rows.values()))[0],
        num_devices=num_devices,
        accumulation_steps=accumulation_steps,
    )


def _axis_size(axis_name: typing.AxisName) -> int:
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    mesh = jax.sharding.get_abstract_mesh()
    if not set(names) <= set(mesh.shape):
        raise ValueError(
            f"axis_name={axis_name!r} is not an axis of the mesh {dict(mesh.shape)};"
            " call the step inside jax.set_mesh(distributed.data_mesh()), or pass"
            " axis_name=None for one device."
        )
    return math.prod(mesh.shape[name] for name in names)


def _sharded(make_body, state, batch, rest, axis_name):
    """Runs the body on every device, state as its types say, rows cut over the axis."""
    # On an axis of one device nothing differs between devices: values typed so need no
    # collective, which would cost a copy of the gradients.
    one = _axis_size(axis_name) == 1
    rows = jax.P() if one else jax.P(axis_name)
    batch = jax.sharding.reshard(batch, rows)
    state_specs = distributed.specs_of(state)
    run = jax.shard_map(
        make_body(None if one else axis_name),
        in_specs=(state_specs, rows, jax.P(), jax.P()),
        out_specs=(state_specs, rows),
    )
    try:
        return run(state, batch, *rest)
    except ValueError as error:
        if "out_specs" in str(error):
            error.add_note(
                "The new state differs between devices: put"
                f" optimizers.pmean_grads({axis_name!r}) first in the optimizer chain."
            )
        raise


def data_parallel_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    *,
    axis_name: typing.AxisName | None = "data",
    accumulation_steps: int = 1,
):
    """Builds a training step that is compiled once and donates its state.

    Each device takes the gradient of its own rows, scaled so that the plain mean over
    devices is the gradient of ``sum(loss) / sum(weight)`` over the global batch. The
    one collective on gradients is the link of ``tx`` that communicates
    (``optimizers.pmean_grads``); where weights are traced one scalar is summed besides.
    Micro-batches are summed in float32 and count as one optimizer step. Row r of the
    batch gets the key ``fold_in(fold_in(key, step), r)``, whatever the devices and
    micro-batches.

    Args:
      loss_fn: ``(params, batch, keys) -> (loss_sum, weight_sum)`` over the rows given;
        float32[] each, weight_sum may be a positive Python number (the same for every
        equal number of rows). ``keys`` has one key a row.
      tx: the optimizer, with a link that communicates over ``axis_name``.
      axis_name: mesh axis of the rows, or several; None means one device and no mesh.
      accumulation_steps: micro-batches a batch is cut into on each device.

    Returns:
      A jitted ``step(state, batch, key, **extra) -> (state, metrics)``; ``extra`` goes
      to ``tx.update`` (``learning_rate=...``). A ``stage`` among them is static: a
      program is compiled for each (``optimizers.freeze_stage``). Metrics are
      ``loss_sum``, ``weight_sum`` (and ``grad_norm`` where ``tx`` clips), float32[N],
      one entry a device; :func:`read_metrics` averages them. ``step.lower(...)``
      compiles ahead.

    Raises:
      ValueError: if accumulation_steps is not positive; by the step, before it
        compiles, if rows do not divide by devices x accumulation_steps, if the loss
        function asks for a key that is missing or does not return two scalars.

    Example:
      >>> loss_fn = lambda w, batch, keys: (jnp.sum((batch["x"] * w) ** 2), 2)
      >>> tx = optax.sgd(0.25)
      >>> step = data_parallel_step(loss_fn, tx, axis_name=None)
      >>> state = _state.TrainState.create(jnp.ones(()), tx)
      >>> state, metrics = step(state, {"x": jnp.ones(2)}, jax.random.key(0))
      >>> float(state.params), read_metrics(metrics)["loss"]
      (0.5, 1.0)
    """
    if accumulation_steps < 1:
        raise ValueError(f"accumulation_steps={accumulation_steps} must be at least 1.")
    tx = optax.with_extra_args_support(tx)

    def step(state, batch, key, *, stage=None, **extra_args):
        num_devices = 1 if axis_name is None else _axis_size(axis_name)
        _check_rows(batch, num_devices, accumulation_steps)
        static = {} if stage is None else {"stage": stage}

        def make_body(axis):
            return _body(loss_fn, tx, axis, accumulation_steps, static)

        if axis_name is None:
            return make_body(None)(state, batch, key, extra_args)
        return _sharded(make_body, state, batch, (key, extra_args), axis_name)

    return jax.jit(step, donate_argnums=0, static_argnames="stage")


def read_pending(pending: Mapping[int, Metrics]) -> dict[int, dict[str, float]]:
    """Fetches the metrics of several steps at once, averaged over devices in float64.

    Waits for the steps, so call it only when logging. In a run of several processes all
    must call it together.

    Args:
      pending: step -> what the step returned, float32[N] each.

    Returns:
      step -> ``loss`` (per unit of weight), ``weight`` and the others as floats.

    Example:
      >>> sums = {"loss_sum": jnp.array([1.0, 5.0]), "weight_sum": jnp.ones(2)}
      >>> read_pending({7: sums})
      {7: {'loss': 3.0, 'weight': 2.0}}
    """
    return {k: _averages(v) for k, v in distributed.to_host(dict(pending)).items()}


def _averages(metrics) -> dict[str, float]:
    host = {name: value.astype("float64") for name, value in metrics.items()}
    loss, weight = host.pop("loss_sum").sum(), host.pop("weight_sum").sum()
    # Rows without any weight have no loss, which is not the same as an infinite one.
    values = {"loss": float(loss / weight) if weight else 0.0, "weight": float(weight)}
    return values | {name: float(value.mean()) for name, value in host.items()}


def read_metrics(metrics: Metrics) -> dict[str, float]:
    """Fetches the metrics of one step, as :func:`read_pending` does.

    Args:
      metrics: what the step returned, float32[N] each.

    Returns:
      ``loss`` (per unit of weight), ``weight`` and the others as floats.

    Example:
      >>> read_metrics({"loss_sum": jnp.array([1.0, 5.0]), "weight_sum": jnp.ones(2)})
      {'loss': 3.0, 'weight': 2.0}
    """
    return read_pending({0: metrics})[0]
