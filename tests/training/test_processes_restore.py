"""A run of two processes, and its checkpoint in one."""

import os
import pathlib
import socket
import subprocess
import sys
import textwrap

import jax
import numpy as np
import optax
import pytest

from dataeff_jax import distributed, optimizers, testing, training

ROOT = pathlib.Path(__file__).resolve().parents[2]

_PROCESS = textwrap.dedent(
    """
    import sys
    import jax, optax
    import numpy as np
    from dataeff_jax import distributed, optimizers, testing, training

    index, port, workdir = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, index)
    tx = optax.chain(optimizers.pmean_grads("data"), optax.adam(1e-2))
    step = training.data_parallel_step(testing.mlp_loss, tx)
    with jax.set_mesh(distributed.data_mesh()):
        state = training.TrainState.create(testing.mlp_params(), tx)
        with training.Checkpoints(workdir + "/checkpoints") as checkpoints:
            for i in range(3):
                batch = testing.mlp_batch(i, weighted=True)
                part = {k: v[8 * index : 8 * index + 8] for k, v in batch.items()}
                part = distributed.shard_batch(part)
                state, metrics = step(state, part, jax.random.key(0))
            checkpoints.save(3, state, {"loss": training.read_metrics(metrics)["loss"]})
            checkpoints.restore_latest(state)
        mixed = {"here": np.ones(2), "everywhere": metrics["loss_sum"]}
        shapes = {k: v.shape for k, v in distributed.to_host(mixed).items()}
        assert shapes == {"here": (2,), "everywhere": (4,)}, shapes
    """
)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """Work directory of a run of two processes with two devices each."""
    path = tmp_path_factory.mktemp("run")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", _PROCESS]
    processes = [
        subprocess.Popen(
            [*command, str(i), str(port), str(path)],
            cwd=ROOT,
            env=os.environ
            | {
                "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output
    return path


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
def test_two_processes_train_as_one_and_their_checkpoint_restores(workdir, devices):
    tx = optax.chain(optimizers.pmean_grads("data"), optax.adam(1e-2))
    step = training.data_parallel_step(testing.mlp_loss, tx)
    with jax.set_mesh(distributed.data_mesh(devices)):
        state = training.TrainState.create(testing.mlp_params(), tx)
        with training.Checkpoints(workdir / "checkpoints", read_only=True) as stored:
            restored, loop = stored.restore_latest(state)
        for i in range(3):
            batch = distributed.shard_batch(testing.mlp_batch(i, weighted=True))
            state, metrics = step(state, batch, jax.random.key(0))
    loss = training.read_metrics(metrics)["loss"]
    # Sums of float32 in another order.
    np.testing.assert_allclose(loop["loss"], loss, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-6),
        jax.device_get(restored.params),
        jax.device_get(state.params),
    )
