"""Every optimizer of the library answers the same questions."""

import jax
import numpy as np
import optax
import pytest

from dataeff_jax import collectives, optimizers, testing

SMALL = collectives.Compression(min_size=0)
BLOCKS = collectives.Compression(min_size=0, norm="l1", segment=8, bucket_bytes=1)

OPTIMIZERS = {
    "adam": lambda axis, rate: optax.chain(
        optimizers.pmean_grads(axis), optax.adam(rate)
    ),
    "lamb": lambda axis, rate: optax.chain(
        optimizers.pmean_grads(axis), optimizers.lamb(rate)
    ),
    "onebit_adam": lambda axis, rate: optimizers.onebit_adam(
        rate, freeze_step=5, axis_name=axis, compression=SMALL, weight_decay=1e-3
    ),
    "onebit_adam_blocks": lambda axis, rate: optimizers.onebit_adam(
        rate, freeze_step=5, axis_name=axis, compression=BLOCKS, max_grad_norm=1.0
    ),
    "onebit_lamb": lambda axis, rate: optimizers.onebit_lamb(
        rate, freeze_step=5, axis_name=axis, compression=SMALL, weight_decay=1e-3
    ),
    "zero_one_adam": lambda axis, rate: optimizers.zero_one_adam(
        rate,
        var_freeze_step=6,
        var_update_scaler=2,
        local_step_scaler=2,
        local_step_clipper=4,
        axis_name=axis,
        compression=SMALL,
        weight_decay=1e-3,
    ),
}
ALL = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


@ALL
@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_it_trains_in_one_program_with_the_same_types(make, num_devices):
    testing.check_trains(make, num_devices=num_devices)


@ALL
def test_it_keeps_bfloat16_parameters(make):
    testing.check_keeps_dtype(make, num_devices=2)


@ALL
def test_the_rate_may_be_a_number_a_schedule_or_injected(make):
    testing.check_takes_any_rate(make, num_devices=2)


@ALL
def test_micro_batches_count_as_one_step(make):
    testing.check_accumulates(make, num_devices=2)


@ALL
@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_run_resumed_in_any_stage_equals_the_unbroken_one(
    make, tmp_path, num_devices
):
    testing.check_resumes(make, tmp_path, num_devices=num_devices)


DECAYING = {
    "onebit_adam": {"freeze_step": 3},
    "onebit_lamb": {"freeze_step": 3},
    "zero_one_adam": {"var_freeze_step": 3, "local_step_scaler": 2},
}


@pytest.mark.parametrize("name", DECAYING)
def test_a_decay_mask_may_be_a_prefix_of_the_tree(name):
    full = {k: dict.fromkeys(("kernel", "bias"), k == "output") for k in PREFIX}

    def trained(mask):
        tx = getattr(optimizers, name)(
            0.01,
            axis_name="data",
            compression=SMALL,
            weight_decay=0.5,
            mask=mask,
            **DECAYING[name],
        )
        return testing.train(tx, num_devices=2, num_steps=8)[0].params

    prefix, whole, everywhere = map(trained, (PREFIX, full, None))
    jax.tree.map(np.testing.assert_array_equal, prefix, whole)
    decayed, kept = prefix["output"]["kernel"], prefix["hidden"]["kernel"]
    assert (kept != everywhere["hidden"]["kernel"]).any()
    assert np.isfinite(decayed).all()


PREFIX = {"hidden": False, "output": True}
