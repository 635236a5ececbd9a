"""Curriculum learning: analyze once, then sample by difficulty."""

from dataeff_jax.curriculum._eligibility import Criterion, percentile_count

__all__ = ["Criterion", "percentile_count"]
