"""The same run on 1, 2 and 8 devices and as 2 processes of 4: losses and checkpoints.

    python -m benchmarks.device_counts [--steps=50] [--output=FILE.json]

Each layout trains the same configuration, real text with dropout, in processes of its
own. Then each one's checkpoint goes on in every other layout for two steps.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import shutil
import socket
import subprocess
import sys
import tempfile

from benchmarks import interruptions
from dataeff_jax import training

# name -> (processes, devices of each)
LAYOUTS = {
    "1 device": (1, 1),
    "2 devices": (1, 2),
    "8 devices": (1, 8),
    "2 processes x 4 devices": (2, 4),
}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def train(workdir: pathlib.Path, layout: str, steps: int, *overrides: str) -> None:
    """Runs the command in a layout; raises with what it said if it fails."""
    processes, devices = LAYOUTS[layout]
    environment = interruptions.environment() | {"JAX_NUM_CPU_DEVICES": str(devices)}
    environment |= {
        "COORDINATOR": f"127.0.0.1:{_free_port()}",
        "NUM_PROCESSES": str(processes),
    }
    command = interruptions.command(workdir, *overrides, steps=steps, save_every=25)
    running = [
        subprocess.Popen(
            command,
            cwd=interruptions.ROOT,
            env=environment | {"PROCESS_ID": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(processes)
    ]
    said = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise RuntimeError(f"{layout}: " + "\n".join(said))


def losses(workdir: pathlib.Path) -> dict[int, float]:
    """The training loss of every step."""
    return {r["step"]: r["loss"] for r in training.read_log(workdir) if "loss" in r}


def run(steps: int, *, layouts=tuple(LAYOUTS), report=print) -> dict:
    """Trains in every layout and restores each checkpoint in every other."""
    steady = "--config.schedule.name=warmup_constant_schedule"
    rate = "--config.schedule.kwargs={'peak_value': 1e-3, 'warmup': 4}"
    record = {"steps": steps, "largest_difference": {}, "goes_on": {}}
    with tempfile.TemporaryDirectory() as place:
        workdirs = {name: pathlib.Path(place) / name for name in layouts}
        for name, workdir in workdirs.items():
            train(workdir, name, steps, steady, rate)
        one = losses(workdirs[layouts[0]])
        for name, workdir in workdirs.items():
            found = losses(workdir)
            worst = max(abs(found[step] - one[step]) for step in one)
            record["largest_difference"][name] = worst
            report(f"{name}: losses differ by at most {worst:.1e} from {layouts[0]}")
        for name, workdir in workdirs.items():
            for other in layouts:
                copy = pathlib.Path(place) / "goes on"
                shutil.copytree(workdir, copy)
                more = "--accept_config_changes"
                train(copy, other, steps + 2, steady, rate, more)
                last = losses(copy)[steps + 2]
                record["goes_on"][f"{name} -> {other}"] = last
                report(f"{name} -> {other}: loss of step {steps + 2} is {last:.6f}")
                shutil.rmtree(copy)
    values = record["goes_on"].values()
    record["goes_on_largest_difference"] = max(values) - min(values)
    record |= {"date": str(datetime.date.today()), "cores": os.cpu_count()}
    return record | {"machine": platform.platform()}


def main() -> None:
    """Parses the flags, runs all layouts, and fails if they differ."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--output", type=pathlib.Path)
    flags = parser.parse_args()
    record = run(flags.steps)
    if flags.output:
        flags.output.write_text(json.dumps(record, indent=1) + "\n")
    largest = max(record["largest_difference"].values())
    sys.exit(max(largest, record["goes_on_largest_difference"]) > 1e-5)


if __name__ == "__main__":
    main()
