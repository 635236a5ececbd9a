"""Checks a configuration before any work: unknown keys, wrong types, bad values.

Each check returns sentences, so that all problems are reported in one message.
"""

import difflib
import inspect
import math
import numbers
import types
import typing
from typing import Any

import ml_collections

from configs import common
from dataeff_jax import training


def schema_problems(config: ml_collections.ConfigDict) -> list[str]:
    """Sentences about unknown or missing keys, wrong types and values out of range."""
    problems = _schema_problems(config, common.base(), "")
    return problems or _value_problems(config)


def block_problems(block, schema, prefix: str, free=()) -> list[str]:
    """Sentences about unknown or missing keys and wrong types of a block.

    Args:
      block: a ConfigDict.
      schema: its keys with their defaults.
      prefix: of its keys, such as ``"curriculum."``.
      free: names of keys whose values are checked elsewhere.
    """
    problems = [
        f"there is no key {prefix + name!r}; {nearest(name, schema)}"
        for name in block
        if name not in schema
    ]
    shared = {name: block[name] for name in schema if name in block}
    checked = {name: None if name in free else schema[name] for name in schema}
    return problems + _schema_problems(
        ml_collections.ConfigDict(shared), ml_collections.ConfigDict(checked), prefix
    )


def choice_problems(choices: dict[str, tuple[Any, typing.Sequence[str]]]) -> list[str]:
    """Sentences about values, by key, that are none of those allowed."""
    return [
        f"{key}={value!r}: must be {' or '.join(map(repr, allowed))}"
        for key, (value, allowed) in choices.items()
        if value not in allowed
    ]


def unknown_key(config: ml_collections.ConfigDict, key: str) -> str:
    """Says that ``key`` does not exist, and which similar one does."""
    known = list(_flat_keys(config))
    parent, _, name = key.rpartition(".")
    # The same name in another section is a likelier slip than a similar spelling.
    moved = [k for k in known if k.rpartition(".")[2] == name]
    near = moved or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if near:
        return f"there is no key {key!r}; did you mean {near[0]!r}?"
    section = config
    for part in filter(None, parent.split(".")):
        section = section.get(part) if hasattr(section, "get") else None
    choices = sorted(config if section is None else section)
    return f"there is no key {key!r}; allowed here: {', '.join(choices)}"


def argument_problems(function, kwargs, *, where: str, given=()) -> list[str]:
    """Sentences about those of ``kwargs`` that ``function`` does not take.

    Args:
      function: what will be called.
      kwargs: the config's arguments for it.
      where: the config key of the arguments, for the message.
      given: names of arguments that the builder passes itself.
    """
    parameters = _parameters(function)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    names = argument_names(function)
    allowed = [n for n in names if n not in given]
    problems, misfits = [], []
    for name, value in kwargs.items():
        if name in given:
            problems.append(f"{where}.{name} is set elsewhere in the config; remove it")
        elif name not in names and not open_ended:
            near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {allowed}"
            misfits.append(f"{where}.{name} does not fit {function.__name__}; {hint}")
        elif name in names and not _fits(value, parameters[name]):
            problems.append(
                f"{where}.{name}={value!r} is {type(value).__name__}, "
                f"{function.__name__} wants {_wanted(parameters[name])}"
            )
    for name, parameter in parameters.items():
        required = parameter.default is parameter.empty
        if name in allowed and required and name not in kwargs:
            problems.append(f"{where}.{name} is missing: {function.__name__} needs it")
    if misfits:
        misfits[-1] += f" (--config.{where}={{}} drops them all)"
    return problems + misfits


def argument_names(function) -> list[str]:
    """The names of a function's arguments, variadic ones left out."""
    parameters = _parameters(function)
    return [n for n, p in parameters.items() if p.kind not in _VARIADIC]


def nearest(name: str, choices) -> str:
    """``did you mean ...?`` where ``choices`` has a similar name, else all of them."""
    near = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"there are {', '.join(sorted(choices))}"


def resolve(name: str, key: str, *namespaces) -> Any:
    """The public function or class called ``name`` of the first namespace that has it.

    Raises:
      ValueError: that names ``key`` and the nearest name there is.
    """
    for namespace in namespaces:
        found = getattr(namespace, name, None)
        if callable(found) and not name.startswith("_"):
            return found
    choices = {n for s in namespaces for n in getattr(s, "__all__", dir(s))}
    raise ValueError(f"{key}={name!r} is unknown; {nearest(name, choices)}")


def _parameters(function):
    """The parameters; of a class those of its ``__init__``.

    Flax's metaclass hides them from ``inspect.signature``.
    """
    if not inspect.isclass(function):
        return inspect.signature(function).parameters
    _, *rest = inspect.signature(function.__init__).parameters.items()
    return dict(rest)


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _flat_keys(block, prefix=""):
    for name, value in block.items():
        yield prefix + name
        if isinstance(value, ml_collections.ConfigDict) and name != "kwargs":
            yield from _flat_keys(value, f"{prefix}{name}.")


def _schema_problems(block, schema, prefix) -> list[str]:
    problems = []
    for name, value in block.items():
        key = prefix + name
        if name not in schema:
            problems.append(unknown_key(common.base(), key))
        elif schema[name] is None:
            continue
        elif name == "kwargs" and isinstance(value, ml_collections.ConfigDict):
            continue
        elif isinstance(schema[name], ml_collections.ConfigDict):
            if isinstance(value, ml_collections.ConfigDict):
                problems.extend(_schema_problems(value, schema[name], key + "."))
            else:
                problems.append(f"{key}={value!r}: expected a block of keys")
        elif not _same_kind(value, schema[name]):
            problems.append(
                f"{key}={value!r} is {type(value).__name__}, "
                f"expected {type(schema[name]).__name__}"
            )
    missing = [prefix + name for name in schema if name not in block]
    problems.extend(f"the key {key!r} is missing" for key in missing)
    return problems


def _value_problems(config) -> list[str]:
    """Ranges that no builder would notice before the first step."""
    at_least_one = (
        "data.seq_len",
        "data.batch_size",
        "data.tokenizer.vocab_size",
        "optimizer.accumulation_steps",
        "train.num_steps",
        "train.log_every_steps",
        "train.max_shapes",
        "eval.every_steps",
        "eval.batch_size",
        "checkpoint.every_steps",
        "checkpoint.keep",
    )
    flat = training.flatten_config(config.to_dict())
    problems = [
        f"{key}={value}: must be a finite number"
        for key, value in flat.items()
        if isinstance(value, float) and not math.isfinite(value)
    ]
    for key in at_least_one:
        if flat[key] < 1:
            problems.append(f"{key}={flat[key]}: must be at least 1")
    for key in ("mesh.axes.data", "eval.max_rows"):
        if flat[key] != -1 and flat[key] < 1:
            problems.append(f"{key}={flat[key]}: must be at least 1, or -1 for all")
    if config.data.num_workers < 0:
        problems.append(
            f"data.num_workers={config.data.num_workers}: must be 0 or more"
        )
    if not 0 <= config.seed < 2**32:
        # Keys are made of 32 bits: a larger seed would silently equal a smaller one.
        problems.append(f"seed={config.seed}: must lie between 0 and 2**32 - 1")
    if not 0 < config.data.validation_fraction < 1:
        problems.append(
            f"data.validation_fraction={config.data.validation_fraction}: "
            "must lie between 0 and 1, both excluded"
        )
    if not 0 <= config.data.mask_rate < 1:
        problems.append(f"data.mask_rate={config.data.mask_rate}: must lie in [0, 1)")
    problems += _token_batch_problems(config)
    clocks = ("steps", "tokens", "layer_tokens")
    warmup_clock = config.schedule.warmup_clock
    problems += choice_problems({"schedule.clock": (config.schedule.clock, clocks)})
    problems += choice_problems(
        {"schedule.warmup_clock": (warmup_clock, (*clocks, ""))}
    )
    problems += choice_problems(
        {"train.budget_clock": (config.train.budget_clock, clocks[1:])}
    )
    if config.train.num_tokens < 0:
        problems.append(
            f"train.num_tokens={config.train.num_tokens}: must be 0 (train.num_steps "
            "ends the run) or more"
        )
    for block in ("zero", "compression", "sparsity"):
        if config[block] is not None:
            problems.append(f"{block} is not available in this version; leave it None")
    return problems


def _token_batch_problems(config) -> list[str]:
    """Problems of batches that are filled up to a number of tokens."""
    settings, scaling = config.data, config.schedule.batch_scaling
    problems = choice_problems(
        {"schedule.batch_scaling": (scaling, ("none", "linear", "sqrt"))}
    )
    if settings.buckets.multiple < 1 or settings.buckets.max_count < 2:
        problems.append(
            f"data.buckets={settings.buckets.to_dict()}: multiple must be at least 1 "
            "and max_count at least 2"
        )
    if not settings.max_tokens:
        if scaling != "none":
            problems.append(
                f"schedule.batch_scaling={scaling!r} is for batches of different size; "
                "set data.max_tokens"
            )
        return problems
    fewest = settings.batch_size * settings.seq_len
    if settings.max_tokens < fewest:
        problems.append(
            f"data.max_tokens={settings.max_tokens} must be 0 (off) or at least "
            f"batch_size * seq_len = {fewest}: rows come in multiples of batch_size"
        )
    if settings.packed:
        problems.append(
            "data.max_tokens fills batches with rows of different length; set "
            "data.packed=False"
        )
    if config.random_ltd is not None:
        problems.append(
            "data.max_tokens and random_ltd do not go together in this version; set "
            "one of data.max_tokens=0 and random_ltd=None"
        )
    if config.curriculum is not None:
        problems.append(
            "data.max_tokens chooses the rows of a batch, as a curriculum does; set "
            "one of data.max_tokens=0 and curriculum=None"
        )
    return problems


def _same_kind(value, default) -> bool:
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, float):
        return isinstance(value, numbers.Real)
    return isinstance(value, type(default))


def _fits(value, parameter) -> bool:
    """Whether a plain config value may be what the parameter's annotation says."""
    kinds = _plain_kinds(parameter.annotation)
    if kinds is None:
        # An annotation that says little, beside a default that says more.
        number = isinstance(parameter.default, int | float)
        return not (number and isinstance(value, str))
    if value is None or isinstance(value, bool):
        return type(value) in kinds
    if isinstance(value, int) and float in kinds:
        return True
    return isinstance(value, tuple(kinds))


def _plain_kinds(annotation):
    """The set of plain types in an annotation, or None where others are allowed."""
    if annotation is None:
        return {type(None)}
    if annotation in (int, float, str, bool, type(None)):
        return {annotation}
    if typing.get_origin(annotation) is typing.Literal:
        return {type(choice) for choice in typing.get_args(annotation)}
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        kinds = [_plain_kinds(part) for part in typing.get_args(annotation)]
        return None if None in kinds else set().union(*kinds)
    return None


def _wanted(parameter) -> str:
    annotation = parameter.annotation
    return getattr(annotation, "__name__", None) or str(annotation)
