"""Eight CPU devices, no silent rank promotion, and compilations shared between runs."""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")

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
