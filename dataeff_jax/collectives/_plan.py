"""Which part of which leaf goes to which device, and what that sends."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dataeff_jax import typing
from dataeff_jax.collectives import _compression


class LeafLayout(NamedTuple):
    """A leaf cut into parts, one for each device that averages a part.

    ``[L, s]`` (L layers of s values each, L = 1 without a stack) is padded and becomes
    ``[parts, L, blocks, block]``; part p holds values ``[p * blocks * block, ...)`` of
    every layer.
    """

    name: str  # such as "blocks.up.kernel"
    shape: tuple[int, ...]
    layers: int  # L
    parts: int
    blocks: int  # segments of a part
    block: int  # values of a segment, a multiple of 8

    @property
    def size(self) -> int:
        """Values of one layer."""
        return math.prod(self.shape) // self.layers

    @property
    def part_shape(self) -> tuple[int, int, int]:
        """Shape of one part, padding included."""
        return (self.layers, self.blocks, self.block)

    @property
    def segments(self) -> int:
        """Scales of one part."""
        return self.layers * self.blocks

    def counts(self) -> np.ndarray:
        """Values that are no padding, int64[parts, 1, blocks]."""
        starts = np.arange(self.parts * self.blocks) * self.block
        counts = np.clip(self.size - starts, 0, self.block)
        return counts.reshape(self.parts, 1, self.blocks)

    def split(self, leaf: jax.Array) -> jax.Array:
        """Cut a leaf into parts, float32[parts, L, blocks, block], padded with 0."""
        x = leaf.astype(jnp.float32).reshape(self.layers, self.size)
        padding = self.parts * self.blocks * self.block - self.size
        x = jnp.pad(x, ((0, 0), (0, padding)))
        x = x.reshape(self.layers, self.parts, self.blocks, self.block)
        return jnp.moveaxis(x, 1, 0)

    def join(self, parts: jax.Array) -> jax.Array:
        """Put parts together again, without the padding."""
        x = jnp.moveaxis(parts, 0, 1).reshape(self.layers, -1)
        return x[:, : self.size].reshape(self.shape)


class Plan(NamedTuple):
    """What a compressed mean of a tree sends: made by :func:`compression_plan`.

    Bytes are what one device sends in one mean; the collectives of a compiled program
    can be held against it with :func:`check_collectives`.
    """

    nodes: int  # devices between which values travel compressed
    local: int  # devices inside a node, 1 without a hierarchy
    leaves: tuple[LeafLayout, ...]  # those that are compressed
    excluded: tuple[tuple[str, int, int], ...]  # (name, values, bytes) of the others
    buckets: tuple[tuple[int, ...], ...]  # indices into leaves
    compression: _compression.Compression

    def message_bytes(self, bucket: tuple[int, ...]) -> int:
        """Bytes that go to one device: packed values, then 4 for every scale."""
        per_byte = self.compression.values_per_byte
        return sum(
            math.prod(layout.part_shape) // per_byte + 4 * layout.segments
            for layout in (self.leaves[i] for i in bucket)
        )

    @property
    def between_bytes(self) -> int:
        """Bytes sent by the two compressed collectives between nodes."""
        if self.nodes * self.local == 1:
            return 0
        messages = sum(self.message_bytes(bucket) for bucket in self.buckets)
        return 2 * (self.nodes - 1) * messages

    @property
    def inside_bytes(self) -> int:
        """Bytes sent between the devices of a node: floats in, packed values out."""
        floats = sum(4 * math.prod(layout.part_shape) for layout in self.leaves)
        return (self.local - 1) * self.nodes * floats + self._packed_inside

    @property
    def _packed_inside(self) -> int:
        packed = sum(self.message_bytes(bucket) for bucket in self.buckets)
        return (self.local - 1) * self.nodes * packed

    @property
    def packed_bytes(self) -> int:
        """Bytes sent as packed values and their scales, between and inside nodes."""
        return self.between_bytes + self._packed_inside

    @property
    def excluded_bytes(self) -> int:
        """Bytes sent by the all-reduce of the leaves that are not compressed."""
        devices = self.nodes * self.local
        payload = sum(bytes_ for _, _, bytes_ in self.excluded)
        return 2 * payload * (devices - 1) // devices

    @property
    def wire_bytes(self) -> int:
        """All bytes that a device sends."""
        return self.between_bytes + self.inside_bytes + self.excluded_bytes

    @property
    def dense_bytes(self) -> int:
        """Bytes that a float32 all-reduce of all leaves would send."""
        devices = self.nodes * self.local
        values = sum(math.prod(layout.shape) for layout in self.leaves)
        values += sum(count for _, count, _ in self.excluded)
        return 2 * 4 * values * (devices - 1) // devices


def sharded_axes(leaf: Any) -> tuple[str, ...]:
    """Mesh axes, other than those that are manual here, over which a leaf is cut."""
    found = []
    for entry in jax.typeof(leaf).sharding.spec:
        found += [] if entry is None else [entry] if isinstance(entry, str) else entry
    return tuple(found)


def on_one_device(leaf: Any) -> jax.ShapeDtypeStruct:
    """The part of a leaf that a device holds: it is compressed as it lies."""
    kind = jax.typeof(leaf)
    sizes = kind.sharding.mesh.shape

    def cut(length, entry):
        names = (entry,) if isinstance(entry, str) else entry or ()
        return length // math.prod(sizes[name] for name in names)

    entries = (*kind.sharding.spec, *[None] * len(kind.shape))
    shape = tuple(cut(n, e) for n, e in zip(kind.shape, entries, strict=False))
    return jax.ShapeDtypeStruct(shape, kind.dtype)


def leaf_name(path: Any) -> str:
    """Name a leaf by its keys, with dots."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def compression_plan(
    tree: typing.PyTree,
    *,
    num_devices: int,
    num_local: int = 1,
    compression: _compression.Compression | None = None,
) -> Plan:
    """Lays out a tree for a compressed mean and counts what that sends.

    Args:
      tree: arrays or ``jax.ShapeDtypeStruct``, as the mean will get them. Of a leaf
        that is cut over another mesh axis each device compresses its own part.
      num_devices: N, devices that average.
      num_local: devices of one node, inside which values travel in full precision.
      compression: what is compressed and how; None for the defaults.

    Returns:
      The plan.

    Raises:
      ValueError: if num_local does not divide num_devices, or a stacked leaf is empty
        or without axes.

    Example:
      >>> plan = compression_plan({"w": jnp.zeros((1000, 1000))}, num_devices=8)
      >>> plan.wire_bytes, plan.dense_bytes, round(plan.dense_bytes / plan.wire_bytes)
      (218806, 7000000, 32)
    """
    compression = compression or _compression.Compression()
    if num_devices % num_local:
        raise ValueError(
            f"num_local={num_local} must divide num_devices={num_devices}."
        )
    leaves, excluded = [], []
    tree = jax.tree.map(on_one_device, tree)
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        layout = _layout(path, leaf, num_devices, num_local, compression)
        if layout is not None:
            leaves.append(layout)
        elif leaf.size:
            bytes_ = leaf.size * jnp.dtype(compression.excluded_dtype).itemsize
            excluded.append((leaf_name(path), leaf.size, bytes_))
    plan = Plan(
        num_devices // num_local,
        num_local,
        tuple(leaves),
        tuple(excluded),
        (),
        compression,
    )
    return plan._replace(buckets=_buckets(plan, compression.bucket_bytes))


def _layout(path, leaf, num_devices, num_local, compression) -> LeafLayout | None:
    """How a leaf is cut; None where it travels as it is."""
    if leaf.size == 0:
        return None
    stacked = compression.is_stacked is not None and compression.is_stacked(path)
    if stacked and not leaf.shape:
        raise ValueError(f"{leaf_name(path)} is stacked, but has no axis of layers.")
    layers = leaf.shape[0] if stacked else 1
    shape = leaf.shape[1:] if stacked else leaf.shape
    if compression.exclude is not None and compression.exclude(path, shape):
        return None
    if leaf.size < compression.min_size * num_devices:
        return None
    size = leaf.size // layers
    nodes = num_devices // num_local
    if compression.padding == "counted":  # DeepSpeed pads to devices * lcm(devices, 8)
        blocks, unit = 1, math.lcm(nodes, 8)
    else:
        unit = 8
        blocks = 1
        if isinstance(compression.segment, int):
            blocks = math.ceil(size / (num_devices * compression.segment))
    block = math.ceil(size / (num_devices * blocks * unit)) * unit
    return LeafLayout(leaf_name(path), leaf.shape, layers, num_devices, blocks, block)


def _buckets(plan: Plan, limit: int | None) -> tuple[tuple[int, ...], ...]:
    """Consecutive leaves, each bucket but the last of at least ``limit`` bytes."""
    found, current, filled = [], [], 0
    for i in range(len(plan.leaves)):
        current.append(i)
        filled += plan.message_bytes((i,)) * plan.nodes
        if limit is not None and filled >= limit:
            found.append(tuple(current))
            current, filled = [], 0
    return (*found, tuple(current)) if current else tuple(found)
