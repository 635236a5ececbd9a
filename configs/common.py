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
        validation_fraction=0.03,
        num_workers=0,  # processes that prepare batches; 0: threads of this process
        # The share of tokens to predict, for BERT; 0 for a causal model.
        mask_rate=0.0,
    )
    config.curriculum = None
    config.model = dict(name="GPT", kwargs=dict())
    config.random_ltd = None
    config.optimizer = dict(
        name="adamw",
        kwargs=dict(b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1),
        max_grad_norm=1.0,
        accumulation_steps=1,
    )
    config.schedule = dict(
        name="warmup_cosine_schedule",
        clock="steps",  # or "tokens": fed tokens
        kwargs=dict(peak_value=1e-3, warmup=100, final_ratio=0.1),
    )
    config.zero = None
    config.compression = None
    config.sparsity = None
    config.train = dict(num_steps=1000, log_every_steps=20)
    config.eval = dict(
        every_steps=200,
        batch_size=32,
        max_rows=-1,  # -1: all rows
        compare_with_ngrams=False,  # at the end, with what counting reaches
    )
    config.checkpoint = dict(every_steps=200, keep=2)
    return config.lock()


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
