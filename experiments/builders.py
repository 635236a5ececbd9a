"""From a configuration to objects: the only place that translates.

A block ``{name, kwargs}`` is resolved by attribute on a fixed list of namespaces, so a
new optimizer, schedule or model needs no entry here.
"""

from collections.abc import Callable
from typing import Any

import jax
import ml_collections
import optax
from flax import nnx

from dataeff_jax import distributed, models, optimizers, schedules, training
from experiments import checks, curricula, random_ltd

# Arguments that a builder passes itself; a config may not set them as well.
_GIVEN = {
    "model": ("vocab_size", "rngs"),
    "optimizer": ("learning_rate", "mask", "is_stacked"),
    "schedule": ("total",),
}


# By what the rate is multiplied where a batch has so many times the samples.
_BATCH_SCALES: dict[str, Callable[[float], float]] = {
    "none": lambda size: 1.0,
    "linear": lambda size: size,
    "sqrt": lambda size: size**0.5,
}


def check_config(config: ml_collections.ConfigDict, *, problems=()) -> None:
    """Raises a ``ValueError`` that lists every problem of ``config``.

    Args:
      config: what a ``get_config`` returned, overrides applied.
      problems: sentences about problems that were found earlier.
    """
    problems = [*problems, *checks.schema_problems(config)]
    if not problems:
        problems.extend(random_ltd.problems(config))
    if not problems:
        problems.extend(curricula.problems(config))
    if not problems:
        problems.extend(curricula.feed_problems(config))
    if not problems:
        for block in ("model", "optimizer", "schedule"):
            problems.extend(_block_problems(config, block))
        problems.extend(_length_problems(config))
        problems.extend(_objective_problems(config))
    if problems:
        count = "" if len(problems) == 1 else f"{len(problems)} problems: "
        raise ValueError(count + "; ".join(problems))


def mesh(config: ml_collections.ConfigDict) -> jax.sharding.Mesh:
    """The data mesh, after checking that it divides the batch."""
    wanted = config.mesh.axes.data
    result = distributed.data_mesh(None if wanted == -1 else wanted)
    distributed.check_batch_size(
        config.data.batch_size,
        num_devices=result.size,
        accumulation_steps=config.optimizer.accumulation_steps,
    )
    distributed.check_batch_size(config.eval.batch_size, num_devices=result.size)
    return result


def resolved(config: ml_collections.ConfigDict, *, vocab_size: int) -> dict:
    """The config as plain values, with the model's sizes that the data decides."""
    result = config.to_dict()
    kwargs = result["model"]["kwargs"]
    kwargs["vocab_size"] = vocab_size
    kwargs.setdefault("max_length", config.data.seq_len)
    return result


def model(
    config: ml_collections.ConfigDict, *, vocab_size: int
) -> models.GPT | models.BERT:
    """The model, its parameters drawn from ``config.seed``."""
    block = resolved(config, vocab_size=vocab_size)["model"]
    return getattr(models, block["name"])(rngs=nnx.Rngs(config.seed), **block["kwargs"])


def learning_rate(
    config: ml_collections.ConfigDict, timeline: training.Timeline
) -> Callable[..., float]:
    """The learning rate as ``(step, tokens, layer_tokens)``, all before the step.

    Without layer tokens it takes those of the timeline.

    The clock of the decay is ``config.schedule.clock``, that of the warm-up may be
    another one: the decay then begins at the step that ends the warm-up. Batches
    by tokens scale it by their samples over ``data.batch_size``.
    """
    settings = config.schedule
    function = checks.resolve(settings.name, "schedule.name", schedules)
    after = function(**_schedule_arguments(config, timeline))
    own = settings.warmup_clock or settings.clock
    warmup = _warmup(config, timeline)

    num_layers = curricula.num_layers(config)

    def rate(step: int, tokens: int, layer_tokens: int | None = None) -> float:
        if layer_tokens is None:
            layer_tokens = timeline.layer_tokens(step)
        effective = layer_tokens / num_layers
        clocks = {"steps": step, "tokens": tokens, "layer_tokens": effective}
        size = timeline[step].samples / config.data.batch_size
        scale = _BATCH_SCALES[settings.batch_scaling](size)
        if own != settings.clock and clocks[own] < warmup:
            return scale * settings.kwargs.peak_value * clocks[own] / warmup
        return scale * float(after(clocks[settings.clock]))

    return rate


def warmup_duration(
    config: ml_collections.ConfigDict, timeline: training.Timeline
) -> tuple[int, str]:
    """Length of the learning rate's warm-up, 0 for none, and the clock it counts."""
    own = config.schedule.warmup_clock or config.schedule.clock
    return _warmup(config, timeline), own


def optimizer(config: ml_collections.ConfigDict, params, *, axis_name="data"):
    """The optax chain: mean over devices, clipping, then the named optimizer."""
    constructor = _optimizer_constructor(config.optimizer.name)
    kwargs = dict(config.optimizer.kwargs)
    taken = checks.argument_names(constructor)
    if "mask" in taken and "weight_decay" in taken:
        kwargs["mask"] = models.decay_mask(params)
    if "is_stacked" in taken:
        kwargs["is_stacked"] = models.is_stacked
    links = [optimizers.pmean_grads(axis_name)]
    if config.optimizer.max_grad_norm:
        links.append(optimizers.clip_by_global_norm(config.optimizer.max_grad_norm))
    links.append(optimizers.with_learning_rate(constructor, **kwargs))
    return optax.chain(*links)


def _total(config, timeline: training.Timeline, clock: str) -> int:
    """Length of the run in units of a clock."""
    if config.train.num_tokens and clock == config.train.budget_clock:
        return config.train.num_tokens
    return _clock_at(config, timeline, clock, timeline.num_steps)


def _clock_at(config, timeline: training.Timeline, clock: str, step: int) -> int:
    """What a clock shows before a step."""
    if clock == "steps":
        return step
    if clock == "tokens":
        return timeline.tokens(step)
    return timeline.layer_tokens(step) // curricula.num_layers(config)


def _step_at(config, timeline: training.Timeline, clock: str, value: int) -> int:
    """The first step before which a clock shows at least a value."""
    if clock == "steps":
        return value
    if clock == "tokens":
        return timeline.step_at(value)
    return timeline.step_at_layer_tokens(value * curricula.num_layers(config))


def _warmup(config, timeline: training.Timeline) -> int:
    """Length of the warm-up in units of its own clock."""
    own = config.schedule.warmup_clock or config.schedule.clock
    given = config.schedule.kwargs.get("warmup", 0)
    return schedules.resolve_duration(given, _total(config, timeline, own))


def _schedule_arguments(config, timeline: training.Timeline) -> dict:
    """The schedule's arguments, durations in units of its clock."""
    kwargs, clock = dict(config.schedule.kwargs), config.schedule.clock
    if "warmup" in kwargs:
        kwargs["warmup"] = _warmup(config, timeline)
        own = config.schedule.warmup_clock
        if own not in ("", clock):
            end = _step_at(config, timeline, own, kwargs["warmup"])
            kwargs["warmup"] = _clock_at(config, timeline, clock, end)
    function = checks.resolve(config.schedule.name, "schedule.name", schedules)
    if "total" in checks.argument_names(function):
        kwargs["total"] = _total(config, timeline, clock)
    return kwargs


def _block_problems(config, block: str) -> list[str]:
    name, kwargs = config[block].name, config[block].kwargs
    resolve = {
        "model": lambda: _model_class(name),
        "optimizer": lambda: _optimizer_constructor(name),
        "schedule": lambda: checks.resolve(name, "schedule.name", schedules),
    }
    try:
        function = resolve[block]()
        if block == "schedule" and "warmup" in kwargs:
            # A fraction of the run becomes a count.
            kwargs = {**kwargs, "warmup": _warmup(config, curricula.timeline(config))}
        if block == "model":
            kwargs = {"max_length": config.data.seq_len, **kwargs}
    except ValueError as error:
        return [str(error)]
    problems = checks.argument_problems(
        function, kwargs, where=f"{block}.kwargs", given=_GIVEN[block]
    )
    if block == "schedule" and not problems:
        try:
            learning_rate(config, curricula.timeline(config))
        except ValueError as error:
            problems.append(f"schedule.kwargs: {error}")
    return problems


def _length_problems(config) -> list[str]:
    max_length = config.model.kwargs.get("max_length", config.data.seq_len)
    if config.data.seq_len <= max_length:
        return []
    return [
        f"data.seq_len={config.data.seq_len} exceeds the model's {max_length} "
        "positions; shorten it or raise model.kwargs.max_length"
    ]


def _objective_problems(config) -> list[str]:
    """A model that sees what it is asked for would learn to copy."""
    try:
        kind = _model_class(config.model.name)
    except ValueError:
        return []  # reported already
    if kind.causal and config.data.mask_rate:
        return [
            f"data.mask_rate={config.data.mask_rate} hides tokens, but {kind.__name__} "
            "predicts the next one; set it to 0, or train a BERT"
        ]
    if not kind.causal and not config.data.mask_rate:
        return [
            f"{kind.__name__} sees all tokens and predicts hidden ones, but "
            "data.mask_rate is 0; set it to 0.15, or train a GPT"
        ]
    return []


def _model_class(name: str) -> Any:
    found = checks.resolve(name, "model.name", models)
    if "vocab_size" not in checks.argument_names(found):
        raise ValueError(f"model.name={name!r} is no language model; use GPT or BERT")
    return found


def _optimizer_constructor(name: str):
    found = checks.resolve(name, "optimizer.name", optimizers, optax)
    if "learning_rate" not in checks.argument_names(found):
        raise ValueError(
            f"optimizer.name={name!r} takes no learning_rate; use an optimizer such "
            "as 'adamw'"
        )
    return found
