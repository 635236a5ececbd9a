"""Floating-point operations of a model by formula, for the compute ledger.

Per block and row of s tokens, F(s) = (8 + 4 m) s h^2 + a s^2 h, with h the width and
m = ffw_width / h; a = 2 where masked scores are skipped (causal), 4 where all are
computed. Norms, activations and softmax are left out: they are below 2% at width 512.
"""

import fractions
import math
from collections.abc import Mapping
from typing import Any


def expert_capacity(
    length: int, *, num_experts: int, num_selected: int, capacity_factor: float
) -> int:
    """Tokens of a row that each expert has room for, ceil(factor K s / E).

    Args:
        length: s, tokens of the row that the block sees.
        num_experts: E.
        num_selected: K, experts a token.
        capacity_factor: Room over what equal loads would take.

    Returns:
        A Python integer.

    Example:
        >>> expert_capacity(10, num_experts=4, num_selected=2, capacity_factor=1.25)
        7
    """
    # As the decimal fraction that was written: 1.1 * 10 / 11 is no more than 1.
    factor = fractions.Fraction(str(capacity_factor))
    return math.ceil(factor * num_selected * length / num_experts)


def block_flops(
    length: int,
    *,
    width: int,
    ffw_width: int,
    causal: bool,
    experts: Mapping[str, Any] | None = None,
) -> int:
    """Forward FLOPs of one block for one row of `length` tokens, F(s).

    Args:
        length: s, tokens of the row that the block sees.
        width: h.
        ffw_width: Width of the feed-forward network, m h.
        causal: Whether masked scores are skipped, a = 2 instead of 4.
        experts: Arguments of `expert_capacity`: the feed-forward network runs on all
            slots of the experts instead of s tokens, and there is a router.

    Returns:
        An exact Python integer.

    Example:
        >>> block_flops(10, width=4, ffw_width=16, causal=False)
        5440
    """
    slots, router = length, 0
    if experts is not None:
        slots = experts["num_experts"] * expert_capacity(length, **experts)
        router = 2 * length * width * experts["num_experts"]
    matmuls = (8 * width * length + 4 * ffw_width * slots) * width
    return matmuls + router + (2 if causal else 4) * length * length * width


def stack_flops(
    length: int,
    *,
    num_layers: int,
    num_kept: int | None = None,
    num_dropping: int | None = None,
    **kwargs,
) -> int:
    """Forward FLOPs of a stack of blocks in which some layers see fewer tokens.

    Args:
        length: Tokens of the row.
        num_layers: L.
        num_kept: Tokens that dropping layers see; None, or more than `length`: all.
        num_dropping: Layers that drop; None means all but the first and the last.
        **kwargs: Further arguments of `block_flops`.

    Returns:
        An exact Python integer.

    Raises:
        ValueError: If `num_dropping` exceeds the number of layers.

    Example:
        >>> sizes = dict(width=4, ffw_width=16, causal=False)
        >>> stack_flops(10, num_layers=4, num_kept=10, **sizes)
        21760
    """
    if num_dropping is None:
        num_dropping = max(num_layers - 2, 0)
    if not 0 <= num_dropping <= num_layers:
        raise ValueError(
            f"num_dropping={num_dropping} must be between 0 and the number of "
            f"layers, {num_layers}."
        )
    kept = length if num_kept is None else min(num_kept, length)
    dropping = num_dropping * block_flops(kept, **kwargs)
    return (num_layers - num_dropping) * block_flops(length, **kwargs) + dropping


def train_factor(remat: str | None) -> int:
    """Forward passes that a training step is worth: 3, or 4 if blocks are recomputed.

    Args:
        remat: The model's `remat`.

    Returns:
        3 or 4.

    Example:
        >>> train_factor("block")
        4
    """
    return 3 if remat is None else 4
