"""Optax transformations: communication, clipping and optimizers as chain links."""
