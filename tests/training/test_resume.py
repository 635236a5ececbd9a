"""Checkpoints and logs together: what a killed run leaves, and what a new one makes."""

import jax
import optax
import pytest

from dataeff_jax import distributed, optimizers, schedules, testing, training

TOTAL, SAVE_EVERY, LOG_EVERY = 12, 4, 2
SCHEDULE = schedules.warmup_cosine_schedule(1e-2, warmup=3 * 16, total=TOTAL * 16)
TX = optax.chain(
    optimizers.pmean_grads("data"),
    optimizers.clip_by_global_norm(1.0),
    optimizers.with_learning_rate(optax.adamw),
)
STEP = training.data_parallel_step(testing.mlp_loss, TX)


def train(workdir, *, kill_at=TOTAL, devices=2):
    """A whole training loop, or its beginning."""
    mesh = jax.set_mesh(distributed.data_mesh(devices))
    with mesh, training.Checkpoints(workdir / "checkpoints") as checkpoints:
        state = training.TrainState.create(testing.mlp_params(), TX)
        restored = checkpoints.restore_latest(state)
        first, ledger = None, training.Ledger()
        if restored is not None:
            state, loop = restored
            first, ledger = loop["step"], training.Ledger.from_json(loop["ledger"])
        with training.MetricsLogger(
            workdir, restored_step=first, tensorboard=False
        ) as logger:
            pending = {}
            for done in range((first or 0) + 1, kill_at + 1):
                rate = SCHEDULE(ledger.samples)
                batch = testing.mlp_batch(done, rows=16, weighted=True)
                batch = distributed.shard_batch(batch)
                key = jax.random.key(0)
                state, pending[done] = STEP(state, batch, key, learning_rate=rate)
                ledger = ledger.add(samples=16, tokens=16 * 4)
                if done % LOG_EVERY == 0:
                    values = training.read_pending(pending)
                    training.check_finite(values)
                    pending = {}
                    fields = values[done] | ledger.to_json() | {"learning_rate": rate}
                    logger.log(done, fields)
                if done % SAVE_EVERY == 0:
                    checkpoints.save(done, state, {"ledger": ledger.to_json()})
    return training.read_log(workdir)


@pytest.mark.parametrize("last_save", ["complete", "cut off"])
@pytest.mark.parametrize("kill_at", [1, 4, 7, 10])
def test_the_log_of_a_killed_run_equals_the_unbroken_one(
    tmp_path, unbroken, kill_at, last_save
):
    train(tmp_path, kill_at=kill_at)
    saves = sorted((tmp_path / "checkpoints").iterdir())
    if last_save == "cut off" and saves:
        saves[-1].rename(f"{saves[-1]}.orbax-checkpoint-tmp")
    assert train(tmp_path) == unbroken


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The log of a run that nothing interrupted."""
    return train(tmp_path_factory.mktemp("unbroken"))


def test_a_run_goes_on_with_other_devices(tmp_path, unbroken):
    train(tmp_path, kill_at=5, devices=1)
    resumed = train(tmp_path, devices=8)
    assert [line["step"] for line in resumed] == [line["step"] for line in unbroken]
    losses = [[line["loss"] for line in log] for log in (resumed, unbroken)]
    # Sums in another order, over 12 steps of Adam.
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
