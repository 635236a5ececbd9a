"""The small BERT of `bert_baseline` with a curriculum.

    python -m experiments.train_lm --config=configs/bert_curriculum.py \\
        --workdir=runs/bert_curriculum
    ...:method=seqtru_voc     # or seqtru, seqreo, voc, seqreo_voc
    ...:tiny                  # 20 steps of a toy model, what the tests run

Li et al., DeepSpeed Data Efficiency, https://arxiv.org/abs/2212.03597. The names are
the paper's: truncated sequences (seqtru), rows of one text each, short texts first
(seqreo), vocabulary rarity (voc), and their products. Reordered batches are cut to
their longest row, so short texts cost less.
"""

from configs import bert_baseline, common

METHODS = ("seqtru", "seqreo", "voc", "seqtru_voc", "seqreo_voc")


def get_config(arg=None):
    """Returns the configuration; ``arg`` is like ``"method=voc,seed=1"``."""
    arg = common.parse_arg(arg, tiny=False, seed=0, method="seqtru_voc")
    if arg.method not in METHODS:
        raise ValueError(f"method={arg.method} is none of {', '.join(METHODS)}")
    config = bert_baseline.get_config(f"tiny={arg.tiny},seed={arg.seed}")
    full = config.data.seq_len
    block = common.curriculum()
    pacing = common.metric(
        kwargs=dict(min_difficulty=5, max_difficulty=100, total=0.48)
    )
    if arg.method in ("voc", "seqtru_voc"):
        block.metrics.vocabulary_rarity = pacing
    if arg.method == "seqreo":
        block.metrics.sequence_length = pacing
    if arg.method == "seqreo_voc":
        block.metrics.sequence_length_vocabulary_rarity = pacing
    if arg.method in ("seqtru", "seqtru_voc"):
        block.length = common.length(
            "truncate",
            kwargs=dict(min_difficulty=full // 4, max_difficulty=full, total=0.48),
            buckets=dict(multiple=full // 4, max_count=4),
        )
    if arg.method in ("seqreo", "seqreo_voc"):
        config.data.packed = False
        block.length = common.length(
            "trim", schedule="", buckets=dict(multiple=full // 4, max_count=4)
        )
    with config.unlocked():
        config.curriculum = block
    if arg.method not in ("seqreo", "seqreo_voc"):
        # As many tokens as the baseline: short steps leave more of them.
        config.train.num_tokens = (
            config.train.num_steps * config.data.batch_size * config.data.seq_len
        )
    config.schedule.update(clock="tokens", warmup_clock="steps")
    return config
