"""Our whole training loop beside a hand-written one with the same model function.

    python -m benchmarks.training_loop [--rounds=10] [--output=FILE.json]

Ours is what `experiments.train_lm` runs: batches prepared in the background, the
data-parallel step with its optimizer chain, the ledger, the schedule on the host, and a
logged line every ten steps. The other is one jitted function over batches that lie
ready in memory, and logs nothing. They alternate, ten steps each a round. Also
measured: the share of a step that our loop is blocked on the next batch.
"""

import argparse
import contextlib
import datetime
import functools
import json
import os
import pathlib
import platform
import statistics
import tempfile
import time

import jax
import optax
from flax import nnx

from dataeff_jax import models, training
from experiments import builders, command_line, train_lm

STEPS = 10
OVERRIDES = (
    "--config.data.tokenizer.vocab_size=8192",
    "--config.data.batch_size=4",
    "--config.data.seq_len=512",
    "--config.data.segments=row",
    "--config.model.kwargs.num_layers=6",
    "--config.model.kwargs.width=384",
    "--config.model.kwargs.num_heads=6",
    "--config.model.kwargs.positions=learned",
    "--config.mesh.axes.data=1",
    "--config.train.num_steps=100000",
)


def hand_written(run: train_lm.Run):
    """One jitted function and a list of batches."""
    model = builders.model(run.config, vocab_size=run.corpus.vocab_size)
    graphdef, params = nnx.split(model, nnx.Param)
    kwargs = run.config.optimizer.kwargs.to_dict()
    tx = optax.chain(
        optax.clip_by_global_norm(run.config.optimizer.max_grad_norm),
        optax.adamw(1e-3, mask=models.decay_mask(params), **kwargs),
    )

    def loss(params, batch):
        loss_sum, weight_sum = nnx.merge(graphdef, params).loss(batch)
        return loss_sum / weight_sum

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train(params, opt_state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    ready = [run.batches[step] for step in range(STEPS)]
    for batch in ready:
        del batch["sample_id"]
    state = [params, tx.init(params)]

    def steps():
        for batch in ready:
            state[0], state[1], value = train(state[0], state[1], batch)
        jax.block_until_ready(value)

    return steps


def ours(run: train_lm.Run, batches, executables, logger):
    """Ten steps of the loop of `train_lm`, and its line in the log."""

    def steps():
        for _ in range(STEPS):
            run._take_step(batches, executables)
        metrics = run._settle()
        logger.log(run.step, metrics | run.ledger.to_json())

    return steps


def timed(function) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def measure(rounds: int) -> dict:
    """Alternates the two loops; returns medians and the ratio round by round."""
    config = command_line.parse(
        command_line.parser("benchmark"),
        ["--config=configs/gpt_baseline.py", *OVERRIDES],
    ).config
    with (
        tempfile.TemporaryDirectory() as place,
        jax.set_mesh(builders.mesh(config)),
        training.MetricsLogger(place) as logger,
    ):
        run = train_lm.set_up(config, pathlib.Path(place) / "run")
        with (
            contextlib.closing(run._prefetch()) as batches,
            run._executables() as executables,
        ):
            own = ours(run, batches, executables, logger)
            loops = {"hand": hand_written(run), "ours": own}
            for loop in loops.values():
                loop()
            run.data_seconds = 0.0
            seconds = {name: [] for name in loops}
            for _ in range(rounds):
                for name, loop in loops.items():
                    seconds[name].append(timed(loop) / STEPS)
        run.checkpoints.close()
    tokens = config.data.batch_size * config.data.seq_len
    ratios = [h / o for h, o in zip(seconds["hand"], seconds["ours"], strict=True)]
    return {
        "tokens_per_second": {
            name: tokens / statistics.median(values) for name, values in seconds.items()
        },
        "ours_over_hand_written": statistics.median(ratios),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "share_blocked_on_data": run.data_seconds / (STEPS * sum(seconds["ours"])),
        "rounds": rounds,
        "date": str(datetime.date.today()),
        "cores": os.cpu_count(),
        "machine": platform.platform(),
    }


def main() -> None:
    """Parses the flags, measures, and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output", type=pathlib.Path)
    flags = parser.parse_args()
    record = measure(flags.rounds)
    text = json.dumps(record, indent=1)
    print(text)
    if flags.output:
        flags.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
