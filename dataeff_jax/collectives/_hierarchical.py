"""The collectives of a compressed mean on one axis, or between and inside nodes.

With two axes a node is one worker: its devices sum in full precision, each a part of
the values, over the fast links inside; that part alone is compressed and crosses to the
other nodes; and the packed result is handed round inside.
"""

from typing import NamedTuple

import jax

from dataeff_jax import distributed, typing


class Group(NamedTuple):
    """The devices that average together: ``nodes`` times ``local`` of them."""

    node_axis: str | None
    local_axis: str | None
    nodes: int
    local: int

    @classmethod
    def of(cls, axis_name: typing.AxisName | None) -> "Group":
        """Look the axes up; inside ``shard_map``."""
        if axis_name is None:
            return cls(None, None, 1, 1)
        names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
        if len(names) not in (1, 2):
            raise ValueError(
                f"axis_name={axis_name!r} must be one axis, or (axis of nodes, axis"
                " inside a node)."
            )
        sizes = [jax.lax.axis_size(name) for name in names]
        if len(names) == 1:
            return cls(names[0], None, sizes[0], 1)
        return cls(names[0], names[1], sizes[0], sizes[1])

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which devices differ."""
        named = ((self.node_axis, self.nodes), (self.local_axis, self.local))
        return tuple(name for name, size in named if name is not None and size > 1)

    def settle(self, tree, axis_name: typing.AxisName | None):
        """Type values as equal along axes of one device, where nothing differs."""
        names = (axis_name,) if isinstance(axis_name, str) else axis_name or ()
        single = set(names) - set(self.axes)

        def leaf(x):
            typed = tuple(single & set(jax.typeof(x).manual_axis_type.varying))
            return jax.lax.pmean(x, typed) if typed else x

        return jax.tree.map(leaf, tree)

    def scatter(self, parts: jax.Array) -> jax.Array:
        """Mean inside the node, of which a device gets its parts.

        ``[local * nodes, ...]`` becomes ``[nodes, ...]``.
        """
        if self.local == 1:
            return parts
        parts = distributed.vary(parts, self.axes)
        parts = parts.reshape(self.local, self.nodes, *parts.shape[1:])
        summed = jax.lax.psum_scatter(parts, self.local_axis)
        return summed / self.local

    def own_parts(self, parts: jax.Array) -> jax.Array:
        """The parts that this device sends: ``[local * nodes, ...]`` to [nodes, ...]``.

        Values must be the same on all devices.
        """
        if self.local == 1:
            return parts
        parts = parts.reshape(self.local, self.nodes, *parts.shape[1:])
        return parts[jax.lax.axis_index(self.local_axis)]

    def own_node(self, tree):
        """Of values for all nodes the one for this device's node, [1, ...]."""
        if self.nodes == 1:
            return tree
        index = jax.lax.axis_index(self.node_axis)
        take = lambda x: jax.lax.dynamic_slice_in_dim(x, index, 1)  # noqa: E731
        return jax.tree.map(take, tree)

    def all_to_all(self, messages: jax.Array) -> jax.Array:
        """Row i goes to node i; row i of the result came from node i."""
        if self.nodes == 1:
            return messages
        messages = distributed.vary(messages, self.node_axis)
        return jax.lax.all_to_all(messages, self.node_axis, 0, 0, tiled=True)

    def all_gather(self, message: jax.Array) -> jax.Array:
        """Every device's message [1, bytes], the same for all: [parts, bytes]."""
        if self.nodes > 1:
            message = self._gathered(message, self.node_axis)
        if self.local > 1:
            message = self._gathered(message, self.local_axis)
        return message

    def _gathered(self, message, axis):
        message = distributed.vary(message, axis)
        return jax.lax.all_gather(message, axis, tiled=True, to="invarying")

    def pmean(self, tree):
        """An ordinary mean over all devices, in one collective."""
        if not self.axes or not tree:
            return tree
        return jax.lax.pmean(distributed.vary(tree, self.axes), self.axes)
