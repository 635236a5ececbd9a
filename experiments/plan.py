"""What a config's training step would need on GPUs that nobody has rented yet.

    python -m experiments.plan --config=configs/gpt3_1_3b.py --hosts=8 \\
        --devices_per_host=8 [--output=plan.json]

Compiles the step for that many H200s and says the memory of each, what is sent between
them, and the work: that of full rows of which no token is dropped. Nothing is executed
and no GPU is needed, only the extra `plan`. Attention is compiled in its blocked form,
because cuDNN cannot be compiled for without a GPU; on the real machine causal attention
without segments takes cuDNN.
"""

import argparse
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from dataeff_jax import aot, collectives, training
from experiments import builders, command_line


class Step(NamedTuple):
    """A training step and what it is called with, none of it in memory."""

    function: Any  # jitted
    args: tuple[Any, ...]  # trees of jax.ShapeDtypeStruct with shardings
    kwargs: dict[str, Any]
    num_parameters: int
    flops: int  # of a whole step, over all devices


def plan(
    build: Callable[[jax.sharding.Mesh], Step], *, hosts: int, devices_per_host: int
) -> dict[str, Any]:
    """Compiles a step for described H200s and collects what it needs.

    Args:
        build: makes the step for a mesh whose one axis is "data".
        hosts: number of machines.
        devices_per_host: H200s in each.

    Returns:
        Plain values, as they are written to JSON.
    """
    devices = aot.h200_devices(hosts, devices_per_host=devices_per_host)
    mesh = jax.make_mesh((len(devices),), ("data",), devices=devices)
    started = time.monotonic()
    with jax.set_mesh(mesh):
        step = build(mesh)
        found = aot.compile_for(step.function, *step.args, **step.kwargs)
    return {
        "device": devices[0].device_kind,
        "hosts": hosts,
        "devices_per_host": devices_per_host,
        "parameters": step.num_parameters,
        "flops_per_step": step.flops,
        "memory_bytes_per_device": found.memory._asdict(),
        "memory_limit_bytes": aot.H200_BYTES,
        "fits": found.memory.total <= aot.H200_BYTES,
        "collectives": [item._asdict() for item in found.collectives],
        "wire_bytes_per_device": collectives.collective_bytes(found.collectives),
        "kernels": [item._asdict() for item in found.kernels],
        "compile_seconds": round(time.monotonic() - started, 1),
        "jax": jax.__version__,
    }


def build_step(config, mesh: jax.sharding.Mesh) -> Step:
    """The training step of a config, as `train_lm` would run it, with abstract arrays.

    Args:
        config: the configuration; its corpus is not read, so the vocabulary has the
            size that `data.tokenizer` names.
        mesh: mesh over the axis "data".
    """
    vocab_size = _vocab_size(config)
    block = config.model.kwargs
    with config.unlocked():
        block.implementation = block.get("implementation") or "blocked"
    model = nnx.eval_shape(lambda: builders.model(config, vocab_size=vocab_size))
    graphdef, params = nnx.split(model)
    tx = builders.optimizer(config, params)

    def loss_fn(params, batch, keys):
        return nnx.merge(graphdef, params).loss(batch, keys=keys)

    step = training.data_parallel_step(
        loss_fn, tx, accumulation_steps=config.optimizer.accumulation_steps
    )
    state = jax.eval_shape(
        lambda params: training.TrainState.create(params, tx), params
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    rate = jax.ShapeDtypeStruct((), jnp.float32)
    sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(params)]
    return Step(
        step,
        (
            _placed(state, mesh, jax.P()),
            _placed(_batch(config), mesh, jax.P("data")),
            _placed(key, mesh, jax.P()),
        ),
        {"learning_rate": _placed(rate, mesh, jax.P())},
        num_parameters=sum(sizes),
        flops=model.train_flops(config.data.seq_len) * config.data.batch_size,
    )


def table(report: dict[str, Any]) -> str:
    """The report for people to read."""
    memory = report["memory_bytes_per_device"]
    count = report["hosts"] * report["devices_per_host"]
    share = memory["total"] / report["memory_limit_bytes"]
    lines = [
        f"{count} x {report['device']} ({report['hosts']} hosts), nothing executed",
        f"parameters          {report['parameters']:>14,}",
        f"FLOPs a step        {report['flops_per_step']:>14.4g}",
        "",
        "memory of a device             GB",
        *(f"  {name:<18} {memory[name] / 1e9:>12.2f}" for name in memory),
        f"  {share:.0%} of {report['memory_limit_bytes'] / 1e9:.0f} GB: "
        + ("fits" if report["fits"] else "DOES NOT FIT"),
        "",
        f"{'collective':<20} {'dtype':<9} {'group':>5} {'times':>5} {'MB sent':>10}",
        *(_line(item) for item in report["collectives"]),
        f"{'sum a step':<41} {report['wire_bytes_per_device'] / 1e6:>10.3f}",
    ]
    lines += [
        f"kernel {kernel['name']}: {kernel['registers']} registers, "
        f"{kernel['spill_bytes']} bytes spilled"
        for kernel in report["kernels"]
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = command_line.parser(__doc__ or "")
    parser.add_argument("--hosts", type=_positive, default=1, help="machines")
    parser.add_argument(
        "--devices_per_host", type=_positive, default=8, help="GPUs each"
    )
    parser.add_argument("--output", type=pathlib.Path, help="write the report as JSON")
    flags = command_line.parse(parser, argv)
    # The plugin looks for CUDA's libraries unless the CPU alone is asked for.
    jax.config.update("jax_platforms", "cpu")
    try:
        report = plan(
            lambda mesh: build_step(flags.config, mesh),
            hosts=flags.hosts,
            devices_per_host=flags.devices_per_host,
        )
    except (ModuleNotFoundError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    print(table(report))
    if flags.output:
        flags.output.parent.mkdir(parents=True, exist_ok=True)
        flags.output.write_text(json.dumps(report, indent=2) + "\n")


def _vocab_size(config) -> int:
    tokenizer = config.data.tokenizer
    size = 257 if tokenizer.name == "bytes" else tokenizer.vocab_size
    return size + (1 if config.data.mask_rate else 0)


def _batch(config) -> dict[str, jax.ShapeDtypeStruct]:
    shape = (config.data.batch_size, config.data.seq_len)
    names = ["tokens", "targets"]
    if config.data.segments == "document":
        names += ["segment_ids", "positions"]
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in names}
    if config.data.mask_rate:
        batch["weights"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    return batch


def _placed(tree, mesh: jax.sharding.Mesh, spec: jax.P):
    """The leaves with a place on the mesh; those that have one keep its spec."""

    def place(leaf):
        own = getattr(leaf.sharding, "spec", None)
        sharding = jax.NamedSharding(mesh, own or spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, tree)


def _line(item: dict[str, Any]) -> str:
    times = "loop" if item["times"] is None else str(item["times"])
    sent = item["wire_bytes"] * (item["times"] or 1) / 1e6
    where = "  (in a branch)" if item["conditional"] else ""
    return (
        f"{item['op']:<20} {item['dtype']:<9} {item['group_size']:>5} {times:>5} "
        f"{sent:>10.3f}{where}"
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


if __name__ == "__main__":
    main()
