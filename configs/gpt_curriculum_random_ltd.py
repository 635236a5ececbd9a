"""The curriculum of `gpt_curriculum` and the token dropping of `gpt_random_ltd`.

    python -m experiments.train_lm --config=configs/gpt_curriculum_random_ltd.py \\
        --workdir=runs/gpt_composed
    ...:method=seqtru_voc     # or seqtru, seqres, voc, seqres_voc
    ...:tiny                  # 20 steps of a toy model, what the tests run
    ...:paper,budget=150      # the paper's GPT-3 1.3B on 300, 200 or 150 billion

Li et al., DeepSpeed Data Efficiency, https://arxiv.org/abs/2212.03597. The curriculum
decides the length of a step's rows, then layers drop tokens where they are to keep
fewer than that.
"""

from configs import common, gpt_curriculum, gpt_random_ltd


def get_config(arg=None):
    """Returns the configuration; ``arg`` is like ``"method=voc,seed=1"``."""
    arg = common.parse_arg(
        arg, tiny=False, seed=0, method="seqtru_voc", paper=False, budget=300
    )
    if arg.paper:
        return paper(arg)
    return gpt_random_ltd.drop_tokens(
        gpt_curriculum.get_config(
            f"tiny={arg.tiny},seed={arg.seed},method={arg.method}"
        )
    )


def paper(arg):
    """Returns the composed recipe of the paper for GPT-3 1.3B."""
    config = gpt_random_ltd.paper(arg)
    total = 110_000 * arg.budget // 300
    block = common.curriculum()
    block.metrics.vocabulary_rarity = common.metric(
        kwargs=dict(min_difficulty=1, max_difficulty=100, total=total)
    )
    block.length = common.length(
        kwargs=dict(min_difficulty=80, max_difficulty=2048, total=total),
        buckets=dict(multiple=8, max_count=247),
    )
    with config.unlocked():
        config.curriculum = block
    config.train.max_shapes = 400  # each length meets few numbers of kept tokens
    return config
