"""The small GPT of `gpt_baseline` with a curriculum: short and common words first.

    python -m experiments.train_lm --config=configs/gpt_curriculum.py \\
        --workdir=runs/gpt_curriculum
    ...:method=seqtru_voc     # or seqtru, seqres, voc, seqres_voc
    ...:tiny                  # 20 steps of a toy model, what the tests run

Li et al., DeepSpeed Data Efficiency, https://arxiv.org/abs/2212.03597. The names are
the paper's: truncated or reshaped sequences (seqtru, seqres), vocabulary rarity (voc),
and both. The run feeds as many tokens as the baseline, its learning rate follows them.
"""

from configs import common, gpt_baseline

METHODS = ("seqtru", "seqres", "voc", "seqtru_voc", "seqres_voc")


def get_config(arg=None):
    """Returns the configuration; ``arg`` is like ``"method=voc,seed=1"``."""
    arg = common.parse_arg(arg, tiny=False, seed=0, method="seqtru_voc")
    if arg.method not in METHODS:
        raise ValueError(f"method={arg.method} is none of {', '.join(METHODS)}")
    config = gpt_baseline.get_config(f"tiny={arg.tiny},seed={arg.seed}")
    kinds = arg.method.split("_")
    full = config.data.seq_len
    block = common.curriculum()
    if "voc" in kinds:
        block.metrics.vocabulary_rarity = common.metric(
            # From the easiest 5% on; all of the data after 40% of the run.
            kwargs=dict(min_difficulty=5, max_difficulty=100, total=0.4)
        )
    if kinds[0] != "voc":
        block.length = common.length(
            {"seqtru": "truncate", "seqres": "reshape"}[kinds[0]],
            kwargs=dict(min_difficulty=full // 4, max_difficulty=full, total=0.4),
            buckets=dict(multiple=full // 4, max_count=4),
        )
    with config.unlocked():
        config.curriculum = block
    # As many tokens as the baseline: short steps leave more of them.
    config.train.num_tokens = (
        config.train.num_steps * config.data.batch_size * config.data.seq_len
    )
    config.schedule.update(clock="tokens", warmup_clock="steps")
    config.eval.compare_with_ngrams = False
    return config
