"""Scores of corpora or samples as weights to draw them by."""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

_Scores = TypeVar("_Scores", bound=Any)


def sampling_weights(scores: _Scores, *, temperature: float = 1.0) -> _Scores:
    """Turns scores into weights: the larger the score, the more draws.

    ``exp(score / temperature)`` over its sum, computed from the largest score
    downwards, so no score is too large and no temperature too small. A high
    temperature draws all alike; temperature 0 draws the largest alone, or those that
    share it.

    Args:
      scores: finite numbers, an array or by name; the negative of a loss to prefer what
        is learned, the loss itself to prefer what is not.
      temperature: in units of the scores, finite, not negative.

    Returns:
      Weights of sum 1, float64 [n] or by name: for example for ``Mixture``.

    Raises:
      ValueError: no scores, or scores or a temperature that are no finite numbers.

    Example:
      >>> from dataeff_jax import curriculum
      >>> curriculum.sampling_weights({"easy": -2.0, "hard": -3.0}, temperature=0)
      {'easy': 1.0, 'hard': 0.0}
      >>> curriculum.sampling_weights([0.0, 1e4, -5.0, 1e308], temperature=1e-3)
      array([0., 0., 0., 1.])
    """
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(
            f"temperature={temperature} must be a finite number, not negative; 0 takes "
            f"the largest score alone."
        )
    named = isinstance(scores, Mapping)
    names = list(scores) if named else range(np.size(scores))
    values = np.asarray(list(scores.values()) if named else scores, np.float64).ravel()
    if not len(values):
        raise ValueError("There are no scores; give at least one.")
    wrong = np.flatnonzero(~np.isfinite(values))
    if len(wrong):
        raise ValueError(
            f"{len(wrong)} of {len(values)} scores are no finite numbers, the first: "
            f"{values[wrong[0]]} of {names[wrong[0]]!r}. Give what has no score yet a "
            f"score, or leave it out."
        )
    weights = _exponentials(values, temperature)
    if named:
        return dict(zip(names, weights.tolist(), strict=True))  # pyrefly: ignore
    return weights.reshape(np.shape(scores))  # pyrefly: ignore


def _exponentials(values: np.ndarray, temperature: float) -> np.ndarray:
    """Return exp(values / temperature) over the sum; the largest is never lost."""
    # What is infinitely far below the largest weighs nothing; 0 / 0 is the largest.
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        below = (values - values.max()) / temperature
    weights = np.exp(np.where(values == values.max(), 0, below))
    return weights / weights.sum()
