"""Sequence length warmup on a small GPT: short sequences first, for stability.

    python -m experiments.train_lm --config=configs/gpt_seqlen_warmup.py \\
        --workdir=runs/gpt_seqlen_warmup
    ...:tiny      # 20 steps of a toy model, what the tests run

Li et al., The Stability-Efficiency Dilemma, https://arxiv.org/abs/2108.06084, and its
companion rules: the run ends by tokens, the rate decays by tokens, but warms up in
steps; the length starts at 8 and grows linearly; the batch size stays.
"""

from configs import common, gpt_baseline


def get_config(arg=None):
    """Returns the configuration; ``arg`` is like ``"tiny,seed=1"``."""
    arg = common.parse_arg(arg, tiny=False, seed=0)
    config = gpt_baseline.get_config(f"tiny={arg.tiny},seed={arg.seed}")
    full = config.data.seq_len
    with config.unlocked():
        config.curriculum = common.curriculum(
            length=common.length(
                "truncate",
                # Full length after the steps in which the baseline takes 30% of its.
                kwargs=dict(min_difficulty=8, max_difficulty=full, total=0.3),
                buckets=dict(multiple=8, max_count=8),
            )
        )
    config.train.num_tokens = (
        config.train.num_steps * config.data.batch_size * config.data.seq_len
    )
    config.schedule.update(clock="tokens", warmup_clock="steps")
    return config
