"""The mixture of corpora in a config: its corpora, their weights and their orders."""

import hashlib
import math
import numbers
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import ml_collections
import numpy as np

from configs import common
from dataeff_jax import curriculum, data, training
from experiments import checks

# What a corpus may have for itself; all are packed, split and tokenized alike.
_DATA_KEYS = ("name", "path", "field")
_FORMATS = ("text", "jsonl", "parquet", "array_record", "huggingface")


def config_of(config: ml_collections.ConfigDict, name: str):
    """The config that a corpus of the mixture would have alone."""
    result = config.copy_and_resolve_references().unlock()
    given = dict(result.curriculum.mixture.corpora[name])
    if "metrics" in given:
        result.curriculum.metrics = given.pop("metrics")
    result.data.update(given)
    result.curriculum.mixture = None
    return result.lock()


def fingerprint(own: str, parts: Mapping[str, str]) -> str:
    """The fingerprint of the texts of a run, from those of its corpora."""
    return hashlib.sha256(repr([own, sorted(parts.items())]).encode()).hexdigest()


def order(
    config: ml_collections.ConfigDict,
    corpora: Mapping[str, int | curriculum.SampleOrder],
    weights: Mapping[str, Any],
    planned: training.Timeline,
) -> curriculum.Mixture:
    """The mixture of corpora that are given by their sizes or orders."""
    return curriculum.Mixture(
        corpora,
        weights=weights,
        batch_size=config.data.batch_size,
        seed=config.seed,
        step_offset=0 if config.curriculum.clock == "tokens" else 1,
        num_steps=planned.num_steps,
    )


def seed_of(config: ml_collections.ConfigDict, name: str) -> int:
    """The seed of a corpus's own order: no two corpora share one."""
    number = sorted(config.curriculum.mixture.corpora).index(name)
    return int(np.random.SeedSequence([config.seed, number]).generate_state(1)[0])


def weight_arguments(kwargs: Mapping[str, Any], function: Callable) -> dict[str, Any]:
    """A weight schedule's arguments, with steps fine enough for a weight.

    The schedules' own rounds to whole numbers, which would make a weight that rises
    from 0 to 1 jump there at the end.
    """
    low, high = (kwargs.get(f"{end}_difficulty") for end in ("min", "max"))
    if "difficulty_step" not in checks.argument_names(function):
        return dict(kwargs)
    if not isinstance(low, int | float) or not isinstance(high, int | float):
        return dict(kwargs)  # and the schedule says what it wants
    return {"difficulty_step": (high - low) / 1000 or 1.0, **kwargs}


def problems(config: ml_collections.ConfigDict) -> list[str]:
    """Sentences about what is wrong with the block, all but its weights' values."""
    where, block = "curriculum.mixture", config.curriculum.mixture
    if not isinstance(block, ml_collections.ConfigDict):
        return [f"{where}={block!r}: expected a block of keys, or None"]
    keys = ("corpora", "weights")
    found = checks.block_problems(block, common.mixture({}, {}), where + ".", keys)
    found += [
        f"{where}.{key}={block[key]!r}: expected a block of names"
        for key in keys
        if not isinstance(block.get(key, block), ml_collections.ConfigDict)
    ]
    if found:
        return found
    if not block.corpora or set(block.corpora) != set(block.weights):
        return [
            f"{where} has the corpora {sorted(block.corpora)} and weights of "
            f"{sorted(block.weights)}; they must be of the same names, at least one"
        ]
    if config.curriculum.index:
        found.append(
            "curriculum.index is of one corpus; leave it empty with a mixture, whose "
            "corpora are analyzed when needed"
        )
    if config.curriculum.draw == "parity":
        found.append(
            "curriculum.draw='parity' counts whole batches of one corpus; with a "
            "mixture use 'stratified' or 'iid'"
        )
    for name in block.corpora:
        found.extend(_corpus_problems(config, name))
        found.extend(_weight_problems(name, block.weights[name]))
    return found or _same_data(config)


def _corpus_problems(config, name: str) -> list[str]:
    where = f"curriculum.mixture.corpora.{name}"
    given = config.curriculum.mixture.corpora[name]
    if not re.fullmatch(r"[\w-]+", name):
        return [f"{where}: a name is of letters, digits, '_' and '-'"]
    if not isinstance(given, ml_collections.ConfigDict):
        return [f"{where}={given!r}: expected a block of keys"]
    allowed = (*_DATA_KEYS, "metrics")
    found = [
        f"{where}.{key}: a corpus may differ in {', '.join(allowed)}; everything else "
        "is that of config.data"
        for key in given
        if key not in allowed
    ]
    found += [
        f"{where}.{key}={given[key]!r}: expected text"
        for key in _DATA_KEYS
        if not isinstance(given.get(key, ""), str)
    ]
    if not isinstance(given.get("metrics", given), ml_collections.ConfigDict):
        found.append(f"{where}.metrics={given.metrics!r}: expected a block of keys")
    return found or _source_problems(config, given, where)


def _source_problems(config, given, where: str) -> list[str]:
    """Where a text cannot be: told before the first one is tokenized."""
    name = given.get("name", config.data.name)
    path = given.get("path", config.data.path)
    known = (*data.CORPORA, *_FORMATS)
    if name not in known:
        return [f"{where}.name={name!r} is unknown; {checks.nearest(name, known)}"]
    if name in data.CORPORA or (path and pathlib.Path(path).exists()):
        return []
    # Several files are named by a pattern.
    if any(sign in path for sign in "*?[") or (name == "huggingface" and path):
        return []
    return [f"{where}.path={path!r}: the format {name!r} needs a file that exists"]


def _weight_problems(name: str, weight: Any) -> list[str]:
    where = f"curriculum.mixture.weights.{name}"
    if isinstance(weight, ml_collections.ConfigDict):
        return []  # a schedule, checked as all schedules are
    number = isinstance(weight, numbers.Real) and not isinstance(weight, bool)
    if not number or not math.isfinite(weight) or weight <= 0:
        return [
            f"{where}={weight!r}: must be a positive number or a block of schedule and "
            "kwargs; leave out a corpus that is never drawn"
        ]
    return []


def _same_data(config) -> list[str]:
    """Two names of one text would draw its samples twice as often, unseen."""
    first: dict[tuple, str] = {}
    for name in sorted(config.curriculum.mixture.corpora):
        told = source(config_of(config, name).data)
        if told in first:
            return [
                f"curriculum.mixture.corpora.{first[told]} and .{name} are the same "
                "data; give it once, with the sum of the weights"
            ]
        first[told] = name
    return []


def source(settings: ml_collections.ConfigDict) -> tuple[str, ...]:
    """What tells the texts of a data block from others."""
    if settings.name in data.CORPORA:
        return (settings.name,)
    return settings.name, settings.path, settings.field
