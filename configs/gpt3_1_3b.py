"""GPT-3 1.3B on 300 billion tokens, the size of the data-efficiency papers.

    python -m experiments.plan --config=configs/gpt3_1_3b.py --hosts=8 \\
        --devices_per_host=8
    python -m experiments.train_lm --config=configs/gpt3_1_3b.py \\
        --config.data.path=/corpus.jsonl --workdir=runs/gpt3

Shapes, batch, rate and warm-up: Brown et al., https://arxiv.org/abs/2005.14165, table
2.1 and appendix B (heads: see `dataeff_jax.models.sizes`). Never trained here; `plan`
says what it needs.
"""

from configs import common


def get_config(arg=None):
    """Returns the configuration; ``arg`` is like ``"seed=1"``."""
    arg = common.parse_arg(arg, seed=0)
    config = common.base()
    config.seed = arg.seed
    config.data.update(
        name="jsonl",
        seq_len=2048,
        batch_size=512,
        segments="row",  # attention crosses documents, as cuDNN's causal kernel does
        validation_fraction=0.001,
    )
    config.data.tokenizer.vocab_size = 50257
    config.model.kwargs = dict(
        num_layers=24,
        width=2048,
        num_heads=16,
        dtype="bfloat16",
        remat="block",
        layers="scan",
    )
    config.schedule.update(clock="tokens")
    config.schedule.kwargs.update(peak_value=2e-4, warmup=375_000_000)
    config.train.update(num_steps=286_102, log_every_steps=50)
    config.eval.update(every_steps=2000, batch_size=512)
    config.checkpoint.update(every_steps=1000, keep=3)
    return config
