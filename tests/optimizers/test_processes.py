"""Two processes of four devices train as one process of eight, in every stage."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

# python -c SCRIPT INDEX COUNT PORT prints parameters and whether copies are the same.
SCRIPT = """
import json, sys
import jax
import numpy as np
from dataeff_jax import collectives, distributed, optimizers, testing, training

index, count, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8 // count)
if count > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", count, index)
options = {"axis_name": "data", "compression": collectives.Compression(min_size=0)}
optimizers = {
    "onebit_adam": optimizers.onebit_adam(1e-2, freeze_step=4, **options),
    "onebit_lamb": optimizers.onebit_lamb(1e-2, freeze_step=4, **options),
    "zero_one_adam": optimizers.zero_one_adam(
        1e-2, var_freeze_step=4, var_update_scaler=2, local_step_scaler=2,
        local_step_clipper=4, **options,
    ),
}
found = {}
with jax.set_mesh(distributed.data_mesh()):
    batch = testing.mlp_batch(0)
    rows = 16 // count
    part = {k: v[rows * index : rows * (index + 1)] for k, v in batch.items()}
    part = distributed.shard_batch(part)
    for name, tx in optimizers.items():
        state = training.TrainState.create(testing.mlp_params(), tx)
        step = training.data_parallel_step(testing.mlp_loss, tx)
        for _ in range(12):
            state, _ = step(state, part, jax.random.key(0))
        leaf = state.params["hidden"]["kernel"]
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        found[name] = {
            "same": all((copy == copies[0]).all() for copy in copies),
            "kernel": copies[0].tolist(),
        }
print(json.dumps(found))
"""


def run(count):
    """What each of some processes found."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(i), str(count), str(port)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(count)
    ]
    outputs = [process.communicate(timeout=300) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


@pytest.mark.slow
def test_two_processes_train_as_one():
    [alone], pair = run(1), run(2)
    for name, expected in alone.items():
        for found in pair:
            assert found[name]["same"]
            assert found[name]["kernel"] == pair[0][name]["kernel"]
        # gloo sums the exact means of warm-up and excluded leaves in another order.
        np.testing.assert_allclose(
            pair[0][name]["kernel"], expected["kernel"], atol=1e-5
        )
