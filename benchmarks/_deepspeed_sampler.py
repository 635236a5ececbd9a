"""DeepSpeed's sampler, timed on request; run by `sampler.py` as a child.

Reads one JSON line at a time from standard input and answers with one. The first names
the folder with the values of all samples, the others ask for a run.
"""

import json
import logging
import os
import pathlib
import sys
import tempfile
import time

import numpy as np


def write_index(values, prefix):
    """Writes what DeepSpeed's analyzer would: values, and the samples of each."""
    from deepspeed.runtime.data_pipeline.data_sampling import utils

    order = np.argsort(values, kind="stable").astype(np.int64)
    distinct, counts = np.unique(values, return_counts=True)
    for kind, rows in (
        ("to_metric", distinct[:, None].astype(np.int64)),
        ("to_sample", np.split(order, np.cumsum(counts)[:-1])),
    ):
        builder = utils.create_mmap_dataset_builder(f"{prefix}_{kind}", np.int64)
        for row in rows:
            builder.add_item_numpy(row)
        utils.close_mmap_dataset_builder(builder, f"{prefix}_{kind}")


def make_sampler(folder, metrics, *, num_samples, batch_size, clusters):
    from deepspeed import comm
    from deepspeed.runtime.data_pipeline.data_sampling import data_sampler

    blocks = {
        name: {
            "index_to_sample_path": str(folder / f"{name}_to_sample"),
            "index_to_metric_path": str(folder / f"{name}_to_metric"),
            "difficulty_type": metric["difficulty_type"],
            "clustering_type": "schedule_based",
            "min_difficulty": metric["min_difficulty"],
            "max_difficulty": metric["max_difficulty"],
            "schedule_type": "fixed_root",
            "schedule_config": {
                "total_curriculum_step": metric["total"],
                "difficulty_step": 1,
                "root_degree": 2,
            },
        }
        for name, metric in metrics.items()
    }
    learning = {
        "enabled": True,
        "data_cluster_path": clusters,
        "curriculum_metrics": blocks,
    }
    config = {
        "seed": 0,
        "data_sampling": {"num_epochs": 10**6, "curriculum_learning": learning},
    }
    return data_sampler.DeepSpeedDataSampler(
        config, num_samples, batch_size, 0, 1, comm.get_world_group(), 1, 0
    )


def clocks():
    return np.array([time.perf_counter(), time.process_time()])


def run(folder, request, *, num_samples):
    """Seconds by the wall and the CPU clock: first batch, each other one, the rest."""
    with tempfile.TemporaryDirectory() as clusters:
        began = clocks()
        sampler = make_sampler(
            folder,
            request["metrics"],
            num_samples=num_samples,
            batch_size=request["batch_size"],
            clusters=clusters,
        )
        batches = iter(sampler)
        next(batches)
        first, others = clocks() - began, []
        for _ in range(request["num_ramp"] - 1):
            began = clocks()
            next(batches)
            others.append((clocks() - began).tolist())
        began = clocks()
        for _ in range(request["num_steady"]):
            next(batches)
        steady = (clocks() - began) / request["num_steady"]
    return {"first": first.tolist(), "ramp": others, "steady": steady.tolist()}


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # where the library prints a lot
    import deepspeed
    from deepspeed import comm
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for long
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    comm.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    folder = pathlib.Path(json.loads(sys.stdin.readline())["folder"])
    num_samples = 0
    for path in sorted(folder.glob("*.npy")):
        values = np.load(path)
        num_samples = len(values)
        write_index(values, folder / path.stem)

    def answer(message):
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    answer({"version": deepspeed.__version__})
    for line in sys.stdin:
        answer(run(folder, json.loads(line), num_samples=num_samples))


if __name__ == "__main__":
    main()
