"""Draws the curves of several runs on one plot and prints their last numbers.

python -m experiments.compare runs/a runs/b --output=compare.png
"""

import argparse
import pathlib

from dataeff_jax import training


def names_of(workdirs: list[pathlib.Path]) -> list[str]:
    """The shortest different names of directories: the last parts of their paths."""
    parts = [workdir.absolute().parts for workdir in workdirs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError(
        f"a work directory is named twice: {', '.join(map(str, workdirs))}"
    )


def main(argv: list[str] | None = None) -> None:
    """Parses the flags, writes the plot and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("workdirs", nargs="+", type=pathlib.Path, metavar="DIR")
    parser.add_argument("--output", type=pathlib.Path, default="compare.png")
    flags = parser.parse_args(argv)
    try:
        names = names_of(flags.workdirs)
        logs = map(training.read_log, flags.workdirs)
        runs = dict(zip(names, logs, strict=True))
        plot = training.plot_runs(runs, flags.output)
    except (OSError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    print(f"{training.summary_table(runs)}\n\nplot: {plot}")


if __name__ == "__main__":
    main()
