"""Seconds to compile a training step of 24 layers against one of 6, same width.

    python benchmarks/compile_time.py [--rounds=3] [--layers=scan]

Both depths alternate in one run with all caches off, so that whatever else loads the
machine loads both. Prints one JSON object: medians of tracing and compiling, wall and
CPU seconds, and their ratios.
"""

import argparse
import itertools
import json
import statistics
import time

import jax
import optax
from flax import nnx

from dataeff_jax import models

DEPTHS = (6, 24)


def lower_and_compile(num_layers, layers):
    """Wall and CPU seconds of (tracing and lowering, compiling)."""
    model = nnx.eval_shape(
        lambda: models.GPT(
            vocab_size=8192,
            max_length=512,
            num_layers=num_layers,
            width=384,
            num_heads=6,
            layers=layers,
            rngs=nnx.Rngs(0),
        )
    )
    graphdef, params = nnx.split(model)
    params = nnx.to_pure_dict(params)
    tx = optax.adamw(3e-4, mask=models.decay_mask(params))

    def step(params, opt_state, batch):
        def loss(params):
            loss_sum, weight_sum = nnx.merge(graphdef, params).loss(batch)
            return loss_sum / weight_sum

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    tokens = jax.ShapeDtypeStruct((4, 512), "int32")
    batch = {"tokens": tokens, "targets": tokens}
    opt_state = jax.eval_shape(tx.init, params)
    jax.clear_caches()
    clocks = [(time.perf_counter(), time.process_time())]
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, opt_state, batch)
    clocks.append((time.perf_counter(), time.process_time()))
    lowered.compile()
    clocks.append((time.perf_counter(), time.process_time()))
    pairs = itertools.pairwise(clocks)
    return [[b - a for a, b in zip(*pair, strict=True)] for pair in pairs]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", default="scan", choices=("scan", "unroll"))
    options = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    lower_and_compile(2, options.layers)  # imports and first-use costs
    table = {depth: [] for depth in DEPTHS}
    for _ in range(options.rounds):
        for depth in DEPTHS:
            table[depth].append(lower_and_compile(depth, options.layers))
    result = {"layers": options.layers, "rounds": options.rounds}
    total = {}
    for clock, name in enumerate(("wall", "cpu")):
        for depth, runs in table.items():
            trace, build = (
                statistics.median(run[part][clock] for run in runs) for part in (0, 1)
            )
            total[depth, name] = trace + build
            result[f"{depth} layers, {name} seconds"] = {
                "trace": round(trace, 2),
                "compile": round(build, 2),
            }
        ratio = total[DEPTHS[1], name] / total[DEPTHS[0], name]
        result[f"ratio by {name}"] = round(ratio, 3)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
