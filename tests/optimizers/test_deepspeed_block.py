"""DeepSpeed's optimizer blocks: every key is translated, dropped or named."""

import jax.numpy as jnp
import pytest

from dataeff_jax import optimizers

COMMON = {"lr": 4e-4, "betas": [0.9, 0.99], "eps": 1e-6, "weight_decay": 0.01}
OURS = {
    "learning_rate": 4e-4,
    "b1": 0.9,
    "b2": 0.99,
    "eps": 1e-6,
    "weight_decay": 0.01,
    "bias_correction": "none",
}
LAMB = {
    "max_coeff": 0.3,
    "min_coeff": 0.02,
    "coeff_beta": 0.8,
    "factor_max": 3.0,
    "factor_min": 0.6,
    "factor_threshold": 0.2,
}
TIMES = {
    "var_freeze_step": 12500,
    "var_update_scaler": 8,
    "local_step_scaler": 1000,
    "local_step_clipper": 4,
}
BLOCKS = {
    "OneBitAdam": ("onebit_adam", {"freeze_step": 23000}),
    "OneBitLamb": ("onebit_lamb", {"freeze_step": 1000} | LAMB),
    "ZeroOneAdam": ("zero_one_adam", TIMES),
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_every_key_is_translated(kind):
    name, own = BLOCKS[kind]
    found = optimizers.read_deepspeed_optimizer(
        {"type": kind, "params": COMMON | own}, gradient_clipping=1.0
    )
    assert found.name == name
    assert found.kwargs == OURS | own | {"max_grad_norm": 1.0}
    assert found.dropped == {}
    tx = found.build()
    tx.update({"w": jnp.ones(2)}, tx.init({"w": jnp.ones(2)}), {"w": jnp.ones(2)})


@pytest.mark.parametrize("kind", BLOCKS)
def test_defaults_are_those_of_the_original(kind):
    found = optimizers.read_deepspeed_optimizer({"type": kind})
    times = {"freeze_step", "var_freeze_step"} & found.kwargs.keys()
    assert [found.kwargs[name] for name in times] == [100000]
    assert found.kwargs["learning_rate"] == 1e-3
    if kind == "ZeroOneAdam":
        assert found.kwargs["local_step_scaler"] == 32678


def test_keys_without_meaning_are_dropped_with_a_reason():
    params = {
        "cuda_aware": False,
        "comm_backend_name": "nccl",
        "bias_correction": True,
        "amsgrad": False,
        "eps_inside_sqrt": False,
        "max_grad_norm": 0.0,
    }
    found = optimizers.read_deepspeed_optimizer(
        {"type": "OneBitAdam", "params": params}
    )
    assert found.dropped.keys() == params.keys()
    assert all(found.dropped.values())


def test_all_problems_are_named_at_once():
    params = {
        "lr": "fast",
        "betas": 0.9,
        "amsgrad": True,
        "max_grad_norm": 1.0,
        "freeze_stepp": 5,
        "comm_backend_name": "gloo",
    }
    with pytest.raises(ValueError) as error:
        optimizers.read_deepspeed_optimizer({"type": "OneBitAdam", "params": params})
    for key in params:
        assert f"optimizer.params.{key}" in str(error.value)
    assert "gradient_clipping" in str(error.value)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"type": "Adam"}, "type='Adam'"),
        ({"type": "OneBitAdam", "legacy_fusion": True}, "legacy_fusion"),
        ({"type": "OneBitAdam", "params": 3}, "params=3"),
        ([], "must be an object"),
    ],
)
def test_other_blocks_are_refused(block, message):
    with pytest.raises(ValueError, match=message):
        optimizers.read_deepspeed_optimizer(block)


def test_negative_clipping_is_refused():
    with pytest.raises(ValueError, match="gradient_clipping=-1"):
        optimizers.read_deepspeed_optimizer(
            {"type": "OneBitAdam"}, gradient_clipping=-1.0
        )
