"""Stopping at a loss that is no number, without waiting for every step."""

import math
from collections.abc import Callable, Mapping, Sequence


def check_finite(
    values: Mapping[int, Mapping[str, float]],
    *,
    sample_ids: Callable[[int], Sequence[int | str]] | None = None,
) -> None:
    """Raises at the first step with a value that is not finite.

    Call it on the metrics of all steps since the last call, before a line is logged and
    before a checkpoint is saved: then no bad state is ever stored, and the host waits
    for the device only there.

    Args:
      values: step -> name -> value, as :func:`read_pending` gives them.
      sample_ids: ``step -> ids`` of the step's rows; only called for a bad step.

    Raises:
      FloatingPointError: naming the step, the value and the samples.

    Example:
      >>> check_finite({3: {"loss": 1.0}, 4: {"loss": float("nan")}})
      Traceback (most recent call last):
      ...
      FloatingPointError: loss is nan at step 4; nothing of this step was saved.
    """
    for step in sorted(values):
        bad = {k: v for k, v in values[step].items() if not math.isfinite(v)}
        if not bad:
            continue
        told = ", ".join(f"{name} is {value}" for name, value in bad.items())
        message = f"{told} at step {step}; nothing of this step was saved."
        if sample_ids is not None:
            ids = [i if isinstance(i, str) else int(i) for i in sample_ids(step)]
            message += f" Its samples are {ids}."
        raise FloatingPointError(message)
