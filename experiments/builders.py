"""From a configuration to objects: the only place that translates.

A block ``{name, kwargs}`` is resolved by attribute on a fixed list of namespaces, so a
new optimizer, schedule or model needs no entry here.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import ml_collections
import optax
from flax import nnx

from dataeff_jax import data, distributed, models, optimizers, schedules
from experiments import checks

# Arguments that a builder passes itself; a config may not set them as well.
_GIVEN = {
    "model": ("vocab_size", "rngs"),
    "optimizer": ("learning_rate", "mask", "is_stacked"),
    "schedule": ("total",),
}


class Corpus(NamedTuple):
    """The tokenized documents of a run, as rows to train and to evaluate on."""

    tokenizer: data.Tokenizer
    fingerprint: str  # of text and tokenizer
    vocab_size: int  # of the model: the tokenizer's, and a mask token where one is used
    train: data.PackedRows
    validation: data.PackedRows
    transform: Callable[[dict, int], dict] | None  # what becomes of a row when drawn


def check_config(config: ml_collections.ConfigDict, *, problems=()) -> None:
    """Raises a ``ValueError`` that lists every problem of ``config``.

    Args:
      config: what a ``get_config`` returned, overrides applied.
      problems: sentences about problems that were found earlier.
    """
    problems = [*problems, *checks.schema_problems(config)]
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


def corpus(config: ml_collections.ConfigDict, *, progress=None) -> Corpus:
    """Reads, tokenizes (once, then from the cache), splits and packs the documents.

    Args:
      config: the configuration.
      progress: called as ``progress(documents_done, num_documents)`` while tokenizing.

    Raises:
      ValueError: for a corpus that is missing, empty or too small.
    """
    settings = config.data
    source = _source(settings)
    tokenizer = _tokenizer(settings, source)
    directory = data.cache_directory(settings.cache_dir, source, tokenizer)
    cache = data.tokenize(source, tokenizer, directory, progress=progress)
    train, validation = data.split_documents(
        cache, validation_fraction=settings.validation_fraction, seed=config.seed
    )
    rows = dict(length=settings.seq_len, segments=settings.segments)
    vocab_size, transform = tokenizer.vocab_size, None
    if settings.mask_rate:
        vocab_size += 1
        transform = functools.partial(
            data.mask_tokens,
            seed=config.seed,
            mask_token=tokenizer.vocab_size,
            vocab_size=vocab_size,
            special_tokens=(tokenizer.end_of_text,),
            mask_rate=settings.mask_rate,
        )
    return Corpus(
        tokenizer,
        cache.fingerprint,
        vocab_size,
        data.PackedRows(train, **rows),
        data.PackedRows(validation, keep_remainder=True, **rows),
        transform,
    )


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


def schedule(config: ml_collections.ConfigDict):
    """The learning rate as a function of the clock that ``config.schedule`` names."""
    function = getattr(schedules, config.schedule.name)
    kwargs = _with_counts(config)
    if "total" in checks.argument_names(function):
        kwargs["total"] = _total(config)
    return function(**kwargs)


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


def _total(config) -> int:
    """Length of the run in units of the schedule's clock."""
    tokens = config.data.batch_size * config.data.seq_len
    return config.train.num_steps * (tokens if config.schedule.clock == "tokens" else 1)


def _with_counts(config) -> dict:
    """The schedule's arguments, a warm-up given as a fraction turned into a count."""
    kwargs = dict(config.schedule.kwargs)
    if "warmup" in kwargs:
        kwargs["warmup"] = schedules.resolve_duration(kwargs["warmup"], _total(config))
    return kwargs


def _block_problems(config, block: str) -> list[str]:
    name, kwargs = config[block].name, config[block].kwargs
    resolve = {
        "model": lambda: _model_class(name),
        "optimizer": lambda: _optimizer_constructor(name),
        "schedule": lambda: _resolve(name, block, schedules),
    }
    try:
        function = resolve[block]()
        if block == "schedule":
            kwargs = _with_counts(config)
        if block == "model":
            kwargs = {"max_length": config.data.seq_len, **kwargs}
    except ValueError as error:
        return [str(error)]
    problems = checks.argument_problems(
        function, kwargs, where=f"{block}.kwargs", given=_GIVEN[block]
    )
    if block == "schedule" and not problems:
        try:
            schedule(config)
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
    found = _resolve(name, "model", models)
    if "vocab_size" not in checks.argument_names(found):
        raise ValueError(f"model.name={name!r} is no language model; use GPT or BERT")
    return found


def _optimizer_constructor(name: str):
    found = _resolve(name, "optimizer", optimizers, optax)
    if "learning_rate" not in checks.argument_names(found):
        raise ValueError(
            f"optimizer.name={name!r} takes no learning_rate; use an optimizer such "
            "as 'adamw'"
        )
    return found


def _resolve(name: str, block: str, *namespaces):
    for namespace in namespaces:
        found = getattr(namespace, name, None)
        if callable(found) and not name.startswith("_"):
            return found
    choices = {n for s in namespaces for n in getattr(s, "__all__", dir(s))}
    raise ValueError(
        f"{block}.name={name!r} is unknown; {checks.nearest(name, choices)}"
    )


def _source(settings):
    if settings.name in data.CORPORA:
        return data.corpus(settings.name)
    return data.open_source(settings.name, settings.path, field=settings.field)


def _tokenizer(settings, source):
    name = settings.tokenizer.name
    if name == "bytes":
        return data.ByteTokenizer()
    if name == "bpe":
        size = settings.tokenizer.vocab_size
        return data.trained_tokenizer(source, size, settings.cache_dir)
    return data.load_tokenizer(name)
