"""One mesh axis for data parallelism, and moving batches and parameters onto it."""

import fnmatch

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from dataeff_jax import typing

# Fields that only the host reads, such as 64-bit ids: they never go to a device.
HOST_KEYS = ("sample_id", "step", "length", "corpus", "difficulty_*")


def data_mesh(
    num_devices: int | None = None, *, axis_name: str = "data"
) -> jax.sharding.Mesh:
    """Makes a mesh of one axis over the devices, in Explicit mode.

    Enter it with ``jax.set_mesh(mesh)``: shardings are then part of the arrays' types,
    and a mismatch is an error instead of a silent copy.

    Args:
      num_devices: how many devices to use, counted over all processes; None means all.
      axis_name: name of the axis.

    Returns:
      A mesh of shape ``{axis_name: num_devices}``.

    Raises:
      ValueError: if there are fewer devices, or if a process would get none.

    Example:
      >>> dict(data_mesh(1).shape)
      {'data': 1}
    """
    devices = jax.devices()
    count = len(devices) if num_devices is None else num_devices
    if not 1 <= count <= len(devices):
        raise ValueError(
            f"num_devices={num_devices} is not between 1 and {len(devices)}, the number"
            " of devices that JAX sees; on CPU set jax_num_cpu_devices before JAX"
            " starts."
        )
    if jax.process_count() > 1 and count != len(devices):
        raise ValueError(
            f"num_devices={num_devices} with {jax.process_count()} processes: a mesh"
            f" over several processes takes all {len(devices)} devices; leave"
            " num_devices=None."
        )
    return jax.make_mesh(
        (count,),
        (axis_name,),
        axis_types=(jax.sharding.AxisType.Explicit,),
        devices=devices[:count],
    )


def _nearest_multiples(value: int, unit: int) -> str:
    below = value // unit * unit
    return f"{below} and {below + unit}" if below else f"{unit}"


def check_batch_size(
    batch_size: int, *, num_devices: int, accumulation_steps: int = 1
) -> None:
    """Raises unless every device gets the same number of rows in every micro-batch.

    Args:
      batch_size: rows of the global batch.
      num_devices: devices on the data axis.
      accumulation_steps: micro-batches that a batch is cut into.

    Raises:
      ValueError: with the numbers given and the nearest sizes that work.

    Example:
      >>> check_batch_size(12, num_devices=8)
      Traceback (most recent call last):
      ...
      ValueError: batch_size=12 does not divide by 8 devices; the nearest sizes that \
do are 8 and 16.
    """
    unit = num_devices * accumulation_steps
    if batch_size > 0 and batch_size % unit == 0:
        return
    parts = f"{num_devices} devices"
    if accumulation_steps > 1:
        parts += f" x {accumulation_steps} accumulation steps = {unit}"
    nearest = _nearest_multiples(max(batch_size, 0), unit)
    verb = "sizes that do are" if " and " in nearest else "size that does is"
    raise ValueError(
        f"batch_size={batch_size} does not divide by {parts}; the nearest"
        f" {verb} {nearest}."
    )


def replicate(tree: typing.PyTree, mesh: jax.sharding.Mesh | None = None):
    """Copies arrays to every device of a mesh.

    The copies share no memory with the originals, so that a step which donates its
    state leaves the originals alone. In a run of several processes each must hold the
    same values.

    Args:
      tree: arrays, of any shape and dtype.
      mesh: the mesh; None means the one entered with ``jax.set_mesh``, and outside
        any mesh the default device. Traced values are only typed, over the mesh
        entered, so that ``jax.eval_shape`` works.

    Returns:
      The tree with new arrays, sharded ``P()``.

    Example:
      >>> replicate({"w": np.ones(3)}, data_mesh(1))["w"].sharding.spec
      P(None,)
    """
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree)):
        return _replicate_traced(tree)
    mesh = mesh or jax.sharding.get_mesh()
    if mesh.empty:
        return _copy(tree)
    sharding = jax.NamedSharding(mesh, jax.P())

    def from_host(x):
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda i: host[i])

    if jax.process_count() == 1:
        tree = jax.device_put(tree, sharding)
    else:
        tree = jax.tree.map(from_host, tree)
    with jax.set_mesh(mesh):
        return _copy(tree)


def _replicate_traced(tree):
    """Types traced values as equal everywhere, for programs compiled from shapes."""
    if jax.sharding.get_abstract_mesh().empty:
        return tree
    return jax.tree.map(lambda x: jax.sharding.reshard(x, jax.P()), tree)


@jax.jit
def _copy(tree):
    # device_put alone reuses a buffer that lies on one of the devices already, even
    # with may_alias=False.
    return jax.tree.map(jnp.copy, tree)


def _check_width(name: str, array: np.ndarray) -> None:
    if array.dtype.itemsize == 8 and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            f"batch[{name!r}] is {array.dtype}, which JAX would narrow to 32 bits"
            " without a word; convert it on the host, or keep it there under one of"
            f" the names {HOST_KEYS}."
        )


def device_fields(batch: typing.Batch) -> typing.Batch:
    """Leaves out of a batch what only the host reads, by ``HOST_KEYS``.

    Args:
      batch: arrays by name.

    Returns:
      The fields that go to devices.

    Example:
      >>> sorted(device_fields({"tokens": 0, "sample_id": 1, "difficulty_length": 2}))
      ['tokens']
    """
    return {
        name: value
        for name, value in batch.items()
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in HOST_KEYS)
    }


def shard_batch(
    batch: typing.Batch,
    mesh: jax.sharding.Mesh | None = None,
    *,
    axis_name: str = "data",
) -> typing.Batch:
    """Cuts a host's rows over its devices and joins the hosts' parts to global arrays.

    With P processes host h gives rows ``[h * B / P, (h + 1) * B / P)`` of the global
    batch, and each device holds a contiguous part of them. Fields that only the host
    reads are left out: ``sample_id``, ``step``, ``length``, ``corpus`` and
    ``difficulty_*``.

    Args:
      batch: this host's rows, NumPy arrays ``[B / P, ...]`` of at most 32 bits.
      mesh: the mesh; None means the one entered with ``jax.set_mesh``.
      axis_name: the mesh axis over which rows are cut.

    Returns:
      Global arrays ``[B, ...]``, sharded ``P(axis_name)``.

    Raises:
      ValueError: if rows do not divide by devices, or an array has 64 bits.

    Example:
      >>> batch = {"tokens": np.zeros((2, 5), np.int32), "sample_id": np.arange(2)}
      >>> {k: v.shape for k, v in shard_batch(batch, data_mesh(1)).items()}
      {'tokens': (2, 5)}
    """
    mesh = mesh or jax.sharding.get_mesh()
    if mesh.empty:
        raise ValueError("shard_batch needs a mesh: pass one, or enter jax.set_mesh.")
    sharding = jax.NamedSharding(mesh, jax.P(axis_name))

    def put(name, value):
        local = np.asarray(value)
        _check_width(name, local)
        rows = local.shape[0] * jax.process_count()
        check_batch_size(rows, num_devices=mesh.shape[axis_name])
        return jax.make_array_from_process_local_data(
            sharding, local, (rows, *local.shape[1:])
        )

    return {name: put(name, value) for name, value in device_fields(batch).items()}


def to_host(tree: typing.PyTree) -> typing.PyTree:
    """Fetches arrays to NumPy, whole ones even where processes hold a part each.

    Waits for the device. In a run of several processes all must call it together.

    Args:
      tree: arrays of any shape and sharding.

    Returns:
      The tree as NumPy arrays.

    Example:
      >>> to_host({"loss": jnp.ones(2)})
      {'loss': array([1., 1.], dtype=float32)}
    """

    def whole(x):
        if getattr(x, "is_fully_addressable", True):
            return x  # a gather would join the processes' copies end to end
        return multihost_utils.process_allgather(x, tiled=True)

    return jax.device_get(jax.tree.map(whole, tree))
