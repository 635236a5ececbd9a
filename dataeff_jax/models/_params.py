"""What kind each parameter is, by its path: which decay, which are stacked."""

import jax

from dataeff_jax import typing

_DECAYED = ("kernel", "embedding")


def names_of(path: typing.Any) -> tuple[str, ...]:
    """The names along a path of `jax.tree_util` or of flax.

    Args:
        path: A path of `jax.tree_util.tree_map_with_path`, or a tuple of names.

    Returns:
        The names as strings.

    Example:
        >>> names_of(("blocks", "up", "kernel"))
        ('blocks', 'up', 'kernel')
    """
    names = []
    for entry in path:
        for attribute in ("key", "name", "idx"):
            if hasattr(entry, attribute):
                entry = getattr(entry, attribute)
                break
        names.append(str(entry))
    # A flax variable adds its own attribute at the end of a path.
    return tuple(n for n in names if n not in ("value", "raw_value"))


def is_stacked(path: typing.Any) -> bool:
    """Whether the parameter at `path` is a stack [L, ...] of one per layer.

    Args:
        path: As of `names_of`.

    Returns:
        True below `blocks`.

    Example:
        >>> is_stacked(("blocks", "up", "bias")), is_stacked(("final_norm", "bias"))
        (True, False)
    """
    return "blocks" in names_of(path)


def decay_mask(params: typing.Params) -> typing.PyTree:
    """Which parameters weight decay applies to: kernels and embeddings.

    Biases, norms, the class token and position embeddings are left out. The rule goes
    by name: stacked biases have two axes, so a rule by rank would decay them.

    Args:
        params: A model's parameters.

    Returns:
        A tree of bool of the same structure, as optax's `mask` takes it.

    Example:
        >>> decay_mask({"up": {"kernel": 0.0, "bias": 0.0}})
        {'up': {'bias': False, 'kernel': True}}
    """

    def decays(path, _):
        names = names_of(path)
        return names[-1] in _DECAYED and "position_embedding" not in names

    return jax.tree_util.tree_map_with_path(decays, params)
