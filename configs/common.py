"""What every configuration shares: the schema with its defaults, and ``parse_arg``.

All keys are always present, ``None`` turns a feature off, and a block that builds an
object is ``{name, kwargs}``: the name of a function or class of the library (or of
optax) and its keyword arguments.
"""

import ml_collections


def base() -> ml_collections.ConfigDict:
    """Returns the schema: every key there is, with its default."""
    config = ml_collections.ConfigDict()
    config.seed = 0
    # Devices on the data axis; -1 takes all there are.
    config.mesh = dict(axes=dict(data=-1))
    config.data = dict(
        # A corpus that a package carries ("chitchat", "wiki"), or one of the formats
        # "text", "jsonl", "parquet", "array_record", "huggingface" with `path`.
        name="chitchat",
        path="",
        field="text",
        # Where the trained tokenizer and the token cache are kept between runs.
        cache_dir=".cache/data",
        # "bpe" trains byte-pair encoding on the corpus, "bytes" needs no training,
        # a path loads a tokenizer.json.
        tokenizer=dict(name="bpe", vocab_size=4096),
        seq_len=256,
        batch_size=16,  # rows a step over all devices and hosts
        segments="document",  # attention stays in a document; "row": crosses them
        # Training rows hold documents one after another; False: one document each, cut
        # at seq_len or filled up.
        packed=True,
        # Above 0, with packed=False: a batch has as many rows as fit so many tokens, in
        # multiples of batch_size, and is as long as its longest row, rounded up.
        max_tokens=0,
        buckets=dict(multiple=64, max_count=8),  # what lengths are rounded up to
        validation_fraction=0.03,
        split_seed=0,  # apart from `seed`, so that all seeds have one validation set
        num_workers=0,  # processes that prepare batches; 0: threads of this process
        # The share of tokens to predict, for BERT; 0 for a causal model.
        mask_rate=0.0,
    )
    config.curriculum = None  # or curriculum()
    config.model = dict(name="GPT", kwargs=dict())
    config.random_ltd = None  # or random_ltd()
    config.optimizer = dict(
        name="adamw",
        kwargs=dict(b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1),
        max_grad_norm=1.0,
        accumulation_steps=1,
    )
    config.schedule = dict(
        name="warmup_cosine_schedule",
        # "steps"; "tokens": fed tokens; or "layer_tokens": layer tokens divided by the
        # number of layers, so that a token which half of them see counts half.
        clock="steps",
        warmup_clock="",  # one of these where that of the warm-up differs
        # With data.max_tokens: the rate is for data.batch_size rows; a batch of k times
        # as many takes k times it ("linear"), or the root of k ("sqrt").
        batch_scaling="none",
        kwargs=dict(peak_value=1e-3, warmup=100, final_ratio=0.1),
    )
    config.zero = None
    config.compression = None
    config.sparsity = None
    config.train = dict(
        num_steps=1000,
        # Above 0: the run ends with the step that reaches so many tokens instead,
        num_tokens=0,
        # counted as "tokens" (fed) or "layer_tokens", as in `schedule.clock`.
        budget_clock="tokens",
        log_every_steps=20,
        max_shapes=32,  # of batches, each of which compiles a step
    )
    config.eval = dict(
        every_steps=200,
        batch_size=32,
        max_rows=-1,  # -1: all rows
        compare_with_ngrams=False,  # at the end, with what counting reaches
    )
    config.checkpoint = dict(every_steps=200, keep=2)
    return config.lock()


def curriculum(**changes) -> ml_collections.ConfigDict:
    """Returns the keys of ``config.curriculum``: defaults, then ``changes``.

    Every batch is drawn from what all metrics admit, and cut to the length of its step.
    Schedules are named functions of ``dataeff_jax.schedules``; a ``total`` that is a
    fraction is one of the run at full length.
    """
    block = dict(
        # metric(...) by name: sequence_length, vocabulary_rarity, ...
        metrics=dict(),
        length=None,  # or length(...)
        clock="steps",  # of all schedules here; or "tokens": fed tokens
        draw="stratified",  # how clusters share a batch; or "parity", "iid"
        # A directory that `experiments.analyze` wrote; empty: analyzed when needed,
        # and kept in data.cache_dir.
        index="",
        mixture=None,  # or mixture(...)
    )
    return ml_collections.ConfigDict({**block, **changes})


def metric(schedule: str = "fixed_root_schedule", **changes) -> dict:
    """Returns the keys of a metric of a curriculum; ``kwargs`` are the schedule's."""
    block = dict(
        difficulty_type="percentile",  # or "value", "deepspeed_percentile"
        schedule=schedule,
        kwargs=dict(),
    )
    return {**block, **changes}


def length(mode: str = "truncate", **changes) -> dict:
    """Returns the keys of a length curriculum; ``kwargs`` are the schedule's."""
    block = dict(
        # "truncate", "reshape", "segment", or "trim": to the longest row of a batch.
        mode=mode,
        schedule="fixed_linear_schedule",  # empty for "trim"
        kwargs=dict(),
        # Lengths are rounded down to multiples (up for "trim"), at most so many.
        buckets=dict(multiple=64, max_count=8),
    )
    return {**block, **changes}


def mixture(corpora: dict, weights: dict) -> dict:
    """Returns the keys of a curriculum's mixture.

    Args:
      corpora: by name, the keys of ``config.data`` in which a corpus differs from it
        (name, path, field; none: its own corpus), and ``metrics`` where they are not
        those of the curriculum. All are tokenized, split and packed as it is.
      weights: by name, a positive number or ``weight(...)``; their ratio counts.
    """
    return dict(corpora=corpora, weights=weights)


def weight(schedule: str = "fixed_linear_schedule", **kwargs) -> dict:
    """Returns a weight that changes; ``kwargs`` are the schedule's.

    Where they lack ``difficulty_step`` it is a thousandth of the schedule's range.
    """
    return dict(schedule=schedule, kwargs=kwargs)


def random_ltd(
    schedule: str = "fixed_linear_schedule", **changes
) -> ml_collections.ConfigDict:
    """Returns the keys of ``config.random_ltd``; ``kwargs`` are the schedule's.

    The schedule gives the tokens of a row that the layers keep. Where these are fewer
    than the length of the step's rows, each layer drops the others.
    """
    block = dict(
        schedule=schedule,
        kwargs=dict(),
        # Of the schedule, counted from 0: "steps", "tokens" or "layer_tokens".
        clock="steps",
        # Kept tokens are rounded down to multiples, at most so many.
        buckets=dict(multiple=64, max_count=8),
        layers=None,  # a list of layers, from 0; None: all but the first and the last
        always_keep=(),  # positions that every layer keeps
    )
    return ml_collections.ConfigDict({**block, **changes})


def parse_arg(arg: str | None, **defaults):
    """Parses ``"tiny,seed=3"`` into the fields of ``defaults``.

    A name alone means True. Values take the type of their default.

    Raises:
      ValueError: for a field that ``defaults`` does not have.
    """
    values = dict(defaults)
    for item in filter(None, (arg or "").split(",")):
        name, _, text = item.partition("=")
        if name not in defaults:
            raise ValueError(
                f"the config has no variant {name!r}; it has {', '.join(defaults)}"
            )
        kind = type(defaults[name])
        if kind is bool:
            values[name] = text.lower() in ("", "1", "true", "yes")
        else:
            try:
                values[name] = kind(text)
            except ValueError:
                raise ValueError(
                    f"the variant {item!r} needs {name}=<{kind.__name__}>"
                ) from None
    return ml_collections.ConfigDict(values)
