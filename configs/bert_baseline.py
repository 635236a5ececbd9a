"""A small BERT on real English dialogue: masked-language modelling with LAMB.

    python -m experiments.train_lm --config=configs/bert_baseline.py --workdir=runs/bert
    ...:tiny      # 20 steps of a toy model, what the tests run

Devlin et al., https://arxiv.org/abs/1810.04805: 15% of the tokens are predicted, 80% of
them hidden, 10% replaced, 10% left; You et al., https://arxiv.org/abs/1904.00962: LAMB.
"""

from configs import common


def get_config(arg=None):
    """Returns the configuration; ``arg`` is like ``"tiny,seed=1"``."""
    arg = common.parse_arg(arg, tiny=False, seed=0)
    config = common.base()
    config.seed = arg.seed
    config.data.update(seq_len=128, batch_size=32, mask_rate=0.15)
    config.model.name = "BERT"
    config.model.kwargs = dict(num_layers=4, width=256, num_heads=4, layers="unroll")
    config.optimizer.name = "lamb"
    config.optimizer.kwargs = dict(b1=0.9, b2=0.999, eps=1e-6, weight_decay=0.01)
    config.schedule.name = "warmup_linear_schedule"
    config.schedule.kwargs = dict(peak_value=1e-2, warmup=0.1)
    config.train.num_steps = 700
    if arg.tiny:
        config.data.update(seq_len=32, batch_size=8)
        config.data.tokenizer.vocab_size = 512
        config.model.kwargs.update(num_layers=2, width=32, num_heads=2)
        config.train.update(num_steps=20, log_every_steps=1)
        config.eval.update(every_steps=10, batch_size=8, max_rows=16)
        config.checkpoint.every_steps = 10
    return config
