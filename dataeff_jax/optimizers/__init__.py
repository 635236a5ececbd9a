"""Optax transformations: communication, clipping and optimizers as chain links."""

from dataeff_jax.optimizers._clipping import (
    ClipByGlobalNormState,
    clip_by_global_norm,
    clip_by_shared_norm,
    global_norm,
)
from dataeff_jax.optimizers._communication import pmean_grads, set_to_zero
from dataeff_jax.optimizers._compressed_mean import skip_nonfinite
from dataeff_jax.optimizers._deepspeed import (
    DeepSpeedOptimizer,
    read_deepspeed_optimizer,
)
from dataeff_jax.optimizers._freeze_rule import FreezeRule, variance_norm
from dataeff_jax.optimizers._lamb import lamb, scale_by_layer_trust_ratio
from dataeff_jax.optimizers._learning_rate import (
    WithLearningRateState,
    with_learning_rate,
)
from dataeff_jax.optimizers._onebit_adam import (
    OneBitAdamState,
    freeze_stage,
    onebit_adam,
    scale_by_onebit_adam,
)
from dataeff_jax.optimizers._onebit_lamb import OneBitLambState, onebit_lamb
from dataeff_jax.optimizers._resume import (
    compact_errors,
    expand_errors,
    resize_state,
    state_shapes,
    synchronise,
)
from dataeff_jax.optimizers._zero_one_adam import (
    ZeroOneAdamState,
    local_params,
    zero_one_adam,
)
from dataeff_jax.optimizers._zero_one_schedule import ZeroOneSchedule

__all__ = [
    "ClipByGlobalNormState",
    "DeepSpeedOptimizer",
    "FreezeRule",
    "OneBitAdamState",
    "OneBitLambState",
    "WithLearningRateState",
    "ZeroOneAdamState",
    "ZeroOneSchedule",
    "clip_by_global_norm",
    "clip_by_shared_norm",
    "compact_errors",
    "expand_errors",
    "freeze_stage",
    "global_norm",
    "lamb",
    "local_params",
    "onebit_adam",
    "onebit_lamb",
    "pmean_grads",
    "read_deepspeed_optimizer",
    "resize_state",
    "scale_by_layer_trust_ratio",
    "scale_by_onebit_adam",
    "set_to_zero",
    "skip_nonfinite",
    "state_shapes",
    "synchronise",
    "variance_norm",
    "with_learning_rate",
    "zero_one_adam",
]
