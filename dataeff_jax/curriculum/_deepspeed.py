"""DeepSpeed's configuration of a curriculum, read into objects of this library.

Every key of its ``data_efficiency`` block is translated, or named in the error with the
reason, all in one message. The order of a run is not that of the original, whose random
numbers are not reproduced; difficulties and pools of every step are.

References:
  https://www.deepspeed.ai/docs/config-json/#data-efficiency
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from dataeff_jax import schedules
from dataeff_jax.curriculum import _eligibility

_REQUIRED = object()
_TYPES: dict[str, Any] = {"value": "value", "percentile": "deepspeed_percentile"}
_CLUSTERINGS = ("schedule_based", "single_cluster")
_SCHEDULES = ("fixed_linear", "fixed_root", "fixed_discrete", "custom")


@dataclasses.dataclass(frozen=True)
class DeepSpeedCurriculum:
    """What a ``data_efficiency`` block says, in the terms of this library.

    Made by :func:`read_deepspeed_config`. The original counts steps from 1, which is
    the default ``step_offset`` of ``SampleOrder`` and ``LengthCurriculum``.

    Attributes:
      criteria: of the ``schedule_based`` metrics; for ``SampleOrder``.
      schedules: of the ``single_cluster`` metrics, which choose no samples: lengths,
        for ``LengthCurriculum``.
      index_paths: (index_to_sample_path, index_to_metric_path) by metric; for
        :func:`import_deepspeed_index`.
      seed: for ``SampleOrder``.
      plan_directory: ``data_cluster_path``; for ``SampleOrder``, None if not given.
      num_epochs: a run ends after this many times the data set's samples.
      num_workers: of the loader; for ``data.prefetch``.

    Example:
      >>> from dataeff_jax import curriculum
      >>> curriculum.DeepSpeedCurriculum({}, {}, {}, seed=7).num_epochs
      1000
    """

    criteria: dict[str, _eligibility.Criterion]
    schedules: dict[str, schedules.Pacing]
    index_paths: dict[str, tuple[str, str]]
    seed: int = 1234
    plan_directory: str | None = None
    num_epochs: int = 1000
    num_workers: int = 0


class _Block:
    """A JSON object that is taken apart key by key; what is left has no meaning."""

    def __init__(self, value: Any, path: str, problems: list[str]):
        self.path, self._problems = path, problems
        if not isinstance(value, Mapping):
            problems.append(f"{path}={value!r} must be an object")
            value = {}
        self._left = dict(value)

    def take(self, key: str, default: Any = _REQUIRED, *, kind: Any = object) -> Any:
        """Return the value of a key and cross it off."""
        if key not in self._left:
            if default is _REQUIRED:
                self.refuse(key, "is missing")
                return None
            return default
        value = self._left.pop(key)
        if (kind is int and isinstance(value, bool)) or not isinstance(value, kind):
            name = getattr(kind, "__name__", str(kind))
            self.refuse(key, f"={value!r} must be of type {name}")
            return None if default is _REQUIRED else default
        return value

    def choice(self, key: str, choices: Any) -> Any:
        """Return the value of a required key if it is one of ``choices``."""
        if key in self._left and self._left[key] not in choices:
            value = self._left.pop(key)
            self.refuse(key, f"={value!r} must be one of {', '.join(choices)}")
            return None
        return self.take(key)

    def block(self, key: str) -> "_Block":
        return _Block(self.take(key, {}), f"{self.path}.{key}", self._problems)

    def is_on(self) -> bool:
        """Return whether ``enabled`` is true, false being the default."""
        return bool(self.take("enabled", False, kind=bool))

    def refuse_if_on(self, key: str, why: str) -> None:
        """Name a feature that has no counterpart, unless it is switched off."""
        block = self.block(key)
        if block.is_on():
            self.refuse(key, why)

    def refuse(self, key: str, why: str) -> None:
        space = "" if why.startswith("=") else " "
        self._problems.append(f"{self.path}.{key}{space}{why}")

    def finish(self) -> None:
        """Name the keys that are left."""
        for key in self._left:
            self.refuse(key, "is no key that is known here")


def read_deepspeed_config(
    config: Mapping[str, Any] | str | os.PathLike,
    *,
    custom_schedules: Mapping[str, Callable[[Any], Any]] | None = None,
) -> DeepSpeedCurriculum:
    """Reads the ``data_efficiency`` block of a DeepSpeed configuration.

    Schedules are those of DeepSpeed 0.19.8, bit for bit, percentiles are in its units
    of 1/max_difficulty, and a discrete schedule that has reached ``max_difficulty``
    stays there.

    Args:
      config: the whole configuration, or the path of its JSON file. Only
        ``data_efficiency`` is read.
      custom_schedules: ``step -> difficulty`` for metrics whose ``schedule_type`` is
        ``custom``, by metric.

    Returns:
      The curriculum.

    Raises:
      ValueError: every key that is missing, wrong, not known, or that asks for what is
        not here: ``random_ltd``, ``pin_memory``, and ``dynamic_batching``, which is
        read by :func:`read_deepspeed_token_budget`.

    Example:
      >>> from dataeff_jax import curriculum
      >>> metric = {
      ...     "index_to_sample_path": "map/seqlen_index_to_sample",
      ...     "index_to_metric_path": "map/seqlen_index_to_metric",
      ...     "difficulty_type": "value", "clustering_type": "schedule_based",
      ...     "min_difficulty": 8, "max_difficulty": 64,
      ...     "schedule_type": "fixed_linear",
      ...     "schedule_config": {"total_curriculum_step": 9, "difficulty_step": 8}}
      >>> learning = {"enabled": True, "curriculum_metrics": {"seqlen": metric}}
      >>> sampling = {"enabled": True, "curriculum_learning": learning}
      >>> found = curriculum.read_deepspeed_config(
      ...     {"data_efficiency": {"enabled": True, "data_sampling": sampling}})
      >>> [found.criteria["seqlen"].schedule(t) for t in (1, 5, 9)]
      [8, 32, 64]
    """
    problems: list[str] = []
    root = _opened(config, "data_efficiency", problems)
    sampling = root.block("data_sampling")
    learning = sampling.block("curriculum_learning")
    for block in (root, sampling, learning):
        if not block.is_on():
            block.refuse("enabled", "must be true: there is no curriculum else")
    root.refuse_if_on("data_routing", "is no curriculum and not read; leave it out")
    result = _curriculum(root, sampling, learning, custom_schedules or {}, problems)
    for block in (root, sampling, learning):
        block.finish()
    _raise(problems)
    return result


def _opened(
    config: Mapping[str, Any] | str | os.PathLike, key: str, problems: list[str]
) -> _Block:
    """Return a block of a configuration, or of the JSON file with this path."""
    if not isinstance(config, Mapping):
        config = _loaded(pathlib.Path(config))
    if key not in config:
        raise ValueError(
            f"The configuration has no {key}; it has: "
            f"{', '.join(map(str, config)) or 'nothing'}."
        )
    return _Block(config[key], key, problems)


def _raise(problems: list[str]) -> None:
    """Tell all problems in one message, if there are any."""
    if problems:
        count = "" if len(problems) == 1 else f"{len(problems)} problems: "
        raise ValueError(f"{count}{'; '.join(problems)}.")


def _loaded(path: pathlib.Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no JSON file that can be read: {error}") from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object.")
    return content


def _curriculum(
    root: _Block,
    sampling: _Block,
    learning: _Block,
    custom: Mapping[str, Any],
    problems: list[str],
) -> DeepSpeedCurriculum:
    if sampling.take("pin_memory", False, kind=bool):
        sampling.refuse("pin_memory", "has no counterpart; remove it")
    sampling.refuse_if_on(
        "dynamic_batching",
        "is not combined with a curriculum; switch one of them off, or read it alone "
        "with read_deepspeed_token_budget",
    )
    metrics = learning.block("curriculum_metrics")
    names = list(metrics._left)
    if not names:
        learning.refuse("curriculum_metrics", "must name at least one metric")
    found = {name: _metric(metrics.block(name), name, custom) for name in names}
    problems += [
        f"custom_schedules[{name!r}] is of no metric with schedule_type custom"
        for name in custom
        if name not in found or not found[name].is_custom
    ]
    return DeepSpeedCurriculum(
        criteria={n: m.criterion for n, m in found.items() if m.criterion},
        schedules={
            n: m.schedule
            for n, m in found.items()
            if m.schedule is not None and not m.criterion
        },
        index_paths={n: m.paths for n, m in found.items() if m.paths},
        seed=root.take("seed", 1234, kind=int),
        plan_directory=learning.take("data_cluster_path", None, kind=str),
        num_epochs=sampling.take("num_epochs", 1000, kind=int),
        num_workers=sampling.take("num_workers", 0, kind=int),
    )


@dataclasses.dataclass
class _Metric:
    """What one metric's block says."""

    schedule: schedules.Pacing | None
    criterion: _eligibility.Criterion | None = None
    paths: tuple[str, str] | None = None
    is_custom: bool = False


def _metric(block: _Block, name: str, custom: Mapping[str, Any]) -> _Metric:
    clustering = block.choice("clustering_type", _CLUSTERINGS)
    kind = block.choice("schedule_type", _SCHEDULES)
    result = _Metric(_schedule(block, kind, name, custom), is_custom=kind == "custom")
    chooses = clustering == "schedule_based"
    if chooses or "difficulty_type" in block._left:
        difficulty_type = block.choice("difficulty_type", _TYPES)
        if chooses and result.schedule and difficulty_type:
            result.criterion = _eligibility.Criterion(
                result.schedule, _TYPES[difficulty_type]
            )
    keys = ("index_to_sample_path", "index_to_metric_path")
    default = _REQUIRED if chooses else None
    sample_path, metric_path = (block.take(key, default, kind=str) for key in keys)
    if sample_path and metric_path:
        result.paths = (sample_path, metric_path)
    block.finish()
    return result


def _schedule(
    block: _Block, kind: str | None, name: str, custom: Mapping[str, Any]
) -> schedules.Pacing | None:
    """Return the schedule, or None after naming what is wrong with it."""
    low, high = block.take("min_difficulty"), block.take("max_difficulty")
    details = block.block("schedule_config")
    if kind == "custom" and name not in custom:
        block.refuse("schedule_type", f"=custom needs custom_schedules[{name!r}]")
    if kind is None or low is None or high is None or kind == "custom":
        if kind == "custom" and name in custom and None not in (low, high):
            return _built(block, lambda: _custom(custom[name], low, high), details)
        return None
    if kind == "fixed_discrete":
        levels, ends = details.take("difficulty"), details.take("max_step")
        if levels is None or ends is None:
            return None
        return _built(block, lambda: _discrete(levels, ends, low, high), details)
    total, step = details.take("total_curriculum_step"), details.take("difficulty_step")
    degree = details.take("root_degree") if kind == "fixed_root" else 1
    if None in (total, step, degree):
        return None
    return _built(
        block,
        lambda: schedules.fixed_root_schedule(
            low,
            max_difficulty=high,
            total=total,
            difficulty_step=step,
            root_degree=degree,
            mode="deepspeed",
        ),
        details,
    )


def _built(
    block: _Block, make: Callable[[], schedules.Pacing], details: _Block
) -> schedules.Pacing | None:
    details.finish()
    try:
        return make()
    except (ValueError, TypeError) as error:
        block.refuse("schedule_config", f"makes no schedule: {str(error).rstrip('.')}")
        return None


def _custom(function: Callable[[Any], Any], low: Any, high: Any) -> schedules.Pacing:
    return schedules.function_schedule(
        function, min_difficulty=low, max_difficulty=high
    )


def _discrete(levels: Any, ends: Any, low: Any, high: Any) -> schedules.Pacing:
    """Return the steps up to the first that is the maximum: the original stays there.

    It begins at the minimum and stays at it where that is the maximum already.
    """
    if low >= high:
        return schedules.fixed_discrete_schedule([low], boundaries=[])
    top = next((i for i, level in enumerate(levels) if level >= high), None)
    pacing = schedules.fixed_discrete_schedule(levels, boundaries=ends)
    if top is not None:
        kept = levels[: top + 1]
        pacing = schedules.fixed_discrete_schedule(kept, boundaries=ends[:top])
    # Percentiles are in units of the told maximum, which no step need reach.
    return dataclasses.replace(pacing, max_difficulty=high)
