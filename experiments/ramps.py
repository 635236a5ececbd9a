"""What a ramp is: the keys of a config that let a training start easily.

A ramp has one length, the ``total`` of one or several schedules, and maybe a smallest
value from which it begins. ``experiments.tune`` searches over both; another ramp of a
config is one more entry of ``RAMPS``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_collections

from dataeff_jax import schedules
from experiments import builders, curricula


class Start(NamedTuple):
    """Where a ramp begins."""

    key: str  # of the config
    values: tuple[int, ...]  # rising: that of the config, and what it may be raised to


class Ramp(NamedTuple):
    """Functions of a config that describe one of its ramps; they raise ValueErrors."""

    blocks: Callable[[Any], dict[str, Any]]  # with kwargs.total, by key
    start: Callable[[Any], Start | None]  # None: it cannot be raised
    clock: Callable[[Any], str]  # of the totals: "steps" or "tokens"


def totals_overrides(
    config: ml_collections.ConfigDict, ramp: Ramp, total: int
) -> dict[str, str]:
    """Values by key that give all schedules of a ramp a length, as ``config`` does.

    A total that is a fraction of the run stays one, so that it holds for longer runs.
    """
    length = curricula.run_length(config, ramp.clock(config))
    return {
        f"{key}.kwargs.total": _text(block.kwargs["total"], total, length)
        for key, block in ramp.blocks(config).items()
    }


def _text(given: int | float, total: int, length: int) -> str:
    if not isinstance(given, float):
        return str(total)
    short = round(total / length, 6)
    if 0 < short and schedules.resolve_duration(short, length) == total:
        return repr(short)
    return repr(total / length)


def warmup(
    config: ml_collections.ConfigDict, clock: str, given_steps: int | None = None
) -> int:
    """The learning rate's warm-up in units of a clock, at full length.

    Args:
      config: the configuration.
      clock: "steps" or "tokens".
      given_steps: what counts as a warm-up, whatever the config says.

    Raises:
      ValueError: if there is no warm-up.
    """
    count, own = given_steps, "steps"
    if given_steps is None:
        count, own = builders.warmup_duration(config, curricula.timeline(config))
    if not count:
        raise ValueError(
            "the learning rate has no warm-up (schedule.kwargs.warmup), and trials and "
            "ramps are counted in warm-ups; say with --warmup=N how many steps count "
            "as one"
        )
    row = config.data.batch_size * config.data.seq_len
    if own == clock:
        return count
    return count * row if clock == "tokens" else -(-count // row)


def _curriculum_blocks(config: ml_collections.ConfigDict) -> dict[str, Any]:
    settings = config.curriculum
    if settings is None:
        raise ValueError(
            "the config has no curriculum, so there is no ramp to tune; take one that "
            "has, such as configs/gpt_curriculum.py or configs/gpt_seqlen_warmup.py"
        )
    blocks = {}
    if settings.length and settings.length.mode != "trim":
        blocks["curriculum.length"] = settings.length
    for name, block in settings.metrics.items():
        blocks[f"curriculum.metrics.{name}"] = block
    found = {key: block for key, block in blocks.items() if "total" in block.kwargs}
    if not found:
        told = ", ".join(f"{key} has {b.schedule}" for key, b in blocks.items())
        raise ValueError(
            f"no schedule of the curriculum has a total that could be tuned ({told}); "
            "use one that has, such as fixed_linear_schedule"
        )
    return found


def _curriculum_start(config: ml_collections.ConfigDict) -> Start | None:
    block = _curriculum_blocks(config).get("curriculum.length")
    if block is None or "min_difficulty" not in block.kwargs:
        return None
    shortest = block.kwargs["min_difficulty"]
    longer = [n for n in curricula.allowed_lengths(config)[:-1] if n > shortest]
    return Start("curriculum.length.kwargs.min_difficulty", (shortest, *longer))


RAMPS = {
    # The length, and the difficulties of all metrics, which share it.
    "curriculum": Ramp(
        _curriculum_blocks, _curriculum_start, lambda config: config.curriculum.clock
    ),
}
