"""What a change of shape costs a run whose lengths grow.

    python -m benchmarks.shape_switch [--steps=2000] [--output=FILE.json]

A run of `experiments.train_lm` with sequence length warmup over four lengths. The next
step compiles in the background while this one trains. Reported for every switch: how
long the loop waited for the program, and by how much the steps around the switch took
longer than the median of the steps that follow at that length. Also the seconds spent
on compiling, and the median step beside a compilation over that without one.
"""

import argparse
import contextlib
import datetime
import itertools
import json
import os
import pathlib
import platform
import statistics
import tempfile
import time

import jax

from experiments import builders, command_line, train_lm

WINDOW = 3  # steps on either side of a switch that may be late


def config_of(steps: int):
    """A small run, a quarter of whose steps has each of four lengths."""
    return command_line.parse(
        command_line.parser("benchmark"),
        [
            "--config=configs/gpt_seqlen_warmup.py",
            "--config.mesh.axes.data=1",
            "--config.data.tokenizer.name=bytes",
            "--config.curriculum.length.kwargs.min_difficulty=32",
            f"--config.curriculum.length.kwargs.total={steps}",
            "--config.curriculum.length.buckets={'multiple': 32, 'max_count': 4}",
            "--config.train.num_tokens=0",
            f"--config.train.num_steps={steps * 4 // 3}",
            "--config.schedule.clock=steps",
        ],
    ).config


def measure(steps: int) -> dict:
    """Trains, and times every step by when the one before the last has ended."""
    config = config_of(steps)
    with tempfile.TemporaryDirectory() as place, jax.set_mesh(builders.mesh(config)):
        run = train_lm.set_up(config, pathlib.Path(place) / "run")
        with (
            contextlib.closing(run._prefetch()) as batches,
            run._executables() as executables,
        ):
            executables.get(run.plan.timeline[0].shape)
            stamps, beside, cpu = [time.perf_counter()], [], time.process_time()
            while run.step < run.plan.timeline.num_steps:
                run._take_step(batches, executables)
                stamps.append(time.perf_counter())
                beside.append(executables.is_compiling)
                run.pending = {k: v for k, v in run.pending.items() if k > run.step - 4}
            cpu = time.process_time() - cpu
        timeline = run.plan.timeline
        seconds = [b - a for a, b in itertools.pairwise(stamps)]
        run.checkpoints.close()
        return {
            "switches": [
                _switch(timeline, executables, seconds, shape)
                for shape in timeline.shapes()[1:]
            ],
            "compile_seconds": {str(k): v for k, v in executables.seconds.items()},
            "step_beside_compilation_over_alone": _slowdown(timeline, seconds, beside),
            "wall_seconds": stamps[-1] - stamps[0],
            "cpu_seconds": cpu,
            "date": str(datetime.date.today()),
            "cores": os.cpu_count(),
            "machine": platform.platform(),
        }


def _switch(timeline, executables, seconds, shape) -> dict:
    first = timeline.first_step(shape)
    following = seconds[first + WINDOW : timeline.last_step(shape)]
    usual = statistics.median(following)
    around = seconds[first - 1 : first + WINDOW]
    return {
        "step": first,
        "shape": list(shape[:2]),
        "waited_ms": 1e3 * executables.waited_seconds[shape],
        "usual_step_ms": 1e3 * usual,
        "steps_around_ms": [1e3 * s for s in around],
        "gap_ms": 1e3 * max(s - usual for s in around),
        "largest_usual_excess_ms": 1e3 * (sorted(following)[-3] - usual),
    }


def _slowdown(timeline, seconds, beside) -> dict:
    """By shape, where it was used both beside a compilation and alone."""
    found = {}
    for shape in timeline.shapes():
        steps = range(timeline.first_step(shape) + WINDOW, timeline.last_step(shape))
        busy = [seconds[s] for s in steps if beside[s]]
        alone = [seconds[s] for s in steps if not beside[s]]
        if len(busy) > 5 and len(alone) > 5:
            ratio = statistics.median(busy) / statistics.median(alone)
            found[f"{shape[0]} x {shape[1]}"] = round(ratio, 3)
    return found


def main() -> None:
    """Parses the flags, measures, and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000, help="of the ramp (2000)")
    parser.add_argument("--output", type=pathlib.Path)
    flags = parser.parse_args()
    text = json.dumps(measure(flags.steps), indent=2)
    if flags.output:
        flags.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
