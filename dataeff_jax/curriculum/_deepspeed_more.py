"""Two more blocks of DeepSpeed's configuration: length warmup and batches by tokens.

As in ``read_deepspeed_config``, every key is translated, or named in the error.

References:
  https://www.deepspeed.ai/tutorials/curriculum-learning/ (the older block)
  https://www.deepspeed.ai/docs/config-json/#data-efficiency (dynamic_batching)
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

from dataeff_jax import schedules
from dataeff_jax.curriculum import _deepspeed

_ORDERS = {"dataloader": "dataloader", "random": "random", "seqlen": "length"}


def read_deepspeed_length_schedule(
    config: Mapping[str, Any] | str | os.PathLike,
    *,
    custom_schedule: Callable[[Any], Any] | None = None,
) -> schedules.Pacing:
    """Reads the older ``curriculum_learning`` block: the warmup of sequence lengths.

    The schedules are those of DeepSpeed 0.19.8, bit for bit. It counts steps from 1,
    which is the default ``step_offset`` of ``LengthCurriculum``.

    Args:
      config: the whole configuration, or the path of its JSON file. Only
        ``curriculum_learning`` is read.
      custom_schedule: ``step -> length`` where ``schedule_type`` is ``custom``.

    Returns:
      ``step -> length``, for ``LengthCurriculum``.

    Raises:
      ValueError: every key that is missing, wrong, or not known.

    Example:
      >>> from dataeff_jax import curriculum
      >>> config = {"curriculum_learning": {
      ...     "enabled": True, "curriculum_type": "seqlen",
      ...     "min_difficulty": 64, "max_difficulty": 1024,
      ...     "schedule_type": "fixed_linear",
      ...     "schedule_config": {
      ...         "total_curriculum_step": 15000, "difficulty_step": 8}}}
      >>> pacing = curriculum.read_deepspeed_length_schedule(config)
      >>> lengths = curriculum.LengthCurriculum(pacing, buckets=(64, 512, 1024))
      >>> [lengths.length_at(step) for step in (0, 7499, 14999)]
      [64, 512, 1024]
    """
    problems: list[str] = []
    block = _deepspeed._opened(config, "curriculum_learning", problems)
    if not block.is_on():
        block.refuse("enabled", "must be true: there is no curriculum else")
    block.choice("curriculum_type", ("seqlen",))
    kind = block.choice("schedule_type", _deepspeed._SCHEDULES)
    if kind == "custom" and custom_schedule is None:
        block.refuse("schedule_type", "=custom needs custom_schedule")
    if kind not in (None, "custom") and custom_schedule is not None:
        problems.append(f"custom_schedule is not used with schedule_type={kind}")
    custom = {"lengths": custom_schedule or (lambda step: step)}
    pacing = _deepspeed._schedule(block, kind, "lengths", custom)
    block.finish()
    _deepspeed._raise(problems)
    if pacing is None:
        raise ValueError("curriculum_learning makes no schedule.")
    return pacing


@dataclasses.dataclass(frozen=True)
class DeepSpeedTokenBudget:
    """What a ``dynamic_batching`` block says, in the terms of this library.

    Made by :func:`read_deepspeed_token_budget`.

    Attributes:
      settings: for ``TokenBudget(row_lengths, buckets=..., **settings)``.
      learning_rate_scaling: the ``method`` of ``TokenBudget.learning_rate_scale``.
      metrics_path: where the original keeps the lengths of the samples, if told.

    Example:
      >>> from dataeff_jax import curriculum
      >>> curriculum.DeepSpeedTokenBudget({"max_tokens": 512}).learning_rate_scaling
      'linear'
    """

    settings: dict[str, Any]
    learning_rate_scaling: str = "linear"
    metrics_path: str | None = None


def read_deepspeed_token_budget(
    config: Mapping[str, Any] | str | os.PathLike,
) -> DeepSpeedTokenBudget:
    """Reads the ``dynamic_batching`` block of a DeepSpeed configuration.

    ``max_tokens`` bounds what is computed, rows times padded length; the original adds
    up the lengths before padding. Samples that are too long for it are left out there,
    which ``too_long="drop"`` keeps, and the last samples of an epoch are lost there,
    which is not kept. ``verbose`` has no counterpart and is not used.

    Args:
      config: the whole configuration, or the path of its JSON file. Only
        ``data_efficiency.data_sampling.dynamic_batching`` and the seed are read.

    Returns:
      The settings.

    Raises:
      ValueError: every key of the block that is missing, wrong, or not known.

    Example:
      >>> from dataeff_jax import curriculum
      >>> batching = {"enabled": True, "max_tokens": 64,
      ...             "sequence_picking_order": "seqlen", "lr_scaling_method": "sqrt"}
      >>> found = curriculum.read_deepspeed_token_budget({"data_efficiency": {
      ...     "data_sampling": {"dynamic_batching": batching}}})
      >>> budget = curriculum.TokenBudget(
      ...     [9, 3, 16, 5], buckets=(8, 16), **found.settings)
      >>> budget[0].tolist(), found.learning_rate_scaling
      ([1, 3, 0, 2], 'sqrt')
    """
    problems: list[str] = []
    root = _deepspeed._opened(config, "data_efficiency", problems)
    block = root.block("data_sampling").block("dynamic_batching")
    if not block.is_on():
        block.refuse("enabled", "must be true: there are no batches by tokens else")
    method, order = "linear", "dataloader"
    if "lr_scaling_method" in block._left:
        method = block.choice("lr_scaling_method", ("linear", "sqrt", "none"))
    if "sequence_picking_order" in block._left:
        order = block.choice("sequence_picking_order", _ORDERS)
    block.take("verbose", False, kind=bool)
    settings = {
        "max_tokens": block.take("max_tokens", kind=int),
        "order": _ORDERS.get(order),
        "seed": root.take("seed", 1234, kind=int),
        "min_rows": block.take("min_batch_size", 1, kind=int),
        "max_rows": block.take("max_batch_size", None, kind=int),
        "too_long": "drop",
    }
    path = block.take("metrics_path", None, kind=str)
    block.finish()
    _deepspeed._raise(problems)
    return DeepSpeedTokenBudget(settings, method, path)
