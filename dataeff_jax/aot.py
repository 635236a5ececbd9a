"""Programs compiled for GPUs that are not there: memory, collectives, kernels.

XLA compiles a jitted, sharded program for a *described* topology, on a machine
without a GPU; nothing is executed. It needs the extra `plan`: jax's CUDA plugin
without CUDA's libraries, and `ptxas`. Calls into cuDNN cannot be compiled this way,
so attention must take another implementation.
"""

import contextlib
import importlib.util
import os
import pathlib
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.experimental import topologies

from dataeff_jax import collectives

__all__ = [
    "H200_BYTES",
    "Kernel",
    "Memory",
    "Plan",
    "compile_for",
    "h200_devices",
    "read_kernels",
]

H200_BYTES = 141 * 10**9

# XLA's textual description of a target; figures from NVIDIA's data sheet of the H200
# SXM and the limits of compute capability 9.0.
_H200 = f"""
gpu_device_info {{
  cuda_compute_capability {{ major: 9 }}
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: {H200_BYTES}
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  threads_per_warp: 32
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "NVIDIA H200"
"""

_INSTALL = "install the extra, best in an environment of its own: pip install '.[plan]'"
_KERNEL = re.compile(
    r"Compiling entry function '(\S+)'.*?(\d+) bytes spill stores, (\d+) bytes spill "
    r"loads.*?Used (\d+) registers",
    re.DOTALL,
)


class Memory(NamedTuple):
    """Bytes that one device needs."""

    arguments: int
    outputs: int  # those that do not take the place of a donated argument
    temporaries: int
    total: int


class Kernel(NamedTuple):
    """One Pallas kernel, as ptxas reports it."""

    name: str
    registers: int  # per thread
    spill_bytes: int  # stores and loads


class Plan(NamedTuple):
    """What `compile_for` found out."""

    memory: Memory
    collectives: list[collectives.Collective]
    kernels: list[Kernel]
    text: str  # the optimized HLO


def h200_devices(hosts: int = 1, *, devices_per_host: int = 8) -> list[Any]:
    """Described (not real) H200s, to make a mesh of.

    Args:
        hosts: number of machines.
        devices_per_host: GPUs in each.

    Returns:
        hosts * devices_per_host devices, those of a host side by side.

    Raises:
        ModuleNotFoundError: when the extra `plan` is not installed.
        RuntimeError: when jax has started without its CUDA plugin.
        ValueError: when a number is not positive.

    Example:
        >>> devices = h200_devices(2, devices_per_host=8)  # doctest: +SKIP
        >>> devices[0].device_kind, len(devices)  # doctest: +SKIP
        ('NVIDIA H200', 16)
    """
    if hosts < 1 or devices_per_host < 1:
        raise ValueError(
            f"hosts={hosts} and devices_per_host={devices_per_host} must be at least 1."
        )
    require_extra()
    shape = f"1x{hosts}x{devices_per_host}"
    try:
        topology = topologies.get_topology_desc(
            topology_name=shape, platform="cuda", target_config=_H200, topology=shape
        )
    except (RuntimeError, NotImplementedError) as error:
        raise RuntimeError(
            "jax has started without its CUDA plugin, as it found no CUDA libraries; "
            "set JAX_PLATFORMS=cpu in the environment before jax is first used."
        ) from error
    return topology.devices


def compile_for(jitted: Any, *abstract_args: Any, **abstract_kwargs: Any) -> Plan:
    """Compile a jitted function for the devices that its arguments' shardings name.

    Args:
        jitted: what `jax.jit` returned.
        *abstract_args: `jax.ShapeDtypeStruct` leaves with shardings over described
            devices.
        **abstract_kwargs: the same, by keyword.

    Returns:
        Memory per device, collectives, Pallas kernels and the program's text.

    Raises:
        ModuleNotFoundError: when the extra `plan` is not installed.

    Example:
        >>> mesh = jax.make_mesh((8,), "x", devices=h200_devices())  # doctest: +SKIP
        >>> compile_for(jax.jit(step), state, batch).memory.total  # doctest: +SKIP
    """
    require_extra()
    lowered = jitted.lower(*abstract_args, **abstract_kwargs)
    with _tools_on_path(), _captured_output() as said:
        compiled = lowered.compile()
    return Plan(
        memory=_memory(compiled.memory_analysis()),
        collectives=collectives.collective_report(compiled),
        kernels=read_kernels(said[0]),
        text=compiled.as_text(),
    )


def require_extra() -> None:
    """Raise an error that names the extra, unless it is installed.

    Raises:
        ModuleNotFoundError: with the command that installs it.
    """
    missing = (
        [] if importlib.util.find_spec("jax_cuda13_plugin") else ["jax's CUDA plugin"]
    )
    missing += [] if find_ptxas() else ["ptxas"]
    if missing:
        raise ModuleNotFoundError(
            f"compiling for GPUs needs {' and '.join(missing)}; {_INSTALL}"
        )


def find_ptxas() -> str | None:
    """The path of ptxas, that of the extra before any other; None without one."""
    for root in _nvidia_roots():
        for found in sorted(root.glob("*/bin/ptxas")):
            return str(found)
    return shutil.which("ptxas")


def read_kernels(said: str) -> list[Kernel]:
    """The kernels in the output of ptxas.

    Args:
        said: what the compiler printed.

    Returns:
        One entry for each Pallas kernel, in the order of compilation.

    Example:
        >>> read_kernels(
        ...     "ptxas info: Compiling entry function 'gather' for 'sm_90a' 0 bytes "
        ...     "stack frame, 4 bytes spill stores, 8 bytes spill loads "
        ...     "Used 22 registers"
        ... )
        [Kernel(name='gather', registers=22, spill_bytes=12)]
    """
    return [
        Kernel(name, registers=int(registers), spill_bytes=int(stores) + int(loads))
        for name, stores, loads, registers in _KERNEL.findall(said)
    ]


def _memory(stats: Any) -> Memory:
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    parts = stats.argument_size_in_bytes, outputs, stats.temp_size_in_bytes
    return Memory(*parts, total=sum(parts))


def _nvidia_roots() -> list[pathlib.Path]:
    """The directories that NVIDIA's wheels share."""
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec else None
    return [pathlib.Path(place) for place in places or ()]


@contextlib.contextmanager
def _tools_on_path() -> Iterator[None]:
    """XLA looks for ptxas on PATH; Mosaic reports if the variable is set."""
    before = {name: os.environ.get(name) for name in ("PATH", "MOSAIC_GPU_DUMP_PTXAS")}
    directory = os.path.dirname(find_ptxas() or "")
    os.environ["PATH"] = os.pathsep.join([directory, before["PATH"] or os.defpath])
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _captured_output() -> Iterator[list[str]]:
    """What C++ code prints to stdout and stderr: a list that holds one text on exit."""
    said: list[str] = []
    streams = (1, 2)
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        saved = [os.dup(stream) for stream in streams]
        for stream in streams:
            os.dup2(file.fileno(), stream)
        try:
            yield said
        finally:
            sys.stdout.flush()
            for stream, copy in zip(streams, saved, strict=True):
                os.dup2(copy, stream)
                os.close(copy)
            file.seek(0)
            said.append(file.read().decode(errors="replace"))
