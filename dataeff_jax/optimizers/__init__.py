"""Optax transformations: communication, clipping and optimizers as chain links."""

from dataeff_jax.optimizers._clipping import (
    ClipByGlobalNormState,
    clip_by_global_norm,
    global_norm,
)
from dataeff_jax.optimizers._communication import pmean_grads
from dataeff_jax.optimizers._lamb import lamb, scale_by_layer_trust_ratio
from dataeff_jax.optimizers._learning_rate import (
    WithLearningRateState,
    with_learning_rate,
)

__all__ = [
    "ClipByGlobalNormState",
    "WithLearningRateState",
    "clip_by_global_norm",
    "global_norm",
    "lamb",
    "pmean_grads",
    "scale_by_layer_trust_ratio",
    "with_learning_rate",
]
