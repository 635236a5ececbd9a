"""Small problems and meshes that tests share, and the questions to any optimizer."""

from dataeff_jax.testing._given_gradients import feed_gradients
from dataeff_jax.testing._optimizer_suite import (
    check_accumulates,
    check_keeps_dtype,
    check_resumes,
    check_takes_any_rate,
    check_trains,
    train,
)
from dataeff_jax.testing._problems import mlp_batch, mlp_loss, mlp_params

__all__ = [
    "check_accumulates",
    "check_keeps_dtype",
    "check_resumes",
    "check_takes_any_rate",
    "check_trains",
    "feed_gradients",
    "mlp_batch",
    "mlp_loss",
    "mlp_params",
    "train",
]
