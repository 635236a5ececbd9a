"""A small GPT on real English dialogue: the run that `make train` makes.

    python -m experiments.train_lm --config=configs/gpt_baseline.py --workdir=runs/gpt
    ...:tiny      # 20 steps of a toy model, what the tests run

Follows Radford et al., Language Models are Unsupervised Multitask Learners (2019) in
the model's form; the size is what two CPU cores train in under four minutes.
"""

from configs import common


def get_config(arg=None):
    """Returns the configuration; ``arg`` is like ``"tiny,seed=1"``."""
    arg = common.parse_arg(arg, tiny=False, seed=0)
    config = common.base()
    config.seed = arg.seed
    config.data.batch_size = 16
    config.data.seq_len = 128
    config.model.kwargs = dict(
        num_layers=2, width=128, num_heads=4, positions="rope", layers="unroll"
    )
    config.train.num_steps = 1200
    config.schedule.kwargs.update(peak_value=4e-3, warmup=60)
    config.eval.compare_with_ngrams = True
    if arg.tiny:
        config.data.update(seq_len=32, batch_size=8)
        config.data.tokenizer.vocab_size = 512
        config.model.kwargs.update(width=32, num_heads=2)
        config.schedule.kwargs.warmup = 4
        config.train.update(num_steps=20, log_every_steps=1)
        config.eval.update(every_steps=10, batch_size=8, max_rows=16)
        config.checkpoint.every_steps = 5
    return config
