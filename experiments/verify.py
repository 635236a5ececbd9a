"""Reads whole indexes and checks them: checksums, finite values, complete orders.

    python -m experiments.verify runs/index

Opening an index checks sizes and blocks of the files only; this reads everything.
"""

import argparse
import pathlib

from dataeff_jax import curriculum
from experiments import command_line


def main(argv: list[str] | None = None) -> None:
    """Parses the flags and says of each index that it is whole, or what is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("indexes", nargs="+", type=pathlib.Path, metavar="DIR")
    flags = parser.parse_args(argv)
    problems = []
    for directory in flags.indexes:
        try:
            index = curriculum.DifficultyIndex(directory)
            index.verify()
        except (ValueError, OSError) as error:
            problems.append(command_line.in_flags(error))
            continue
        print(f"{directory}: {len(index):,} samples, {', '.join(index.metrics)}: whole")
    if problems:
        parser.exit(2, f"{parser.prog}: {'; '.join(problems)}\n")


if __name__ == "__main__":
    main()
