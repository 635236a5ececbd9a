"""Flags of the commands: ``--config=FILE[:ARG]`` and ``--config.key=value`` overrides.

Every problem of a command line is reported, all in one message, and a key that does
not exist names the nearest one that does. Values are read by the type of the default:
a number must be written as that kind of number (``1e2`` is no integer), text is taken
as it stands, ``None`` turns a block off, and anything else is a Python literal.
"""

import argparse
import ast
import importlib.util
import pathlib
import sys
from collections.abc import Callable

import ml_collections

from experiments import builders, checks


def parser(description: str) -> argparse.ArgumentParser:
    """An argument parser with ``--config``; add further flags to it."""
    result = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    result.add_argument(
        "--config",
        required=True,
        metavar="FILE[:ARG]",
        help="a Python file with get_config(arg); --config.key=value overrides a field",
    )
    return result


def parse(argument_parser: argparse.ArgumentParser, argv: list[str] | None = None):
    """Parses ``argv``; ``config`` of the result is the checked, locked ConfigDict.

    Exits with status 2 and one message that names everything that is wrong.
    """
    argv = sys.argv[1:] if argv is None else argv
    flags = argument_parser.parse_args(
        [a for a in argv if not a.startswith("--config.")]
    )
    try:
        config = load_config(flags.config)
        problems = apply_overrides(
            config, [a for a in argv if a.startswith("--config.")]
        )
        builders.check_config(config, problems=problems)
    except ValueError as error:
        argument_parser.exit(2, f"{argument_parser.prog}: {error}\n")
    flags.config = config
    return flags


def counter(what: str) -> Callable[[int, int], None]:
    """Shows ``WHAT 3 of 7`` on one line of standard error, called with both numbers."""

    def show(done: int, total: int) -> None:
        print(f"\r{what} {done:,} of {total:,}", end="", file=sys.stderr)
        if done == total:
            print(file=sys.stderr)

    return show


def in_flags(error: Exception) -> str:
    """The library's message, with the arguments that it advises written as flags."""
    text = str(error).replace("overwrite=True", "--overwrite")
    return text.replace("(num_workers=0)", "(--num_workers=0)")


def load_config(reference: str) -> ml_collections.ConfigDict:
    """Returns ``get_config(arg)`` of ``"path/to/file.py"`` or ``"...file.py:arg"``.

    Raises:
      ValueError: if there is no such file, it has no ``get_config``, or its own
        assignments name keys that do not exist.
    """
    filename, _, arg = reference.partition(".py:")
    path = pathlib.Path(filename if not arg else filename + ".py")
    if not path.is_file():
        raise ValueError(f"no config file {str(path)!r} (in {pathlib.Path.cwd()})")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file; a config is a .py file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        config = module.get_config(arg or None)
    except Exception as error:  # whatever a user's file may raise
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        message = str(text).replace("\n", " ")
        kind = type(error).__name__
        raise ValueError(f"{path} does not make a config: {kind}: {message}") from error
    if not isinstance(config, ml_collections.ConfigDict):
        raise ValueError(
            f"{path} does not make a config: get_config returns {config!r}, no "
            "ConfigDict"
        )
    return config


def apply_overrides(config: ml_collections.ConfigDict, overrides: list[str]):
    """Applies ``--config.a.b=value`` texts; returns sentences about problems."""
    problems, seen = [], set()
    for override in overrides:
        key, equals, text = override.removeprefix("--config.").partition("=")
        if not equals:
            problems.append(f"{override}: write --config.{key}=VALUE")
            continue
        if key in seen:
            problems.append(f"{key} is given twice")
            continue
        seen.add(key)
        problems.extend(_override(config, key, text))
    return problems


def _override(config, key: str, text: str) -> list[str]:
    *parents, name = key.split(".")
    block = config
    for depth, parent in enumerate(parents):
        if not isinstance(block, ml_collections.ConfigDict) or parent not in block:
            return [checks.unknown_key(config, ".".join(parents[: depth + 1]))]
        block = block[parent]
    if not isinstance(block, ml_collections.ConfigDict):
        return [f"{'.'.join(parents)} is off ({block!r}): it has no key {name!r}"]
    free = parents[-1:] == ["kwargs"]  # the builder knows which arguments there are
    if name not in block and not free:
        return [checks.unknown_key(config, key)]
    try:
        value = _value(text, block.get(name), free)
    except ValueError as error:
        return [f"{key}={text}: {error}"]
    with block.unlocked(), block.ignore_type():
        if name in block and isinstance(value, int):
            del block[name]  # or a count would become a float where one was
        block[name] = value
    return []


def _count(text: str) -> int | float:
    """An integer, or a fraction of the run where an argument takes one (0.1)."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        fraction = float(text)
    except ValueError:
        fraction = 1.0
    if not 0 < fraction < 1:
        raise ValueError("expected an integer, like 100")
    return fraction


def _value(text: str, default, free: bool):
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise ValueError("expected true or false")
        return text.lower() == "true"
    if isinstance(default, int):
        return _count(text)
    if isinstance(default, float):
        try:
            # A duration that was a fraction of the run may become a count.
            return int(text) if free and text.isdecimal() else float(text)
        except ValueError:
            raise ValueError("expected a number, like 3e-4") from None
    if isinstance(default, str):
        return text
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        value = text
    if isinstance(default, ml_collections.ConfigDict):
        if value is not None and not isinstance(value, dict):
            raise ValueError("expected a dict or None, or name one of its keys")
    return ml_collections.ConfigDict(value) if isinstance(value, dict) else value
