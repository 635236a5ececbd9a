"""The small GPT of `gpt_baseline`, deeper, whose middle layers drop random tokens.

    python -m experiments.train_lm --config=configs/gpt_random_ltd.py \\
        --workdir=runs/gpt_random_ltd
    ... --config.random_ltd=None   # its baseline, with the same budget
    ...:tiny                       # 20 steps of a toy model, what the tests run
    ...:paper,budget=150           # the paper's GPT-3 1.3B on 300, 200 or 150 billion

Yao et al., Random-LTD, https://arxiv.org/abs/2211.11586. Budget and learning rate count
layer tokens divided by the number of layers: a token that half of the layers see counts
half, so the run feeds more tokens than its baseline, at about the same cost.
"""

from configs import common, gpt3_1_3b, gpt_baseline


def get_config(arg=None):
    """Returns the configuration; ``arg`` is like ``"tiny,seed=1"``."""
    arg = common.parse_arg(arg, tiny=False, seed=0, paper=False, budget=300)
    if arg.paper:
        return paper(arg)
    return drop_tokens(gpt_baseline.get_config(f"tiny={arg.tiny},seed={arg.seed}"))


def drop_tokens(config):
    """Adds random-LTD to a small config; returns it."""
    full = config.data.seq_len
    # Two layers between the first and the last.
    config.model.kwargs.num_layers = 4
    # From a quarter of the tokens on; all of them after 70% of the baseline's steps.
    block = common.random_ltd(
        kwargs=dict(min_difficulty=full // 4, max_difficulty=full, total=0.7),
        buckets=dict(multiple=full // 4, max_count=4),
    )
    with config.unlocked():
        config.random_ltd = block
    config.train.update(
        num_tokens=config.train.num_steps * config.data.batch_size * full,
        budget_clock="layer_tokens",
    )
    config.schedule.update(clock="layer_tokens", warmup_clock="steps")
    return config


def paper(arg):
    """Returns the recipe of the data-efficiency papers for GPT-3 1.3B.

    Ramps are as long as the budget, and the peak rate is as high as it is short: those
    of https://arxiv.org/abs/2212.03597.
    """
    if arg.budget not in (300, 200, 150):
        raise ValueError(f"budget={arg.budget} is none of 300, 200, 150 (billion)")
    config = gpt3_1_3b.get_config(f"seed={arg.seed}")
    block = common.random_ltd(
        kwargs=dict(
            min_difficulty=128,
            max_difficulty=2048,
            total=200_000 * arg.budget // 300,
        ),
        buckets=dict(multiple=16, max_count=121),
    )
    with config.unlocked():
        config.random_ltd = block
    peak = 2e-4 * 300 / arg.budget
    config.schedule.update(clock="layer_tokens")
    config.schedule.kwargs.update(
        peak_value=peak, warmup=3_000_000_000, final_ratio=1e-6 / peak
    )
    config.train.update(
        num_tokens=arg.budget * 10**9, budget_clock="layer_tokens", max_shapes=128
    )
    return config
