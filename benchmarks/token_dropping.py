"""Share of the operations saved by random-LTD that is saved in seconds, eta, on a CPU.

    python benchmarks/token_dropping.py [--width=512] [--rounds=10] [--layers=unroll]

The whole training step, AdamW included, of a GPT whose middle layers keep all, half and
a quarter of the tokens. The three programs alternate, so that whatever else loads the
machine loads all. eta = (1 - seconds / seconds of the plain step) / (1 - operations /
operations of the plain step), operations by `GPT.train_flops`; compilation is apart.
Prints one JSON object, with eta by wall and by CPU seconds, medians over the rounds.
"""

import argparse
import json
import os
import statistics
import sys
import time

from benchmarks.train_step import MALLOC


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--num-layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--layers", default="unroll", choices=("scan", "unroll"))
    parser.add_argument("--remat", default=None, choices=("block",))
    return parser.parse_args()


def make_steps(options):
    """The model, and by kept tokens a call that runs one step to its end."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    from dataeff_jax import models, optimizers, token_dropping, training

    model = models.GPT(
        vocab_size=options.vocab_size,
        max_length=options.length,
        num_layers=options.num_layers,
        width=options.width,
        num_heads=options.width // 64,
        layers=options.layers,
        remat=options.remat,
        rngs=nnx.Rngs(0),
    )
    shape = (options.batch_size, options.length + 1)
    tokens = np.random.default_rng(0).integers(0, options.vocab_size, shape, np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    tx = optimizers.with_learning_rate(optax.adamw, weight_decay=0.1)
    rate = {"learning_rate": np.float32(1e-4)}

    def make(num_kept):
        dropping = token_dropping.with_random_ltd(model, num_kept=num_kept)
        graphdef, params = nnx.split(dropping, nnx.Param)
        step_fn = training.data_parallel_step(
            lambda params, batch, keys: nnx.merge(graphdef, params).loss(
                batch, keys=keys
            ),
            tx,
            axis_name=None,
        )
        state = training.TrainState.create(jax.tree.map(jnp.copy, params), tx)
        began = time.perf_counter()
        key = jax.random.key(0)
        step_fn = step_fn.lower(state, batch, key, **rate).compile()
        compile_seconds = time.perf_counter() - began

        def run():
            nonlocal state
            state, metrics = step_fn(state, batch, key, **rate)
            jax.block_until_ready((state, metrics))

        return run, compile_seconds

    kept = [options.length, options.length // 2, options.length // 4]
    return model, {k: make(k) for k in kept}


def main():
    if os.environ.get("GLIBC_TUNABLES") != MALLOC:  # glibc reads it at the start
        os.environ["GLIBC_TUNABLES"] = MALLOC
        command = [sys.executable, "-m", "benchmarks.token_dropping", *sys.argv[1:]]
        os.execv(sys.executable, command)
    options = parse_arguments()
    model, steps = make_steps(options)
    clocks = {"wall": time.perf_counter, "cpu": time.process_time}
    seconds = {name: {k: [] for k in steps} for name in clocks}
    for round_number in range(options.rounds + 1):
        for kept, (run, _) in steps.items():
            before = {name: clock() for name, clock in clocks.items()}
            run()
            if round_number:  # the first warms up
                for name, clock in clocks.items():
                    seconds[name][kept].append(clock() - before[name])
    result = {**vars(options), "kept": {}}
    full, *dropping = steps
    for kept, (_, compile_seconds) in steps.items():
        result["kept"][kept] = entry = {"compile_seconds": round(compile_seconds, 2)}
        for name, table in seconds.items():
            entry[f"{name}_ms"] = round(1e3 * statistics.median(table[kept]), 1)
        if kept in dropping:
            flops = model.train_flops(full, num_kept=kept) / model.train_flops(full)
            entry["theory"] = round(1 - flops, 4)
            for name, table in seconds.items():
                pairs = zip(table[kept], table[full], strict=True)
                saved = 1 - statistics.median(a / b for a, b in pairs)
                entry[f"eta_{name}"] = round(saved / (1 - flops), 3)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
