"""Schedules: pure functions of a clock that counts steps or tokens."""

from dataeff_jax.schedules._durations import resolve_duration
from dataeff_jax.schedules._learning_rate import (
    warmup_constant_schedule,
    warmup_cosine_schedule,
    warmup_inverse_sqrt_schedule,
    warmup_linear_schedule,
)

__all__ = [
    "resolve_duration",
    "warmup_constant_schedule",
    "warmup_cosine_schedule",
    "warmup_inverse_sqrt_schedule",
    "warmup_linear_schedule",
]
