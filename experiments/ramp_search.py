"""Bisection for the longest stable ramp, and what makes a trial of one stable.

A fluctuation is the largest validation perplexity over the smallest one before it. The
papers ask for no significant one and give no number.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments import sweep

# Our choice, by no measurement; the flag of the command sets another.
MAX_FLUCTUATION = 1.3


class Verdict(NamedTuple):
    """What a trial shows."""

    fluctuation: float  # largest perplexity over the smallest before; inf: diverged
    at_start: float  # the same of the first warm-up
    loss_ratio: float  # largest training loss over the smallest before
    is_stable: bool
    starts_well: bool


class Found(NamedTuple):
    """What a search found."""

    total: int | None  # the longest stable ramp; None: there is none
    start: int | None  # the smallest value that it needs; None where there is none
    unstable: int | None  # the shortest ramp that was unstable
    untried: int  # ramps between the two


def search(
    totals: Sequence[int],
    starts: Sequence[int | None],
    attempt: Callable[[int, int | None], Verdict],
    *,
    trials: int,
    after: Callable[[Verdict, int], None] = lambda verdict, left: None,
) -> Found:
    """Searches the longest stable ramp, if shorter ones than a stable one are stable.

    Args:
      totals: lengths of ramps, rising.
      starts: smallest values, rising; a later one is taken where the shortest ramp
        does not start well with the one before.
      attempt: ``(total, start) -> Verdict`` of a trial.
      trials: how many at most.
      after: called as ``after(verdict, left)`` after each trial, with the largest
        number of trials that may follow.

    Raises:
      ValueError: no trial is allowed.
    """
    if trials < 1:
        raise ValueError(f"--trials={trials} must be at least 1")
    low, high = 0, len(totals)  # stable; unstable, or beyond the last
    tried, start, verdict = 0, starts[0], None
    for start in starts[:trials]:
        verdict = attempt(totals[0], start)
        tried += 1
        if verdict.starts_well or tried == min(trials, len(starts)):
            break
        after(verdict, trials - tried)
    if verdict is None or not verdict.is_stable:
        if verdict is not None:
            after(verdict, 0)
        return Found(None, start, totals[0], 0)
    while True:
        left = min(trials - tried, (high - low - 1).bit_length())
        after(verdict, left)
        if not left:
            break
        tried += 1
        middle = (low + high) // 2
        verdict = attempt(totals[middle], start)
        low, high = (middle, high) if verdict.is_stable else (low, middle)
    unstable = totals[high] if high < len(totals) else None
    return Found(totals[low], start, unstable, high - low - 1)


def candidates(lower: int, upper: int, step: int) -> list[int]:
    """From ``lower`` in steps to ``upper``, which is the last."""
    return [*range(lower, upper, step), upper]


def judge(result: Mapping[str, Any], max_fluctuation: float) -> Verdict:
    """What the result of a trial shows."""
    steps = [point[0] for point in result["validation_curve"]]
    ratios = sweep.loss_ratios([perplexity(p) for p in result["validation_curve"]])
    early = [r for r, s in zip(ratios, steps, strict=True) if s <= result["start"]]
    largest, at_start = max(ratios, default=1.0), max(early, default=1.0)
    if result["diverged"]:
        largest = math.inf
        at_start = math.inf if result["steps"] < result["start"] else at_start
    return Verdict(
        fluctuation=largest,
        at_start=at_start,
        loss_ratio=result["max_loss_ratio"],
        is_stable=largest <= max_fluctuation,
        starts_well=at_start <= max_fluctuation,
    )


def perplexity(point: Sequence[float]) -> float:
    """Of a point of a result's validation curve; infinite where it is no number."""
    loss = point[-1]
    return math.exp(min(loss, 700.0)) if math.isfinite(loss) else math.inf


def told(verdict: Verdict) -> str:
    """A verdict in words."""
    if verdict.is_stable:
        return f"stable ({verdict.fluctuation:.3f})"
    if math.isinf(verdict.fluctuation):
        return "unstable (diverged)"
    return f"unstable ({verdict.fluctuation:.3f})"
