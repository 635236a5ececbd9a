"""Eight CPU devices, no silent rank promotion, and quick compilations that are kept.

Tests compile many small programs and run each once or twice: machine code that is not
optimised is ready several times sooner. Programs are the same until that last step, and
float32 stays float32. ``XLA_FLAGS= python -m pytest`` tests optimised code instead.
"""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false",
)

import jax
import pytest

_CACHE = pathlib.Path(__file__).resolve().parents[1] / ".cache" / "xla"

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture
def key():
    return jax.random.key(0)
