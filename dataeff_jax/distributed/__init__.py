"""Meshes, shardings, per-device gradients and processes."""

from dataeff_jax.distributed._processes import guard, initialize
from dataeff_jax.distributed._watch import Watch

__all__ = ["Watch", "guard", "initialize"]
