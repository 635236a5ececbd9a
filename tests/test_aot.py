"""Programs compile for described H200s where the extra is installed."""

import importlib.util
import os
import subprocess
import sys

import pytest

from dataeff_jax import aot

HAS_EXTRA = importlib.util.find_spec("jax_cuda13_plugin") and aot.find_ptxas()

SCRIPT = """
import jax, jax.numpy as jnp
from dataeff_jax import aot
jax.config.update("jax_platforms", "cpu")
mesh = jax.make_mesh((16,), ("data",), devices=aot.h200_devices(2))
add = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, out_specs=jax.P())
sharding = jax.NamedSharding(mesh, jax.P("data"))
x = jax.ShapeDtypeStruct((16, 100), jnp.float32, sharding=sharding)
found = aot.compile_for(jax.jit(add), x)
[reduce] = found.collectives
print(reduce.op, reduce.group_size, reduce.wire_bytes, found.memory.arguments)
"""


@pytest.mark.skipif(not HAS_EXTRA, reason="needs the extra: .[plan]")
def test_a_sum_over_sixteen_described_gpus():
    # A process of its own: jax's platforms are fixed once they have started.
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert result.stdout.split() == ["all-reduce", "16", "750", "400"]


def test_without_the_extra_the_error_names_it(monkeypatch):
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(aot.shutil, "which", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"\.\[plan\]"):
        aot.h200_devices(1)


@pytest.mark.parametrize("sizes", [(0, 8), (1, 0)])
def test_numbers_of_devices_are_positive(sizes):
    with pytest.raises(ValueError, match="at least 1"):
        aot.h200_devices(sizes[0], devices_per_host=sizes[1])
