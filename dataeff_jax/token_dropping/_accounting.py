"""Layer tokens: what a step has consumed when some layers see fewer tokens.

A token that goes through all layers counts once; one that a few layers leave out counts
for the share of the layers that see it. Random-LTD, https://arxiv.org/abs/2211.11586,
section 4, measures data by it and runs the learning rate on it.
"""

from typing import Any


def layer_tokens(
    length: Any, *, num_kept: Any, num_layers: int, num_dropping: int | None = None
) -> Any:
    """Tokens of one row that go through a block, summed over the blocks.

    L (n - n_l) + min(r, L) n_l: the exact count, as a ledger keeps it. Divided by the
    number of layers it is a clock in tokens for schedules and budgets.

    Args:
        length: L, tokens of the row; an integer or an array of them.
        num_kept: r, tokens that dropping layers see; None means all.
        num_layers: n.
        num_dropping: n_l; None means all but the first and the last layer.

    Returns:
        An integer, or an array.

    Raises:
        ValueError: If there are more dropping layers than layers.

    Example:
        >>> layer_tokens(128, num_kept=64, num_layers=6)
        512

    References:
        Yao et al., Random-LTD, 2022, https://arxiv.org/abs/2211.11586
    """
    dropping = _num_dropping(num_layers, num_dropping)
    if num_kept is None:
        return length * num_layers
    # Without numpy.minimum, Python's integers stay exact and of any size.
    missing = (length - num_kept) * (length > num_kept)
    return length * num_layers - missing * dropping


def effective_tokens(
    length: Any, *, num_kept: Any, num_layers: int, num_dropping: int | None = None
) -> Any:
    """Tokens of one row on the clock of layer tokens, floor(layer tokens / n).

    What the original's training scripts add up, row by row: L where r >= L, else
    floor((L (n - n_l) + r n_l) / n). Rounding down loses less than a token a row.

    Args:
        length: L, tokens of the row; an integer or an array of them.
        num_kept: r, tokens that dropping layers see; None means all.
        num_layers: n.
        num_dropping: n_l; None means all but the first and the last layer.

    Returns:
        An integer, or an array.

    Raises:
        ValueError: If there are more dropping layers than layers.

    Example:
        >>> effective_tokens(128, num_kept=64, num_layers=6)
        85

    References:
        Li et al., DeepSpeed Data Efficiency, 2022, https://arxiv.org/abs/2212.03597
    """
    count = layer_tokens(
        length, num_kept=num_kept, num_layers=num_layers, num_dropping=num_dropping
    )
    return count // num_layers


def deepspeed_layer_tokens(
    num_kept: Any,
    *,
    batch_size: int,
    full_length: int,
    num_layers: int,
    num_dropping: int | None = None,
) -> Any:
    """Layer tokens of one step as DeepSpeed's own scheduler counts them, for parity.

    B (r n_l + S (n - n_l)), by the configured batch and full length whatever the batch
    really holds. A run's record should be kept by `layer_tokens`.

    Args:
        num_kept: r; an integer or an array of them.
        batch_size: B of DeepSpeed's config.
        full_length: S, the schedule's `max_value`.
        num_layers: n.
        num_dropping: n_l; None means all but the first and the last layer.

    Returns:
        An integer, or an array.

    Raises:
        ValueError: If there are more dropping layers than layers.

    Example:
        >>> deepspeed_layer_tokens(32, batch_size=2, full_length=100, num_layers=4)
        528
    """
    dropping = _num_dropping(num_layers, num_dropping)
    per_row = num_kept * dropping + full_length * (num_layers - dropping)
    return batch_size * per_row


def _num_dropping(num_layers, num_dropping):
    if num_dropping is None:
        return max(num_layers - 2, 0)
    if not 0 <= num_dropping <= num_layers:
        raise ValueError(
            f"num_dropping={num_dropping} must be between 0 and the number of layers, "
            f"{num_layers}."
        )
    return num_dropping
