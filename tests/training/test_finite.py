import math

import jax
import numpy as np
import pytest

from dataeff_jax import distributed, optimizers, testing, training


def test_finite_values_pass():
    training.check_finite({1: {"loss": 2.0, "grad_norm": 0.0}})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_first_bad_step_is_named_with_its_samples(value):
    values = {
        9: {"loss": value},
        8: {"loss": value, "grad_norm": 1.0},
        7: {"loss": 1.0},
    }
    with pytest.raises(FloatingPointError) as info:
        training.check_finite(values, sample_ids=lambda step: np.arange(step, step + 2))
    assert f"loss is {value} at step 8;" in str(info.value)
    assert "[8, 9]" in str(info.value)


def test_a_step_that_overflowed_is_found_at_the_next_log():
    tx = optimizers.clip_by_global_norm(1.0)
    step = training.data_parallel_step(testing.mlp_loss, tx, axis_name=None)
    state = training.TrainState.create(testing.mlp_params(), tx)
    pending = {}
    for i in range(4):
        batch = testing.mlp_batch(i)
        del batch["sample_id"]
        if i == 2:
            batch["targets"][3] = np.inf
        state, pending[i + 1] = step(state, batch, jax.random.key(0))
    with pytest.raises(
        FloatingPointError, match="loss is inf, grad_norm is nan at step 3"
    ):
        training.check_finite(training.read_pending(pending))


def test_pending_metrics_are_those_of_each_step():
    with jax.set_mesh(distributed.data_mesh(8)):
        tx = optimizers.pmean_grads("data")
        step = training.data_parallel_step(testing.mlp_loss, tx)
        state = training.TrainState.create(testing.mlp_params(), tx)
        pending = {}
        for i in range(3):
            batch = distributed.shard_batch(testing.mlp_batch(i, weighted=True))
            state, pending[i] = step(state, batch, jax.random.key(0))
        want = {i: training.read_metrics(metrics) for i, metrics in pending.items()}
        assert training.read_pending(pending) == want
