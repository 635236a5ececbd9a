"""From a configuration to its curriculum: what every step draws and feeds."""

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import grain
import ml_collections
import numpy as np

from configs import common
from dataeff_jax import curriculum, data, schedules, token_dropping, training
from experiments import checks, corpora, difficulties, mixtures

CLOCKS = ("steps", "tokens")
DROPPING_CLOCKS = ("steps", "tokens", "layer_tokens")


class Curriculum(NamedTuple):
    """What every step of a run draws and feeds, known before the run."""

    timeline: training.Timeline
    order: curriculum.SampleOrder | None  # None: every row once an epoch
    lengths: Any  # a LengthCurriculum or Trimming; None: full rows
    budget: curriculum.TokenBudget | None = None  # what batches by tokens are

    def batches(
        self,
        config: ml_collections.ConfigDict,
        corpus: corpora.Corpus,
        *,
        process_index: int = 0,
        process_count: int = 1,
        first_sample: int = 0,
    ) -> grain.MapDataset:
        """The batch of every step, this process's rows; see ``data.batches``."""
        process = dict(process_index=process_index, process_count=process_count)
        if self.budget is not None:
            return self.budget.batches(
                corpus.train, transform=corpus.transform, **process
            )
        if self.order is not None:
            rows: Any = corpus.train
            if isinstance(self.order, curriculum.Mixture):
                parts = {name: part.train for name, part in corpus.parts.items()}
                rows = self.order.rows(parts)
            result = curriculum.batches(
                rows, self.order, transform=corpus.transform, **process
            )
        else:
            result = data.batches(
                corpus.train,
                batch_size=config.data.batch_size,
                seed=config.seed,
                first_sample=first_sample,
                transform=corpus.transform,
                **process,
            )
        return result if self.lengths is None else self.lengths.batches(result)


def build(
    config: ml_collections.ConfigDict,
    corpus: corpora.Corpus,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Curriculum:
    """What a config's steps draw and feed.

    Args:
      config: the configuration.
      corpus: what ``corpora.corpus`` made of it.
      progress: called as ``progress(done, total)`` while the rows are analyzed.

    Raises:
      ValueError: an index of other data, a schedule that does not serve, or more
        shapes than ``config.train.max_shapes``.
    """
    if config.data.max_tokens:
        return _by_tokens(config, corpus)
    settings = config.curriculum
    planned = timeline(config)
    order, lengths, row_lengths = None, None, None
    if settings is not None and settings.mixture is not None:
        order, row_lengths = _mixture(config, corpus, planned, progress)
    elif settings is not None and settings.metrics:
        order, row_lengths = _order(config, corpus, planned, config.seed, progress)
    if settings is not None and settings.length:
        if settings.length.mode == "trim":
            lengths = _trimming(config, order, row_lengths)
            planned = _timeline(config, lambda step, tokens: lengths.length_at(step))
        else:
            lengths = _length_curriculum(settings.length.mode, planned)
    _check_shapes(config, planned)
    _check_always_keep(config, planned)
    return Curriculum(planned, order, lengths)


def timeline(config: ml_collections.ConfigDict) -> training.Timeline:
    """What every step feeds, from the config alone: no sample decides a length.

    Lengths that samples decide, those of mode "trim" and of ``data.max_tokens``, are
    taken as full.

    Raises:
      ValueError: a schedule that gives something else than lengths.
    """
    # Checks, the learning rate and the run ask for it, and long runs take seconds. As
    # text, because 1 and 1.0 are equal keys, but one step and a whole run.
    names, values = ("data", "curriculum", "random_ltd", "train"), config.to_dict()
    chosen = {name: values[name] for name in names}
    chosen["model"] = {"kwargs": {"num_layers": num_layers(config)}}
    return _timeline_of(json.dumps(chosen, default=list))


@functools.lru_cache(maxsize=2)
def _timeline_of(text: str) -> training.Timeline:
    config = ml_collections.ConfigDict(json.loads(text))
    settings = config.curriculum
    if settings is None or not settings.length or settings.length.mode == "trim":
        return _timeline(config, lambda step, tokens: config.data.seq_len)
    pacing = _bucketed(config)
    if settings.clock == "tokens":
        return _timeline(config, lambda step, tokens: pacing(tokens))
    # The original's curricula count from 1.
    return _timeline(config, lambda step, tokens: pacing(step + 1))


def num_layers(config: ml_collections.ConfigDict) -> int:
    """Blocks of the model; 1 where the config is wrong, which its own check says."""
    found = config.model.kwargs.get("num_layers", 1)
    return found if isinstance(found, int) and found > 0 else 1


def num_dropping(config: ml_collections.ConfigDict) -> int:
    """How many of the blocks drop tokens."""
    settings = config.random_ltd
    if settings is None:
        return 0
    chosen = settings.layers
    return max(num_layers(config) - 2, 0) if chosen is None else len(chosen)


def layer_tokens(config: ml_collections.ConfigDict, feed: training.Feed) -> int:
    """Tokens that go through a block in a step with this feed, summed over blocks."""
    per_piece = token_dropping.layer_tokens(
        feed.length,
        num_kept=feed.num_kept,
        num_layers=num_layers(config),
        num_dropping=num_dropping(config),
    )
    return feed.tokens // feed.length * per_piece


def kept_pacing(config: ml_collections.ConfigDict) -> schedules.Pacing:
    """The schedule of ``config.random_ltd``, before its values become buckets."""
    return _schedule(config, config.random_ltd, config.random_ltd.clock)


def buckets(max_length: int, settings: Any, *, min_length: int | None = None):
    """The lengths that ``settings`` allows: given, or multiples up to the maximum."""
    if not isinstance(settings, ml_collections.ConfigDict):
        return tuple(settings)
    return schedules.length_buckets(
        min_length or min(settings.multiple, max_length),
        max_length=max_length,
        multiple=settings.multiple,
        max_count=settings.max_count,
    )


def allowed_lengths(config: ml_collections.ConfigDict) -> tuple[int, ...]:
    """The lengths, rising, that the length curriculum of a config may take."""
    block = config.curriculum.length
    return _allowed(config, _schedule(config, block), block.buckets)


def _allowed(config, pacing: Any, settings: Any) -> tuple[int, ...]:
    longest = getattr(pacing, "max_difficulty", None) or config.data.seq_len
    shortest = getattr(pacing, "min_difficulty", None)
    return buckets(longest, settings, min_length=shortest)


def problems(config: ml_collections.ConfigDict) -> list[str]:
    """Sentences about what is wrong with ``config.curriculum``, before any work."""
    settings = config.curriculum
    if settings is None:
        return []
    if not isinstance(settings, ml_collections.ConfigDict):
        return [f"curriculum={settings!r}: expected a block of keys, or None"]
    found = checks.block_problems(
        settings, common.curriculum(), "curriculum.", ("metrics",)
    )
    if found:
        return found
    found = checks.choice_problems(
        {
            "curriculum.clock": (settings.clock, CLOCKS),
            "curriculum.draw": (settings.draw, ("stratified", "parity", "iid")),
        }
    )
    if not settings.metrics and settings.length is None and settings.mixture is None:
        found.append(
            "curriculum has neither metrics nor a length nor a mixture; give one, or "
            "--config.curriculum=None"
        )
    for name, block in settings.metrics.items():
        found.extend(_metric_problems(config, name, block))
    if settings.length is not None:
        found.extend(_length_problems(config))
    if settings.mixture is not None and not found:
        found.extend(_mixture_problems(config))
    return found


def _mixture_problems(config) -> list[str]:
    found = mixtures.problems(config)
    if found:
        return found
    where, block = "curriculum.mixture", config.curriculum.mixture
    for name, weight in block.weights.items():
        if isinstance(weight, ml_collections.ConfigDict):
            schema, key = common.weight(), f"{where}.weights.{name}"
            found.extend(block_problems(config, weight, schema, key))
        own = mixtures.config_of(config, name)
        for metric, told in own.curriculum.metrics.items():
            if "metrics" in block.corpora[name]:
                problems = _metric_problems(own, metric, told)
                found.extend(f"{where}.corpora.{name}: {text}" for text in problems)
    if not found:
        try:
            planned = timeline(config)
            sizes = dict.fromkeys(block.corpora, 1)
            mixtures.order(config, sizes, _weights(config, planned), planned)
        except ValueError as error:
            found.append(f"{where}.weights: {error}")
    return found


def feed_problems(config: ml_collections.ConfigDict) -> list[str]:
    """Sentences about shapes of batches, as far as no sample decides them."""
    if config.random_ltd is None:
        return []  # `problems` has looked at the lengths
    try:
        planned = timeline(config)
        _check_shapes(config, planned)
        _check_always_keep(config, planned)
    except ValueError as error:
        return [str(error)]
    return []


def _metric_problems(config, name: str, block: Any) -> list[str]:
    where = f"curriculum.metrics.{name}"
    if name not in difficulties.METRICS and not config.curriculum.index:
        hint = checks.nearest(name, difficulties.METRICS)
        return [f"{where} is no metric; {hint} (or give curriculum.index)"]
    found = block_problems(config, block, common.metric(), where)
    if not found:
        try:
            curriculum.Criterion(_schedule(config, block), block.difficulty_type)
        except ValueError as error:
            found.append(f"{where}: {error}")
    return found


def _length_problems(config) -> list[str]:
    where, block = "curriculum.length", config.curriculum.length
    if isinstance(block, ml_collections.ConfigDict) and block.get("mode") == "trim":
        return _trim_problems(config, block)
    found = block_problems(config, block, common.length(), where)
    if found:
        return found
    modes = ("truncate", "reshape", "segment", "trim")
    found = checks.choice_problems({f"{where}.mode": (block.mode, modes)})
    if not config.data.packed:
        found.append(
            f"{where}.mode={block.mode!r} cuts packed rows; rows of one document "
            "(data.packed=False) take 'trim'"
        )
    try:
        longest = getattr(_schedule(config, block), "max_difficulty", None)
        if longest is not None and longest > config.data.seq_len:
            found.append(
                f"{where}.kwargs.max_difficulty={longest} exceeds data.seq_len="
                f"{config.data.seq_len}, the length of the rows"
            )
        if not found:
            _check_shapes(config, timeline(config))
    except ValueError as error:
        found.append(f"{where}: {error}")
    return found


def _trim_problems(config, block) -> list[str]:
    where = "curriculum.length"
    found = checks.block_problems(block, common.length(), where + ".", ("buckets",))
    if config.data.packed:
        found.append(
            f"{where}.mode='trim' cuts padding, but packed rows have none; set "
            "data.packed=False"
        )
    if config.curriculum.clock == "tokens":
        found.append(
            f"{where}.mode='trim' draws before it knows the tokens, so "
            "curriculum.clock must be 'steps'"
        )
    if config.train.num_tokens:
        found.append(f"{where}.mode='trim' needs train.num_steps, not num_tokens")
    if not config.curriculum.metrics:
        found.append(
            f"{where}.mode='trim' needs a metric that orders rows by their length, "
            "such as curriculum.metrics.sequence_length"
        )
    return found


def block_problems(config, block, schema, where: str, clock: str = "") -> list[str]:
    """Problems of the keys of a block with a schedule, and of its arguments.

    Args:
      config: the configuration.
      block: of it, what is checked.
      schema: its keys with their defaults.
      where: the key of the block.
      clock: of its schedule; empty for that of the curriculum.
    """
    if not isinstance(block, ml_collections.ConfigDict):
        return [f"{where}={block!r}: expected a block of keys"]
    free = ("buckets", "always_keep")
    found = checks.block_problems(block, schema, where + ".", free)
    if found:
        return found
    try:
        function = checks.resolve(block.schedule, where + ".schedule", schedules)
    except ValueError as error:
        return [str(error)]
    try:
        kwargs = _kwargs(config, block, clock)
    except ValueError as error:
        return [f"{where}.kwargs.total: {error}"]
    found = checks.argument_problems(function, kwargs, where=f"{where}.kwargs")
    if not found:
        try:
            _schedule(config, block, clock)
        except ValueError as error:
            found = [f"{where}.kwargs: {error}"]
    return found


def _kwargs(config, block, clock: str = "") -> dict:
    """The schedule's arguments, a total that is a fraction turned into a count."""
    kwargs: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list | tuple) else value
        for name, value in block.kwargs.items()
    }
    if "total" in kwargs:
        length = run_length(config, clock or config.curriculum.clock)
        kwargs["total"] = schedules.resolve_duration(kwargs["total"], length)
    return kwargs


def run_length(config: ml_collections.ConfigDict, clock: str) -> int:
    """Length of the run at full length, in units of a clock; fractions are of it."""
    row = config.data.batch_size * config.data.seq_len
    tokens = config.train.num_tokens or config.train.num_steps * row
    return -(-tokens // row) if clock == "steps" else tokens


def _schedule(config, block, clock: str = ""):
    function = checks.resolve(block.schedule, "schedule", schedules)
    return function(**_kwargs(config, block, clock))


def _bucketed(config):
    """The length of a clock, snapped down to the buckets."""
    settings = config.curriculum.length
    return _snapped(config, _schedule(config, settings), settings.buckets)


def _snapped(config, pacing, settings):
    allowed = _allowed(config, pacing, settings)
    return schedules.bucketed_schedule(pacing, buckets=allowed)


def _kept(config):
    """``(length, step, tokens, layer_tokens) -> num_kept``; None where all are."""
    settings = config.random_ltd
    if settings is None:
        return lambda length, *clocks: None
    pacing = _snapped(config, kept_pacing(config), settings.buckets)
    place = DROPPING_CLOCKS.index(settings.clock)
    divisor = num_layers(config) if settings.clock == "layer_tokens" else 1

    def num_kept(length: int, *clocks: int) -> int | None:
        # The original counts the steps of random-LTD from 0.
        kept = int(pacing(clocks[place] // divisor))
        return kept if kept < length else None

    return num_kept


def _timeline(config, length_at) -> training.Timeline:
    """The timeline of a run whose lengths ``length_at(step, tokens)`` gives."""
    size, rows = config.data.seq_len, config.data.batch_size
    settings = config.curriculum
    mode = settings.length.mode if settings is not None and settings.length else None

    if config.data.max_tokens:
        rows = config.data.max_tokens // size // rows * rows
    num_kept = _kept(config)

    def feed_at(step: int, tokens: int, layer_tokens: int) -> training.Feed:
        length = min(int(length_at(step, tokens)), size)
        if length < 1:
            raise ValueError(f"the schedule gives the length {length} at step {step}")
        # The curriculum decides first: tokens of shorter rows are dropped only where
        # fewer of them are to be kept.
        kept = num_kept(length, step, tokens, layer_tokens)
        if mode == "reshape":
            return training.Feed(rows, rows * (size // length), length, length, kept)
        if mode == "segment":
            return training.Feed(rows, rows, size, length, kept)
        return training.Feed(rows, rows, length, length, kept)

    return _until_the_end(config, feed_at)


def _until_the_end(config, feed_at) -> training.Timeline:
    end, budget = {}, config.train.num_tokens
    if not budget:
        end["num_steps"] = config.train.num_steps
    elif config.train.budget_clock == "tokens":
        end["num_tokens"] = budget
    else:
        end["num_layer_tokens"] = budget * num_layers(config)
    count = functools.partial(layer_tokens, config)
    return training.Timeline(feed_at, layer_tokens_of=count, **end)


def _by_tokens(config, corpus: corpora.Corpus) -> Curriculum:
    """Batches that are filled up to ``data.max_tokens``."""
    settings = config.data
    # A document and the end_of_text that its row predicts; see DocumentRows.
    lengths = np.minimum(corpus.train.documents.lengths + 1, settings.seq_len)
    budget = curriculum.TokenBudget(
        lengths,
        max_tokens=settings.max_tokens,
        buckets=buckets(settings.seq_len, settings.buckets),
        seed=config.seed,
        # The devices divide batch_size, and the run does not depend on their number.
        row_multiple=settings.batch_size,
    )

    def feed_at(step: int, tokens: int, layer_tokens: int) -> training.Feed:
        samples, length = budget[step], budget.length_at(step)
        return training.Feed(int((samples >= 0).sum()), len(samples), length, length)

    planned = _until_the_end(config, feed_at)
    _check_shapes(config, planned)
    return Curriculum(planned, None, None, budget)


def _mixture(
    config, corpus: corpora.Corpus, planned: training.Timeline, progress
) -> tuple[curriculum.Mixture, Any]:
    """The mixture, and the lengths of all its rows where they are cut to them."""
    orders: dict[str, int | curriculum.SampleOrder] = {}
    lengths = []
    for name, part in sorted(corpus.parts.items()):
        own = mixtures.config_of(config, name)
        orders[name] = len(part.train)
        if own.curriculum.metrics or _trims(own):
            order, row_lengths = _order(
                own,
                corpus._replace(train=part.train),
                planned,
                mixtures.seed_of(config, name),
                progress,
            )
            lengths.append(row_lengths)
            orders[name] = len(part.train) if order is None else order
    result = mixtures.order(config, orders, _weights(config, planned), planned)
    return result, np.concatenate(lengths) if _trims(config) else None


def _weights(config, planned: training.Timeline) -> dict[str, Any]:
    weights = dict(config.curriculum.mixture.weights)
    for name, block in weights.items():
        if isinstance(block, ml_collections.ConfigDict):
            function = checks.resolve(block.schedule, "the weight", schedules)
            kwargs = mixtures.weight_arguments(block.kwargs, function)
            block = ml_collections.ConfigDict({**block, "kwargs": kwargs})
            weights[name] = _on_clock(config, _schedule(config, block), planned)
    return weights


def _order(
    config, corpus: corpora.Corpus, planned: training.Timeline, seed: int, progress
) -> tuple[curriculum.SampleOrder | None, Any]:
    """The order by the metrics, and the rows' lengths where batches are cut to them."""
    settings = config.curriculum
    index = difficulties.index(config, corpus, progress=progress)
    lengths = index.values("sequence_length") if _trims(config) else None
    if not settings.metrics:
        return None, lengths
    order = curriculum.SampleOrder(
        index,
        _criteria(config, planned),
        batch_size=config.data.batch_size,
        seed=seed,
        draw=settings.draw,
        step_offset=0 if settings.clock == "tokens" else 1,
        num_steps=planned.num_steps,
    )
    return order, lengths


def _trims(config) -> bool:
    length = config.curriculum.length
    return length is not None and length.mode == "trim"


def _criteria(config, planned: training.Timeline):
    result = {}
    for name, block in config.curriculum.metrics.items():
        pacing = _on_clock(config, _schedule(config, block), planned)
        result[name] = curriculum.Criterion(pacing, block.difficulty_type)
    return result


def _on_clock(config, pacing, planned: training.Timeline):
    """A schedule as one of the step: the tokens are known for all steps."""
    if config.curriculum.clock != "tokens":
        return pacing
    if not isinstance(pacing, schedules.Pacing):
        return lambda step: pacing(planned.tokens(int(step)))

    def value(module: Any, step: Any) -> Any:
        return pacing.value(module, planned.tokens(int(step)))

    total = pacing.total
    return dataclasses.replace(
        pacing,
        value=value,
        total=planned.num_steps if total is None else planned.step_at(total),
    )


def _length_curriculum(mode: Any, planned: training.Timeline):
    return curriculum.LengthCurriculum(
        lambda step: planned[step].length,
        mode=mode,
        step_offset=0,
        num_steps=planned.num_steps,
    )


def _trimming(config, order: Any, row_lengths: Any) -> curriculum.Trimming:
    return curriculum.Trimming(
        order,
        row_lengths,
        buckets=buckets(config.data.seq_len, config.curriculum.length.buckets),
    )


def _check_shapes(config, planned: training.Timeline) -> None:
    shapes = planned.shapes()
    if len(shapes) > config.train.max_shapes:
        raise ValueError(
            f"the run has {len(shapes)} shapes of batches, each of which compiles a "
            f"step, more than train.max_shapes={config.train.max_shapes}; raise "
            f"{' or '.join(_with_buckets(config))}.multiple, or set its max_count"
        )


def _check_always_keep(config, planned: training.Timeline) -> None:
    fixed = set() if config.random_ltd is None else set(config.random_ltd.always_keep)
    for feed in planned.feeds:
        if feed.num_kept is None or not fixed:
            continue
        if len(fixed) > feed.num_kept or max(fixed) >= feed.length:
            raise ValueError(
                f"random_ltd.always_keep={tuple(sorted(fixed))} does not fit into rows "
                f"of {feed.length} tokens of which {feed.num_kept} are kept"
            )


def _with_buckets(config) -> list[str]:
    """Keys of the buckets that decide the shapes."""
    settings, keys = config.curriculum, []
    if config.data.max_tokens:
        keys.append("data.buckets")
    if settings is not None and settings.length:
        keys.append("curriculum.length.buckets")
    if config.random_ltd is not None:
        keys.append("random_ltd.buckets")
    return keys


def difficulties_at(
    order: curriculum.SampleOrder | None, step: int
) -> dict[str, int | float]:
    """The schedules' difficulties of a step and its pool, for the log."""
    if order is None:
        return {}
    told = {
        f"difficulty_{name}": np.asarray(value).item()
        for name, value in order.difficulties(step).items()
    }
    return told | {"eligible": order.num_eligible(step)}
