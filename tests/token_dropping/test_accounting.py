"""Layer tokens: published counters, and the published recipes run again on paper."""

import numpy as np
import pytest

from dataeff_jax import models, schedules, token_dropping

FULL, BATCH, LAYERS, WIDTH, VOCABULARY = 2048, 512, 24, 2048, 50257


def pacing(low, high, total, step, mode="deepspeed_random_ltd"):
    return schedules.fixed_linear_schedule(
        low, max_difficulty=high, total=total, difficulty_step=step, mode=mode
    )


def test_the_counter_of_the_vision_recipe():
    kept = np.minimum(pacing(32, 197, 3910, 8)(np.arange(5474)), 197)
    counted = token_dropping.deepspeed_layer_tokens(
        kept.astype(np.int64), batch_size=32, full_length=197, num_layers=12
    )
    assert counted.sum() == 305_784_192


@pytest.mark.parametrize(
    ("layers", "micro_steps", "expected"),
    [(12, 1344, 2_148_032), (24, 1373, 2_147_024)],
)
def test_the_consumed_tokens_of_the_fine_tuning_recipes(layers, micro_steps, expected):
    # Two micro-batches of two rows a step; the schedule moves once a step.
    kept = pacing(128, 1024, 400, 8)(np.arange(micro_steps) // 2)
    tokens = token_dropping.effective_tokens(1024, num_kept=kept, num_layers=layers)
    assert 2 * tokens.sum() == expected


@pytest.mark.parametrize("kept", [None, 0, 1, 63, 64, 65, 128, 500])
@pytest.mark.parametrize("dropping", [0, 4, 6])
def test_layer_tokens_are_those_of_a_loop_over_layers(kept, dropping):
    seen = 0
    for layer in range(6):
        drops = layer < dropping and kept is not None
        seen += min(kept, 128) if drops else 128
    arguments = {"num_kept": kept, "num_layers": 6, "num_dropping": dropping}
    assert token_dropping.layer_tokens(128, **arguments) == seen
    assert token_dropping.effective_tokens(128, **arguments) == seen // 6


def test_counts_are_exact_beyond_64_bits():
    count = token_dropping.layer_tokens(2**70, num_kept=2**69, num_layers=3)
    assert count == 2 * 2**70 + 2**69


def test_more_dropping_layers_than_layers_are_refused():
    with pytest.raises(ValueError, match="num_dropping=7"):
        token_dropping.layer_tokens(8, num_kept=4, num_layers=6, num_dropping=7)


def block_flops(tokens):
    return 24 * tokens * WIDTH**2 + 2 * tokens**2 * WIDTH


def run_recipe(budget, curriculum_steps=None, dropping_steps=None):
    """A GPT-3 1.3B run that ends with its budget of layer tokens.

    Returns steps, tokens fed to the first layer, tokens drawn, and operations.
    """
    step = np.arange(400_000)
    length = np.full(len(step), FULL, np.int64)
    kept = length
    if curriculum_steps:
        # The curriculum counts its steps from 1, dropping from 0.
        length = pacing(80, FULL, curriculum_steps, 8, "deepspeed")(step + 1)
        length = np.minimum(length, FULL).astype(np.int64)
    if dropping_steps:
        kept = np.minimum(pacing(128, FULL, dropping_steps, 16)(step), FULL)
        kept = kept.astype(np.int64)
    tokens = token_dropping.effective_tokens(length, num_kept=kept, num_layers=LAYERS)
    steps = int(np.searchsorted(np.cumsum(BATCH * tokens), budget)) + 1
    length, kept = length[:steps], np.minimum(kept, length)[:steps]
    per_row = 2 * block_flops(length) + (LAYERS - 2) * block_flops(kept)
    per_row = per_row + 2 * length * WIDTH * VOCABULARY
    flops = 3 * BATCH * per_row.astype(float).sum()
    return steps, BATCH * int(length.sum()), BATCH * FULL * steps, flops


RECIPES = {
    "baseline 300B": ((300e9,), (286_103, 300, 300, 1.000)),
    "curriculum 300B": ((300e9, 110_000), (339_169, 300, 356, 0.995)),
    "random-LTD 300B": ((300e9, None, 200_000), (372_789, 391, 391, 1.014)),
    "both 300B": ((300e9, 110_000, 200_000), (377_264, 340, 396, 1.001)),
    "both 150B": ((150e9, 55_000, 100_000), (188_632, 170, 198, 0.501)),
    "random-LTD 150B": ((150e9, None, 100_000), (186_395, 195, 195, 0.507)),
}


@pytest.mark.parametrize("name", RECIPES)
def test_the_published_recipes_take_the_steps_and_operations_of_the_table(name):
    recipe, (want_steps, want_fed, want_drawn, want_flops) = RECIPES[name]
    steps, fed, drawn, flops = run_recipe(*recipe)
    assert abs(steps / want_steps - 1) < 1e-3
    assert round(fed / 1e9) == want_fed
    assert round(drawn / 1e9) == want_drawn
    assert abs(flops / run_recipe(300e9)[3] - want_flops) < 0.005


@pytest.mark.parametrize(("length", "kept"), [(2048, 128), (80, 128), (1024, 512)])
def test_the_operations_of_the_table_are_those_of_the_models(length, kept):
    per_layer = [block_flops(length)] * 2 + [block_flops(min(kept, length))] * 22
    formula = models._flops.stack_flops(
        length,
        num_layers=LAYERS,
        num_kept=kept,
        width=WIDTH,
        ffw_width=4 * WIDTH,
        causal=True,
    )
    assert formula == sum(per_layer)
