"""What compression has left out so far, kept on the devices and sent later.

Frank Seide et al., "1-bit stochastic gradient descent and its application to
data-parallel distributed training of speech DNNs", Interspeech 2014; with errors at
both ends of the mean: Hanlin Tang et al., https://arxiv.org/abs/2102.02888.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dataeff_jax import typing
from dataeff_jax.collectives import _compression, _plan


class ErrorFeedback(NamedTuple):
    """Errors of both ends, by the name of the leaf; made by :func:`error_feedback`.

    The sum of all means returned so far is the sum of the true means, less the mean of
    the workers' errors, less the servers' errors.
    """

    worker: dict[str, Any]  # [N, nodes, L, blocks, block], P(axis): of one's own
    server: dict[str, Any]  # [N, L, blocks, block], P(axis): of the part averaged


def device_spec(axis_name: typing.AxisName) -> jax.P:
    """The spec of an array whose first axis is the device's.

    Axes of one device are left out: nothing differs between devices there.

    Args:
      axis_name: a mesh axis, or (axis of nodes, axis inside a node).

    Returns:
      ``P(axes)``.

    Example:
      >>> with jax.set_mesh(jax.make_mesh((8, 1), ("node", "local"))):
      ...     device_spec(("node", "local"))
      P('node',)
    """
    named = varying_axes(axis_name)
    return jax.P(named) if len(named) > 1 else jax.P(*named)


def varying_axes(axis_name: typing.AxisName) -> tuple[str, ...]:
    """The axes that have several devices."""
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    shape = jax.sharding.get_abstract_mesh().shape
    return tuple(name for name in names if shape[name] > 1)


def mesh_sizes(axis_name: typing.AxisName | None) -> tuple[int, int]:
    """Devices of the axis, and how many of them make a node.

    Args:
      axis_name: a mesh axis, or (axis of nodes, axis inside a node); None for one
        device.

    Returns:
      (N, num_local).

    Raises:
      ValueError: outside a mesh with these axes.

    Example:
      >>> mesh_sizes(None)
      (1, 1)
    """
    if axis_name is None:
        return 1, 1
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    mesh = jax.sharding.get_abstract_mesh()
    if len(names) > 2 or not set(names) <= set(mesh.shape):
        raise ValueError(
            f"axis_name={axis_name!r} is neither an axis of the mesh"
            f" {dict(mesh.shape)} nor a pair of them; enter"
            " jax.set_mesh(distributed.data_mesh()), or pass axis_name=None for one"
            " device."
        )
    sizes = [mesh.shape[name] for name in names]
    num_local = sizes[1] if len(sizes) == 2 else 1
    return sizes[0] * num_local, num_local


def error_feedback(
    tree: typing.PyTree,
    axis_name: typing.AxisName | None,
    *,
    compression: _compression.Compression | None = None,
) -> ErrorFeedback:
    """Makes errors of zero for the compressed mean of a tree.

    Call it outside ``shard_map``, inside ``jax.set_mesh``; under ``jit`` no device ever
    holds more than its part.

    Args:
      tree: arrays or shapes, as the mean will get them.
      axis_name: the mesh axis, or (axis of nodes, axis inside a node); None for one
        device.
      compression: what is compressed and how; None for the defaults.

    Returns:
      Errors of zero, whose first axis is the device's; none for leaves that are not
      compressed.

    Raises:
      ValueError: outside a mesh with these axes.

    Example:
      >>> mesh = jax.make_mesh((8,), ("data",))
      >>> with jax.set_mesh(mesh):
      ...     errors = error_feedback({"w": jnp.zeros((100, 100))}, "data")
      >>> errors.worker["w"].shape, errors.server["w"].shape
      ((8, 8, 1, 1, 1256), (8, 1, 1, 1256))
    """
    num_devices, num_local = mesh_sizes(axis_name)
    plan = _plan.compression_plan(
        tree, num_devices=num_devices, num_local=num_local, compression=compression
    )
    dtype = jnp.dtype(plan.compression.error_dtype)
    others = {
        _plan.leaf_name(path): _plan.sharded_axes(leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }

    def zeros(name, *shape):
        if axis_name is None:
            return jnp.zeros((1, *shape), dtype)
        # A leaf cut over other axes as well has as many parts, each with its errors.
        parts = [jax.sharding.get_abstract_mesh().shape[axis] for axis in others[name]]
        devices = num_devices * math.prod(parts)
        axes = (*varying_axes(axis_name), *others[name])
        spec = jax.P(axes) if len(axes) > 1 else jax.P(*axes)
        return jnp.zeros((devices, *shape), dtype, out_sharding=spec)

    return ErrorFeedback(
        {x.name: zeros(x.name, plan.nodes, *x.part_shape) for x in plan.leaves},
        {x.name: zeros(x.name, *x.part_shape) for x in plan.leaves},
    )


def pending_mean(feedback: ErrorFeedback, plan: _plan.Plan) -> dict[str, np.ndarray]:
    """What has been put in but has not come out yet, by leaf, on the host.

    Args:
      feedback: whole arrays (``distributed.to_host``).
      plan: the plan they were made for.

    Returns:
      Mean of the workers' errors plus the servers' errors, in the shapes of the leaves.

    Example:
      >>> plan = _plan.compression_plan(
      ...     {"w": jnp.ones((8, 8))}, num_devices=1,
      ...     compression=_compression.Compression(min_size=0))
      >>> one = {"w": np.ones((1, 1, 1, 1, 64))}
      >>> pending_mean(ErrorFeedback(one, {"w": one["w"][0]}), plan)["w"].mean()
      np.float32(2.0)
    """
    worker, server = logical_errors(feedback, plan)
    return {name: worker[name].mean(axis=0) + server[name] for name in worker}


def logical_errors(
    feedback: ErrorFeedback, plan: _plan.Plan
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Errors in the shapes of the leaves, without padding.

    Inside a node each device holds the errors of its own parts of the node's sum; they
    are put together to those of one worker, the node.

    Args:
      feedback: whole arrays (``distributed.to_host``).
      plan: the plan they were made for.

    Returns:
      Worker errors ``[nodes, ...]`` and server errors ``[...]``, by leaf.

    Example:
      >>> tree, c = {"w": jnp.ones((3, 5))}, _compression.Compression(min_size=0)
      >>> plan = _plan.compression_plan(tree, num_devices=2, compression=c)
      >>> errors = physical_errors({"w": np.ones((2, 3, 5))}, tree, plan)
      >>> errors.worker["w"].shape, logical_errors(errors, plan)[0]["w"].shape
      ((2, 2, 1, 1, 8), (2, 3, 5))
    """
    worker, server = {}, {}
    for layout in plan.leaves:
        mine = np.asarray(feedback.worker[layout.name], np.float32)
        # Device (node, l) has the parts (l, 0), (l, 1), .. of the leaf.
        mine = mine.reshape(plan.nodes, layout.parts, *layout.part_shape)
        worker[layout.name] = np.stack([_join(layout, parts) for parts in mine])
        # Device (node, l) averages the part (l, node).
        own = np.asarray(feedback.server[layout.name], np.float32)
        own = own.reshape(plan.nodes, plan.local, *layout.part_shape).swapaxes(0, 1)
        server[layout.name] = _join(
            layout, own.reshape(layout.parts, *layout.part_shape)
        )
    return worker, server


def _join(layout: _plan.LeafLayout, parts: np.ndarray) -> np.ndarray:
    x = np.moveaxis(parts, 0, 1).reshape(layout.layers, -1)
    return x[:, : layout.size].reshape(layout.shape)


def _split(layout: _plan.LeafLayout, leaf: np.ndarray) -> np.ndarray:
    x = leaf.reshape(layout.layers, layout.size)
    padded = layout.parts * layout.blocks * layout.block
    x = np.pad(x, ((0, 0), (0, padded - layout.size)))
    x = x.reshape(layout.layers, layout.parts, layout.blocks, layout.block)
    return np.moveaxis(x, 1, 0)


def physical_errors(
    worker: dict[str, np.ndarray], server: dict[str, np.ndarray], plan: _plan.Plan
) -> ErrorFeedback:
    """Inverse of :func:`logical_errors`: errors as the devices of a plan hold them.

    Args:
      worker: ``[nodes, ...]`` by leaf.
      server: ``[...]`` by leaf.
      plan: the plan to make them for.

    Returns:
      Whole arrays on the host.

    Example:
      >>> tree, c = {"w": np.ones((8, 8))}, _compression.Compression(min_size=0)
      >>> plan = _plan.compression_plan(tree, num_devices=4, compression=c)
      >>> physical_errors({"w": np.ones((4, 8, 8))}, tree, plan).server["w"].shape
      (4, 1, 1, 16)
    """
    dtype = jnp.dtype(plan.compression.error_dtype)
    devices = plan.nodes * plan.local
    held = ErrorFeedback({}, {})
    for layout in plan.leaves:
        mine = np.stack([_split(layout, leaf) for leaf in worker[layout.name]])
        shape = (devices, plan.nodes, *layout.part_shape)
        held.worker[layout.name] = mine.reshape(shape).astype(dtype)
        own = _split(layout, np.asarray(server[layout.name]))
        own = own.reshape(plan.local, plan.nodes, *layout.part_shape).swapaxes(0, 1)
        held.server[layout.name] = own.reshape(devices, *layout.part_shape).astype(
            dtype
        )
    return held


def resize_errors(
    feedback: ErrorFeedback, old: _plan.Plan, new: _plan.Plan
) -> ErrorFeedback:
    """Carries errors over to another number of devices; their mean is kept.

    Where the new number of nodes divides the old one, groups of workers are averaged;
    else each new worker gets the mean of all. What is pending, and with it the sum of
    all means, stays the same. Errors of a leaf that the new plan does not compress are
    lost; a leaf that only the new plan compresses starts at zero.

    Args:
      feedback: whole arrays (``distributed.to_host``), for the old plan.
      old: the plan that they were made for.
      new: the plan to make them for.

    Returns:
      Whole arrays on the host, to be put on the devices with the new state's shardings.

    Example:
      >>> tree, c = {"w": jnp.ones((8, 8))}, _compression.Compression(min_size=0)
      >>> four, two = (_plan.compression_plan(tree, num_devices=n, compression=c)
      ...              for n in (4, 2))
      >>> worker = {"w": np.arange(4.0).reshape(4, 1, 1) * np.ones((4, 8, 8))}
      >>> errors = physical_errors(worker, {"w": np.zeros((8, 8))}, four)
      >>> resize_errors(errors, four, two).worker["w"][:, 0, 0, 0, 0].tolist()
      [0.5, 2.5]
    """
    worker, server = logical_errors(feedback, old)
    for layout in new.leaves:
        had = worker.get(layout.name, np.zeros((1, *layout.shape), np.float32))
        server.setdefault(layout.name, np.zeros(layout.shape, np.float32))
        if had.shape[0] % new.nodes == 0:
            had = had.reshape(new.nodes, -1, *layout.shape).mean(axis=1)
        else:
            had = np.broadcast_to(had.mean(axis=0), (new.nodes, *layout.shape))
        worker[layout.name] = had
    return physical_errors(worker, server, new)
