"""Schedules: pure functions of a clock that counts steps or tokens."""

from dataeff_jax.schedules._buckets import bucketed_schedule, length_buckets
from dataeff_jax.schedules._durations import resolve_duration
from dataeff_jax.schedules._learning_rate import (
    warmup_constant_schedule,
    warmup_cosine_schedule,
    warmup_inverse_sqrt_schedule,
    warmup_linear_schedule,
)
from dataeff_jax.schedules._pacing import (
    Pacing,
    fixed_discrete_schedule,
    fixed_linear_schedule,
    fixed_root_schedule,
)
from dataeff_jax.schedules._shapes import (
    cosine_schedule,
    cyclic_schedule,
    exponential_schedule,
    function_schedule,
    logarithmic_schedule,
    power_of_two_schedule,
    sine_schedule,
    stepwise_schedule,
)

__all__ = [
    "Pacing",
    "bucketed_schedule",
    "cosine_schedule",
    "cyclic_schedule",
    "exponential_schedule",
    "fixed_discrete_schedule",
    "fixed_linear_schedule",
    "fixed_root_schedule",
    "function_schedule",
    "length_buckets",
    "logarithmic_schedule",
    "power_of_two_schedule",
    "resolve_duration",
    "sine_schedule",
    "stepwise_schedule",
    "warmup_constant_schedule",
    "warmup_cosine_schedule",
    "warmup_inverse_sqrt_schedule",
    "warmup_linear_schedule",
]
