"""Comparing the config of a run with the one its work directory was made with."""

import hashlib
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

_ABSENT = "(absent)"


def flatten_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flattens nested dicts to dotted keys; tuples become lists, as in JSON.

    Args:
      config: nested mappings of plain values.

    Returns:
      ``{"train.num_steps": 100, ...}``; an empty mapping stays a value.

    Example:
      >>> flatten_config({"train": {"num_steps": 3}, "betas": (0.9, 0.95)})
      {'train.num_steps': 3, 'betas': [0.9, 0.95]}
    """
    flat = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            inner = flatten_config(value)
            flat.update({f"{key}.{name}": v for name, v in inner.items()})
        else:
            flat[str(key)] = json.loads(json.dumps(value))
    return flat


def read_config(path: str | pathlib.Path) -> dict[str, Any]:
    """Reads a config that was stored as JSON.

    Args:
      path: of the file.

    Returns:
      The nested config.

    Raises:
      ValueError: if the file is damaged.

    Example:
      >>> import tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "config.json"
      >>> _ = path.write_text('{"train": {"num_steps": 3}}')
      >>> read_config(path)
      {'train': {'num_steps': 3}}
    """
    path = pathlib.Path(path)
    content = path.read_bytes()
    try:
        config = json.loads(content)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise ValueError(
            f"{path} is damaged ({len(content)} bytes, no JSON object); put it back,"
            " or start in a new work directory."
        )
    return config


def _fixed(config: Mapping[str, Any], free: Iterable[str]) -> dict[str, Any]:
    """The flat config without the free keys and what lies under them."""
    free = tuple(free)

    def is_free(key):
        return any(key == name or key.startswith(f"{name}.") for name in free)

    return {k: v for k, v in flatten_config(config).items() if not is_free(k)}


def config_hash(config: Mapping[str, Any], *, free: Iterable[str] = ()) -> str:
    """Hashes a config, so that two can be told apart by a short word.

    Args:
      config: nested mappings of plain values.
      free: dotted keys to leave out, with everything under them.

    Returns:
      16 hexadecimal digits, the same for any order of keys.

    Example:
      >>> config_hash({"a": 1, "b": 2}) == config_hash({"b": 2, "a": 1})
      True
    """
    text = json.dumps(_fixed(config, free), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_same_config(
    old: Mapping[str, Any], new: Mapping[str, Any], *, free: Iterable[str] = ()
) -> None:
    """Raises if a run would go on with another config than it was started with.

    A learning rate's curve built from a new total, say, would make the rate jump
    without a word. Only keys that cannot change the trajectory are free.

    Args:
      old: config stored with the checkpoint.
      new: config of this run.
      free: dotted keys that may differ, with everything under them.

    Raises:
      ValueError: with every key that differs and both values.

    Example:
      >>> check_same_config({"log_every": 1}, {"log_every": 5}, free=("log_every",))
    """
    was, now = _fixed(old, free), _fixed(new, free)
    differing = [
        f"  {key}: {was.get(key, _ABSENT)!r} -> {now.get(key, _ABSENT)!r}"
        for key in sorted(was.keys() | now.keys())
        if was.get(key, _ABSENT) != now.get(key, _ABSENT)
    ]
    if differing:
        raise ValueError(
            "the work directory holds a run of another config (stored -> given):\n"
            + "\n".join(differing)
            + "\nGive the stored values, start in a new work directory, or, where the"
            " change is meant, pass accept_config_changes (--accept_config_changes)."
        )
