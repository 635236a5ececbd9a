"""Durations as counts or as fractions of a run."""

import numbers


def resolve_duration(value: int | float, total: int) -> int:
    """Turns a duration into a count of steps or tokens.

    An integer is a count. A float in [0, 1] is a fraction of the run; a float above 1
    could be meant either way and is refused, and so is a fraction that rounds to
    nothing.

    Args:
      value: a count, or a fraction of the run.
      total: length of the run, in the unit that is wanted.

    Returns:
      The count, a Python integer.

    Raises:
      ValueError: if the value is ambiguous or out of range.

    Example:
      >>> resolve_duration(0.15, 1_000), resolve_duration(150, 1_000)
      (150, 150)
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(
            f"a duration of {value!r} is no number; give a count like 100, or a"
            " fraction of the run like 0.1."
        )
    if isinstance(value, numbers.Integral):
        if value < 0:
            raise ValueError(f"a duration of {value} must be at least 0.")
        return int(value)
    if not 0 <= value <= 1:
        raise ValueError(
            f"a duration of {value!r} is ambiguous: write a count as an integer, or a"
            " fraction of the run as a float in (0, 1]."
        )
    count = round(float(value) * total)
    if count == 0 and value > 0:
        raise ValueError(
            f"a duration of {value!r} of a run of {total} rounds to nothing; write 0,"
            f" or at least {1 / total:.3g}."
        )
    return count
