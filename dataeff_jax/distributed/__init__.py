"""Meshes, shardings, per-device gradients and processes."""
