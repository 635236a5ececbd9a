"""DeepSpeed's older length warmup and its batches by tokens."""

import json
import pathlib

import numpy as np
import pytest

from dataeff_jax import curriculum

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"
SCHEDULES = json.loads((GOLDEN / "curriculum_scheduler.json").read_text())["cases"]

LEGACY = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 8,
    "max_difficulty": 64,
    "schedule_type": "fixed_root",
    "schedule_config": {
        "total_curriculum_step": 100,
        "difficulty_step": 8,
        "root_degree": 2,
    },
}


def read(block=LEGACY, **kw):
    config = {"train_batch_size": 8, "curriculum_learning": block}
    return curriculum.read_deepspeed_length_schedule(config, **kw)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_the_recorded_ones(name, tmp_path):
    case = SCHEDULES[name]
    block = {**case["config"], "enabled": True, "curriculum_type": "seqlen"}
    path = tmp_path / "ds config.json"
    path.write_text(json.dumps({"curriculum_learning": block}))
    pacing = curriculum.read_deepspeed_length_schedule(path)
    rows = zip(case["steps"], case["get_difficulty"], strict=True)
    assert [pacing(step) for step, _ in rows] == case["get_difficulty"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_lengths_of_a_run_are_those_of_the_originals_engine(name):
    case = SCHEDULES[name]
    block = {**case["config"], "enabled": True, "curriculum_type": "seqlen"}
    pacing = read(block)
    if not float(pacing.min_difficulty).is_integer() or pacing.min_difficulty < 1:
        return  # no length
    lengths = curriculum.LengthCurriculum(pacing)
    for step, want in zip(case["steps"], case["update_difficulty"], strict=True):
        if want is not None:  # its first step is 1, our step 0
            assert lengths.length_at(step - 1) == want


def test_a_custom_schedule_is_the_users_function():
    block = {k: v for k, v in LEGACY.items() if k != "schedule_config"}
    block["schedule_type"] = "custom"
    pacing = read(block, custom_schedule=lambda step: 8 * step)
    assert [pacing(t) for t in (1, 5, 8, 9)] == [8, 40, 64, 64]
    with pytest.raises(ValueError, match="schedule_type=custom needs custom_schedule"):
        read(block)
    with pytest.raises(ValueError, match="not used with schedule_type=fixed_root"):
        read(custom_schedule=lambda step: step)


@pytest.mark.parametrize("key", [key for key in LEGACY if key != "enabled"])
def test_every_key_is_needed(key):
    with pytest.raises(ValueError, match=rf"curriculum_learning\.{key}\S* is missing"):
        read({k: v for k, v in LEGACY.items() if k != key})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"enabled": False}, "enabled must be true"),
        ({"curriculum_type": "voc"}, "curriculum_type='voc' must be one of seqlen"),
        ({"schedule_type": "linear"}, "must be one of fixed_linear, fixed_root"),
        ({"colour": 1}, "curriculum_learning.colour is no key that is known here"),
        ({"schedule_config": {}}, "schedule_config.total_curriculum_step is missing"),
        (
            {"schedule_config": {**LEGACY["schedule_config"], "max_step": [3]}},
            "schedule_config.max_step is no key",
        ),
        ({"max_difficulty": 1}, "makes no schedule: max_difficulty=1"),
        ({"enabled": False, "colour": 1}, "2 problems: .*enabled.*colour"),
    ],
)
def test_what_is_wrong_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        read({**LEGACY, **change})


def test_a_configuration_without_the_block_is_told():
    with pytest.raises(ValueError, match="has no curriculum_learning; it has: zero"):
        curriculum.read_deepspeed_length_schedule({"zero": 1})


# Batches by tokens


def read_budget(**block):
    sampling = {"dynamic_batching": {"enabled": True, "max_tokens": 64, **block}}
    return curriculum.read_deepspeed_token_budget(
        {"data_efficiency": {"seed": 7, "data_sampling": sampling}}
    )


def test_all_keys_of_batches_by_tokens_are_translated():
    found = read_budget(
        lr_scaling_method="none",
        min_batch_size=2,
        max_batch_size=5,
        sequence_picking_order="random",
        metrics_path="metrics/seqlen",
        verbose=True,
    )
    assert found.settings == {
        "max_tokens": 64,
        "order": "random",
        "seed": 7,
        "min_rows": 2,
        "max_rows": 5,
        "too_long": "drop",
    }
    assert found.learning_rate_scaling == "none"
    assert found.metrics_path == "metrics/seqlen"
    lengths = np.arange(1, 33)
    budget = curriculum.TokenBudget(lengths, buckets=(16, 32), **found.settings)
    assert budget.shapes == ((4, 16), (2, 32))


def test_defaults_of_batches_by_tokens_are_those_of_the_original():
    found = read_budget()
    assert found.learning_rate_scaling == "linear"
    assert found.metrics_path is None
    assert found.settings["order"] == "dataloader"
    assert found.settings["min_rows"] == 1
    assert found.settings["max_rows"] is None


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"enabled": False}, "dynamic_batching.enabled must be true"),
        ({"max_tokens": "64"}, "max_tokens='64' must be of type int"),
        ({"lr_scaling_method": "cubic"}, "must be one of linear, sqrt, none"),
        ({"sequence_picking_order": "length"}, "one of dataloader, random, seqlen"),
        # The name in the original's own documentation, which its code does not read.
        ({"sentence_picking_order": "seqlen"}, "sentence_picking_order is no key"),
        ({"min_batch_size": 1.5, "x": 1}, "2 problems: .*min_batch_size=1.5.*x is no"),
    ],
)
def test_what_is_wrong_with_batches_by_tokens_is_named(block, message):
    with pytest.raises(ValueError, match=message):
        read_budget(**block)
