"""Means over devices that travel compressed, with error feedback at both ends.

Hanlin Tang et al., "1-bit Adam: communication efficient large-scale training with
Adam's convergence speed", https://arxiv.org/abs/2102.02888, figure 3: each device
averages one part of the values, gathered from all by an all-to-all, compresses the
average again, and an all-gather hands it out. Scales travel inside the two messages.
"""

import jax
import jax.numpy as jnp

from dataeff_jax import distributed, typing
from dataeff_jax.collectives import (
    _compression,
    _error_feedback,
    _hierarchical,
    _plan,
)


def compressed_pmean(
    tree: typing.PyTree,
    axis_name: typing.AxisName | None,
    feedback: _error_feedback.ErrorFeedback,
    *,
    compression: _compression.Compression | None = None,
    active: typing.PyTree | None = None,
) -> tuple[typing.PyTree, _error_feedback.ErrorFeedback]:
    """Averages a tree over devices, sending few bits for every value.

    What is lost in a message is added to the next one. Of N devices each sends about
    ``2 (N - 1) / N`` bits a value (``compression_plan`` counts exactly), in one
    all-to-all and one all-gather; leaves that are excluded go through one ordinary
    mean. With (axis of nodes, axis inside a node) values are summed in full precision
    inside a node, and only one message a node crosses the first axis.

    Leaves that are cut over another, explicit axis of the mesh (tensor or FSDP) are
    compressed as they lie, each device its part.

    A NaN or infinity on any device makes its segment of the mean NaN on all devices:
    check the result and keep the old feedback then.

    Args:
      tree: arrays, different on the devices; inside ``shard_map``.
      axis_name: the mesh axis, or (axis of nodes, axis inside a node). None means one
        device: values are compressed as if sent, but go nowhere.
      feedback: of :func:`error_feedback`, one device's part.
      compression: what is compressed and how; None for the defaults.
      active: tree of bool, the same on all devices: False where values stay 0 and have
        no error. None for everywhere.

    Returns:
      The mean, float32, typed as equal on all devices, and the new feedback.

    Example:
      >>> mesh, tree = jax.make_mesh((8,), ("data",)), {"w": jnp.ones((128, 64))}
      >>> with jax.set_mesh(mesh):
      ...     errors = _error_feedback.error_feedback(tree, "data")
      ...     specs = distributed.specs_of(errors)
      ...     mean, errors = jax.jit(jax.shard_map(
      ...         lambda tree, errors: compressed_pmean(tree, "data", errors),
      ...         in_specs=(jax.P(), specs), out_specs=(jax.P(), specs)))(tree, errors)
      >>> mean["w"].shape, mean["w"].mean().item()
      ((128, 64), 1.0)

    References:
      Tang et al., "1-bit Adam: communication efficient large-scale training with Adam's
      convergence speed", https://arxiv.org/abs/2102.02888, 2021
    """
    compression = compression or _compression.Compression()
    leaves, structure = jax.tree.flatten(tree)
    axes_of = [(_plan.sharded_axes(x), _varying(x, axis_name)) for x in leaves]
    mean, new = [None] * len(leaves), _error_feedback.ErrorFeedback({}, {})
    for axes in dict.fromkeys(axes_of):
        # Types of one message are the same for all that travels in it.
        chosen = [other == axes for other in axes_of]
        part = _where(chosen, tree), feedback, active
        found, errors = _pmean_over(axes[0], axis_name, compression, chosen, *part)
        names = _names(part[0])
        new.worker.update({n: x for n, x in errors.worker.items() if n in names})
        new.server.update({n: x for n, x in errors.server.items() if n in names})
        values = iter(jax.tree.leaves(found))
        mean = [next(values) if own else x for own, x in zip(chosen, mean, strict=True)]
    return jax.tree.unflatten(structure, mean), new


def _varying(leaf, axis_name) -> frozenset[str]:
    """Axes of the mesh, besides those averaged over, along which values differ."""
    names = (axis_name,) if isinstance(axis_name, str) else axis_name or ()
    return frozenset(jax.typeof(leaf).manual_axis_type.varying) - set(names)


def _where(chosen, tree):
    """The tree with None for the leaves that are not chosen; paths stay."""
    leaves, structure = jax.tree.flatten(tree)
    kept = [leaf if own else None for own, leaf in zip(chosen, leaves, strict=True)]
    return jax.tree.unflatten(structure, kept)


def _names(tree) -> set[str]:
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {_plan.leaf_name(path) for path, _ in paths}


def _pmean_over(axes, axis_name, compression, chosen, tree, feedback, active):
    """The mean of leaves that are cut over the same other axes of the mesh."""
    names = _names(tree)
    feedback = _error_feedback.ErrorFeedback(
        *({n: x for n, x in part.items() if n in names} for part in feedback)
    )
    active = None if active is None else _where(chosen, active)
    arguments = (tree, feedback, active)
    if not axes:
        return _pmean(tree, axis_name, feedback, compression, active)
    # Flattened, such leaves would be gathered in float32: enter their axes first.
    specs = distributed.specs_of(arguments)
    return jax.shard_map(
        lambda tree, feedback, active: _pmean(
            tree, axis_name, feedback, compression, active
        ),
        in_specs=specs,
        out_specs=specs[:2],
        axis_names=set(axes),
    )(*arguments)


def _pmean(tree, axis_name, feedback, compression, active):
    """The compressed mean of leaves that a device holds whole."""
    group = _hierarchical.Group.of(axis_name)
    plan = _plan.compression_plan(
        tree,
        num_devices=group.nodes * group.local,
        num_local=group.local,
        compression=compression,
    )
    tree = group.settle(tree, axis_name)
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {_plan.leaf_name(path): leaf for path, leaf in leaves}
    masks = {name: None for name in named}
    if active is not None:
        masks = dict(zip(named, jax.tree.leaves(active), strict=True))
    mean, worker, server = {}, {}, {}
    for bucket in plan.buckets:
        layouts = [plan.leaves[i] for i in bucket]
        found = _mean_of_bucket(layouts, named, masks, feedback, group, plan)
        for part, new in zip((mean, worker, server), found, strict=True):
            part.update(new)
    mean |= _plain_mean(named, masks, plan, group)
    result = jax.tree.unflatten(jax.tree.structure(tree), [mean[n] for n in named])
    return result, _error_feedback.ErrorFeedback(worker, server)


def compressed_psum(
    tree: typing.PyTree,
    axis_name: typing.AxisName | None,
    feedback: _error_feedback.ErrorFeedback,
    **options,
) -> tuple[typing.PyTree, _error_feedback.ErrorFeedback]:
    """Sums a tree over devices: :func:`compressed_pmean` times their number.

    Errors are in units of the mean.

    Args:
      tree: arrays, different on the devices; inside ``shard_map``.
      axis_name: as of :func:`compressed_pmean`.
      feedback: as of :func:`compressed_pmean`.
      **options: as of :func:`compressed_pmean`.

    Returns:
      The sum and the new feedback.

    Example:
      >>> tree = {"w": jnp.ones((32, 32))}
      >>> errors = _error_feedback.error_feedback(tree, None)
      >>> compressed_psum(tree, None, errors)[0]["w"].sum().item()
      1024.0
    """
    group = _hierarchical.Group.of(axis_name)
    mean, feedback = compressed_pmean(tree, axis_name, feedback, **options)
    return jax.tree.map(lambda x: x * (group.nodes * group.local), mean), feedback


def _mean_of_bucket(layouts, named, masks, feedback, group, plan):
    """Mean, worker errors and server errors of the leaves of one message."""
    sent, worker = {}, {}
    for layout in layouts:
        x = group.scatter(layout.split(named[layout.name]))  # [nodes, L, blocks, block]
        valid = _valid(layout, masks[layout.name], group, plan)
        error = feedback.worker[layout.name][0].astype(jnp.float32)
        sent[layout.name], new = _compress(x + error, valid, plan.compression)
        worker[layout.name] = new.astype(feedback.worker[layout.name].dtype)[None]
    received = group.all_to_all(_message(layouts, sent))  # [nodes, bytes]

    handed, server = {}, {}
    for layout in layouts:
        x = _decoded_mean(layout, layouts, received, plan)[None]  # [1, L, blocks, ..]
        valid = group.own_node(_valid(layout, masks[layout.name], group, plan))
        error = feedback.server[layout.name].astype(jnp.float32)
        handed[layout.name], new = _compress(x + error, valid, plan.compression)
        server[layout.name] = new.astype(feedback.server[layout.name].dtype)
    gathered = group.all_gather(_message(layouts, handed))  # [parts, bytes]

    mean = {}
    for layout in layouts:
        parts = _decoded(layout, layouts, gathered, plan)
        mean[layout.name] = layout.join(parts)
        if masks[layout.name] is not None:
            mean[layout.name] = jnp.where(masks[layout.name], mean[layout.name], 0)
    return mean, worker, server


def _valid(layout, mask, group, plan):
    """Which values count, bool[nodes, L, blocks, block], and how many a segment."""
    shape = (layout.parts, *layout.part_shape)
    if plan.compression.padding == "counted":
        full = jnp.full((*shape[:-1], 1), layout.block, jnp.float32)
        return None, group.own_parts(full)
    counts = jnp.asarray(layout.counts()[..., None], jnp.float32)
    counts = jnp.broadcast_to(counts, (*shape[:-1], 1))
    if mask is not None:
        inside = layout.split(mask) > 0
        counts = jnp.sum(inside, axis=-1, keepdims=True, dtype=jnp.float32)
        return group.own_parts(inside), group.own_parts(counts)
    if layout.size == layout.parts * layout.blocks * layout.block:
        return None, group.own_parts(counts)
    inside = jnp.arange(layout.block).reshape(1, 1, 1, -1) < counts
    return group.own_parts(inside), group.own_parts(counts)


def _compress(x, valid, compression):
    """(packed values, scales) to send, and what they leave out."""
    inside, counts = valid
    axes = (0, 2, 3) if compression.segment == "tensor" else (3,)
    total = jnp.sum(counts, axis=axes, keepdims=True)
    scale = _compression.scales_of(x, inside, total, compression, axes=axes)
    if inside is not None:
        x = jnp.where(inside, x, 0)
    packed, sent = _compression.encode(x, scale, compression)
    error = x - sent
    if inside is not None:
        error = jnp.where(inside, error, 0)
    return (packed, jnp.broadcast_to(scale, (*x.shape[:-1], 1))), error


def _message(layouts, sent):
    """Bytes for each receiver, uint8[receivers, bytes]: packed values, then scales."""
    packed = [sent[layout.name][0] for layout in layouts]
    scales = [sent[layout.name][1] for layout in layouts]
    rows = packed[0].shape[0]
    scales = jnp.concatenate([s.reshape(rows, -1) for s in scales], axis=1)
    scales = jax.lax.bitcast_convert_type(scales, jnp.uint8)  # [rows, scales, 4]
    pieces = [*(p.reshape(rows, -1) for p in packed), scales.reshape(rows, -1)]
    return jnp.concatenate(pieces, axis=1)


def _parts_of_message(layout, layouts, message, plan):
    """Cut a leaf's packed values and scales out of messages [rows, bytes]."""
    rows, per_byte = message.shape[0], plan.compression.values_per_byte
    sizes = [other.segments * other.block // per_byte for other in layouts]
    index = layouts.index(layout)
    start = sum(sizes[:index])
    packed = message[:, start : start + sizes[index]]
    start = sum(sizes) + 4 * sum(other.segments for other in layouts[:index])
    scale = message[:, start : start + 4 * layout.segments]
    scale = scale.reshape(rows, layout.layers, layout.blocks, 1, 4)
    packed = packed.reshape(rows, layout.layers, layout.blocks, -1)
    return packed, jax.lax.bitcast_convert_type(scale, jnp.float32)


def _decoded(layout, layouts, message, plan):
    packed, scale = _parts_of_message(layout, layouts, message, plan)
    return _compression.decode(packed, scale, plan.compression)


def _decoded_mean(layout, layouts, received, plan):
    """Mean of what all nodes sent, one after the other, float32[L, blocks, block]."""
    packed, scale = _parts_of_message(layout, layouts, received, plan)

    def add(total, one):
        packed, scale = one
        return total + _compression.decode(packed, scale, plan.compression), None

    first = _compression.decode(packed[0], scale[0], plan.compression)
    if plan.nodes <= 8:  # unrolled, which fuses into one pass
        total = first
        for i in range(1, plan.nodes):
            total, _ = add(total, (packed[i], scale[i]))
    else:
        total, _ = jax.lax.scan(add, first, (packed[1:], scale[1:]))
    return total / plan.nodes


def _plain_mean(named, masks, plan, group):
    """The leaves that are not compressed, in one ordinary mean."""
    compressed = {layout.name for layout in plan.leaves}
    rest = {n: x.astype(jnp.float32) for n, x in named.items() if n not in compressed}
    dtype = jnp.dtype(plan.compression.excluded_dtype)
    sent = {name: x.astype(dtype) for name, x in rest.items() if x.size}
    sent = {name: x.astype(jnp.float32) for name, x in group.pmean(sent).items()}
    for name, x in sent.items():
        if masks[name] is not None:
            sent[name] = jnp.where(masks[name], x, 0)
    return rest | sent
