"""Tokens per second of a training step on CPU, beside the same model in PyTorch.

    python benchmarks/train_step.py --torch-python=PATH/bin/python [--rounds=10]

Ours and PyTorch's steps alternate in one run (PyTorch in a child process, fed through
a pipe), so that whatever else loads the machine loads both. Prints one JSON object:
medians in milliseconds, tokens per second, the median of the rounds' ratios, and pieces
(forward and backward of the matmuls, attention and head, and the optimizer's update).
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time

MODEL = {
    "vocab_size": 8192,
    "max_length": 512,
    "num_layers": 6,
    "width": 384,
    "num_heads": 6,
}
BATCH_SIZE = 4
# A step allocates the same large buffers again and again. By default glibc returns them
# to the system each time, and the page faults cost 10-15% of the step.
MALLOC = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:"
    "glibc.malloc.trim_threshold=68719476736:glibc.malloc.top_pad=268435456:"
    "glibc.malloc.arena_max=1"
)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--torch-python", help="a Python that has torch; None: ours only"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--pieces", action="store_true", help="time the pieces as well")
    parser.add_argument("--compile", action="store_true", help="torch.compile as well")
    parser.add_argument("--layers", default="unroll", choices=("scan", "unroll"))
    parser.add_argument("--remat", default=None, choices=("block",))
    parser.add_argument("--no-malloc", action="store_true", help="glibc's defaults")
    return parser.parse_args()


def with_malloc_tunables():
    """Starts this program again under `MALLOC`, which glibc reads at the start."""
    os.environ["GLIBC_TUNABLES"] = MALLOC
    os.execv(sys.executable, [sys.executable, *sys.argv])


def make_step(options):
    """A call that runs one step of ours to its end, and the model's pieces."""
    import functools

    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    from dataeff_jax import models

    model = models.GPT(
        **MODEL, layers=options.layers, remat=options.remat, rngs=nnx.Rngs(0)
    )
    graphdef, params = nnx.split(model)
    params = nnx.to_pure_dict(params)
    tx = optax.adamw(
        3e-4, b1=0.9, b2=0.95, weight_decay=0.1, mask=models.decay_mask(params)
    )
    shape = (BATCH_SIZE, MODEL["max_length"])
    tokens, targets = jax.random.randint(jax.random.key(0), (2, *shape), 0, 8192)
    batch = {"tokens": tokens, "targets": targets}

    def loss(params, batch):
        loss_sum, weight_sum = nnx.merge(graphdef, params).loss(batch)
        return loss_sum / weight_sum

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train(params, opt_state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    state = {"params": params, "opt_state": tx.init(params)}

    def step():
        new = train(state["params"], state["opt_state"], batch)
        state["params"], state["opt_state"] = new[0], new[1]
        jax.block_until_ready(new)

    pieces = {"step": step}
    if options.pieces:
        pieces |= make_pieces(jax, jnp, models)
        grads = jax.tree.map(jnp.ones_like, params)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def update(params, opt_state, grads):
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        copy = functools.partial(jax.tree.map, jnp.copy)
        own = {"state": (copy(params), tx.init(params))}

        def optimizer():
            own["state"] = jax.block_until_ready(update(*own["state"], grads))

        pieces["optimizer"] = optimizer
    return pieces


def make_pieces(jax, jnp, models):
    width, heads, layers = (MODEL[n] for n in ("width", "num_heads", "num_layers"))
    count = BATCH_SIZE * MODEL["max_length"]
    keys = iter(jax.random.split(jax.random.key(1), 20))

    def rand(*shape):
        return jax.random.normal(next(keys), shape)

    def matmuls(x, y, *kernels):
        parts = [x @ k for k in kernels[:3]] + [y @ kernels[3]]
        return sum(jnp.sum(p) for p in parts)

    def attend(q, k, v):
        return jnp.sum(models.attention(q, k, v, causal=True))

    targets = jax.random.randint(next(keys), (count,), 0, MODEL["vocab_size"])

    def head(x, table):
        return models.cross_entropy(x, table, targets)

    def runner(function, arrays, repeats):
        numbers = tuple(range(len(arrays)))
        run = jax.jit(jax.value_and_grad(function, numbers))
        return lambda: [jax.block_until_ready(run(*arrays)) for _ in range(repeats)]

    kernels = rand(width, 3 * width), rand(width, width), rand(width, 4 * width)
    kernels += (rand(4 * width, width),)
    shape = (BATCH_SIZE, MODEL["max_length"], heads, width // heads)
    table = 0.02 * rand(MODEL["vocab_size"], width)
    return {
        "matmuls": runner(
            matmuls, (rand(count, width), rand(count, 4 * width), *kernels), layers
        ),
        "attention": runner(attend, tuple(rand(*shape) for _ in range(3)), layers),
        "head": runner(head, (rand(count, width), table), 1),
    }


class Torch:
    """The child process, driven through its standard input and output."""

    def __init__(self, python, *, threads, compile):
        script = os.path.join(os.path.dirname(__file__), "_torch_gpt.py")
        environment = dict(os.environ, OMP_WAIT_POLICY="passive")
        self.process = subprocess.Popen(
            [python, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        sizes = MODEL | {"batch_size": BATCH_SIZE}
        self.about = self.ask(sizes | {"threads": threads, "compile": compile})

    def ask(self, request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def seconds(self, piece):
        return self.ask({"piece": piece, "repeats": 1})[0]

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def clock(function):
    """Seconds by the wall and the process' CPU clock, which load moves less."""
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - wall, time.process_time() - cpu


def main():
    options = parse_arguments()
    if not options.no_malloc and "GLIBC_TUNABLES" not in os.environ:
        with_malloc_tunables()
    threads = len(os.sched_getaffinity(0))
    pieces = make_step(options)
    for piece in pieces.values():
        piece(), piece()
    torch = None
    if options.torch_python:
        torch = Torch(options.torch_python, threads=threads, compile=options.compile)
    names = [("ours", n, f) for n, f in pieces.items()]
    if torch:
        names += [
            ("torch", n, lambda n=n: torch.seconds(n)) for n in torch.about["pieces"]
        ]
        if not options.pieces:
            names = [n for n in names if n[1] in ("step", "eager", "compiled")]
    times, cpu_times = ({(who, name): [] for who, name, _ in names} for _ in range(2))
    for _ in range(options.rounds):
        for who, name, run in names:
            wall, cpu = clock(run) if who == "ours" else run()
            times[who, name].append(wall)
            cpu_times[who, name].append(cpu)
    if torch:
        torch.close()
    print(json.dumps(report(times, cpu_times, threads, options, torch), indent=1))


def report(times, cpu_times, threads, options, torch):
    tokens = BATCH_SIZE * MODEL["max_length"]
    median, cpu = (
        {key: statistics.median(values) for key, values in table.items()}
        for table in (times, cpu_times)
    )
    ours = median["ours", "step"]
    result = {
        "machine": f"{platform.processor() or platform.machine()}, {threads} threads",
        "model": MODEL | {"batch_size": BATCH_SIZE, "dtype": "float32"},
        "layers": options.layers,
        "remat": options.remat,
        "rounds": options.rounds,
        "milliseconds": {" ".join(k): round(1e3 * v, 1) for k, v in median.items()},
        "cpu_milliseconds": {" ".join(k): round(1e3 * v, 1) for k, v in cpu.items()},
        "tokens_per_second": {"ours": round(tokens / ours)},
    }
    if torch:
        steps = [k for k in median if k[1] in ("eager", "compiled")]
        best = min(steps, key=median.__getitem__)
        ratios = [
            b / a for a, b in zip(times["ours", "step"], times[best], strict=True)
        ]
        result["torch"] = torch.about["version"]
        result["tokens_per_second"]["torch " + best[1]] = round(tokens / median[best])
        result["ours_over_torch"] = round(statistics.median(ratios), 3)
        cpu_ratio = cpu[best] / cpu["ours", "step"]
        result["ours_over_torch_by_cpu_time"] = round(cpu_ratio, 3)
    return result


if __name__ == "__main__":
    main()
