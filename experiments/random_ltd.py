"""From a configuration to random-LTD: its checks, and the models that drop tokens.

How many tokens a step keeps is part of its feed; see ``curricula.timeline``.
"""

from collections.abc import Callable
from typing import Any

import ml_collections
from flax import nnx

from configs import common
from dataeff_jax import schedules, token_dropping, training
from experiments import checks, curricula


def loss_fn(
    config: ml_collections.ConfigDict, model: nnx.Module, *, num_kept: int | None
) -> Callable[..., Any] | None:
    """The loss of the model that keeps so many tokens, on the plain one's parameters.

    Args:
      config: the configuration.
      model: the plain model; its parameters may be shapes only.
      num_kept: tokens that the dropping layers keep.

    Returns:
      ``(params, batch, keys) -> (loss_sum, weight_sum)``; None where all are kept.
    """
    if num_kept is None:
        return None
    settings = config.random_ltd
    kept: int | list[int | None] = num_kept
    if settings.layers is not None:
        layers = range(curricula.num_layers(config))
        kept = [num_kept if layer in settings.layers else None for layer in layers]
    dropping = token_dropping.with_random_ltd(
        model, num_kept=kept, always_keep=tuple(settings.always_keep)
    )
    graphdef = nnx.graphdef(dropping)

    def loss(params, batch, keys):
        return nnx.merge(graphdef, params).loss(batch, keys=keys)

    return loss


def train_flops(
    config: ml_collections.ConfigDict, model: Any, feed: training.Feed
) -> int:
    """Operations of one row in a training step with this feed, by the formula."""
    return model.train_flops(
        feed.row_length,
        num_kept=feed.num_kept,
        num_dropping=curricula.num_dropping(config),
    )


def num_kept(feed: training.Feed) -> int:
    """Tokens of a row that the dropping layers see; all of them where none drops."""
    return feed.length if feed.num_kept is None else feed.num_kept


def shape_name(shape: tuple[int, int, int | None]) -> str:
    """A shape of a batch for people: ``16 x 128``, ``16 x 128 keeping 64``."""
    rows, length, kept = shape
    return f"{rows} x {length}" + ("" if kept is None else f" keeping {kept}")


def problems(config: ml_collections.ConfigDict) -> list[str]:
    """Sentences about what is wrong with ``config.random_ltd``, before any work."""
    settings = config.random_ltd
    if settings is None:
        return []
    if not isinstance(settings, ml_collections.ConfigDict):
        return [f"random_ltd={settings!r}: expected a block of keys, or None"]
    clock = settings.get("clock") or "steps"
    found = checks.choice_problems(
        {"random_ltd.clock": (clock, curricula.DROPPING_CLOCKS)}
    )
    found = found or curricula.block_problems(
        config, settings, common.random_ltd(), "random_ltd", clock
    )
    return found or [
        *_kept_problems(config),
        *_layer_problems(config),
        *_always_keep_problems(settings),
    ]


def _kept_problems(config) -> list[str]:
    where, settings = "random_ltd.kwargs", config.random_ltd
    pacing = curricula.kept_pacing(config)
    if not isinstance(pacing, schedules.Pacing):
        return [
            f"random_ltd.schedule={settings.schedule!r} gives no number of tokens; use "
            "one such as 'fixed_linear_schedule'"
        ]
    low, high = pacing.min_difficulty, pacing.max_difficulty
    if not (isinstance(low, int) and isinstance(high, int)) or low < 1:
        return [f"{where} keeps {low} to {high} tokens: must be integers from 1 on"]
    if high > config.data.seq_len:
        return [
            f"{where}.max_difficulty={high} exceeds data.seq_len="
            f"{config.data.seq_len}, the length of the rows"
        ]
    try:
        curricula.buckets(high, settings.buckets, min_length=low)
    except (AttributeError, TypeError, ValueError) as error:
        return [f"random_ltd.buckets: {error}"]
    curriculum = config.curriculum
    length = curriculum.get("length") if hasattr(curriculum, "get") else None
    if hasattr(length, "get") and length.get("mode") == "segment":
        return [
            "random_ltd keeps tokens of whole rows, but curriculum.length.mode="
            "'segment' makes several texts of one; use 'reshape'"
        ]
    return []


def _layer_problems(config) -> list[str]:
    count, chosen = curricula.num_layers(config), config.random_ltd.layers
    if chosen is None:
        if count > 2:
            return []
        return [
            "random_ltd drops tokens in the layers between the first and the last, but "
            f"model.kwargs.num_layers={count}; take at least 3, or choose "
            "random_ltd.layers"
        ]
    if not isinstance(chosen, list | tuple) or not chosen:
        return [f"random_ltd.layers={chosen!r}: must be a list of layers, or None"]
    fits = all(type(layer) is int and 0 <= layer < count for layer in chosen)
    if fits and len(set(chosen)) == len(chosen):
        return []
    return [
        f"random_ltd.layers={list(chosen)}: must be different layers from 0 to "
        f"{count - 1}"
    ]


def _always_keep_problems(settings) -> list[str]:
    places = settings.always_keep
    fits = isinstance(places, list | tuple)
    if fits and all(type(place) is int and place >= 0 for place in places):
        return []
    return [f"random_ltd.always_keep={places!r}: must be a list of positions from 0 on"]
