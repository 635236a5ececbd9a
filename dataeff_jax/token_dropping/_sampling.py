"""Which tokens a layer keeps: a sorted sample without replacement, one a row.

Random-LTD, Yao et al., https://arxiv.org/abs/2211.11586, section 3.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dataeff_jax import typing


def sample_token_indices(
    keys: typing.KeyArray,
    size: int,
    *,
    num_kept: int,
    always_keep: Sequence[int] = (),
    group: int = 1,
) -> typing.Array:
    """Draws the positions that each row keeps, uniformly without replacement, sorted.

    Every candidate gets 32 random bits, the `num_kept` largest stay (of equals the
    first), in ascending order. A row's draw depends on nothing but its own key.

    Args:
        keys: One key a row, [B].
        size: S, tokens of a row.
        num_kept: K, tokens to keep, 1 to S.
        always_keep: Positions that are kept in every draw, such as 0 for a class
            token; a deviation from the paper.
        group: Neighbours that are kept or dropped together, which suits memory that
            is read in tiles; a deviation from the paper. Divides the number of
            candidates and of those to keep, `always_keep` left out of both.

    Returns:
        int32[B, K], strictly increasing in each row.

    Raises:
        ValueError: If the numbers do not fit together.

    Example:
        >>> keys = jax.random.split(jax.random.key(0), 2)
        >>> indices = sample_token_indices(keys, 8, num_kept=3, always_keep=(0,))
        >>> indices.shape, indices[:, 0].tolist()
        ((2, 3), [0, 0])

    References:
        Yao et al., Random-LTD, 2022, https://arxiv.org/abs/2211.11586
    """
    check_sampling(num_kept=num_kept, always_keep=always_keep, group=group, size=size)
    fixed = np.unique(np.asarray(always_keep, np.int32))
    candidates = np.setdiff1d(np.arange(size, dtype=np.int32), fixed)
    groups = candidates.reshape(-1, group)  # [S / group, group]
    chosen = (num_kept - len(fixed)) // group

    def draw(key):
        bits = jax.random.bits(key, (len(groups),), jnp.uint32)
        _, rows = jax.lax.top_k(bits, chosen)
        kept = jnp.asarray(groups)[rows].reshape(-1)
        return jnp.sort(jnp.concatenate([jnp.asarray(fixed), kept]))

    return jax.vmap(draw)(keys)


def check_sampling(
    *, num_kept: int, always_keep: Sequence[int], group: int, size: int | None = None
):
    """Raises a ValueError that says which number of a draw is not possible.

    Args:
        num_kept: K.
        always_keep: Positions that are always kept.
        group: Neighbours that go together.
        size: S, or None where it is not known yet.

    Raises:
        ValueError: As said.

    Example:
        >>> check_sampling(num_kept=4, always_keep=(0,), group=3, size=10)
    """
    if num_kept < 1:
        raise ValueError(
            f"num_kept={num_kept} must be at least 1; a layer that sees no token has "
            "nothing to compute. Leave the layer out of the model instead."
        )
    if group < 1:
        raise ValueError(f"group={group} must be at least 1.")
    fixed = len(set(always_keep))
    if min(always_keep, default=0) < 0 or fixed > num_kept:
        raise ValueError(
            f"always_keep={tuple(always_keep)} must be positions from 0, not more than "
            f"num_kept={num_kept} of them."
        )
    if (num_kept - fixed) % group:
        raise ValueError(
            f"group={group} does not divide the {num_kept - fixed} tokens to draw; "
            f"choose num_kept = {fixed} + a multiple of {group}."
        )
    if size is None:
        return
    if num_kept > size or max(always_keep, default=0) >= size:
        raise ValueError(
            f"num_kept={num_kept} and always_keep={tuple(always_keep)} do not fit into "
            f"{size} tokens; clip the schedule with max_difficulty={size}."
        )
    if (size - fixed) % group:
        raise ValueError(
            f"group={group} does not divide the {size - fixed} tokens to draw from; "
            "choose another group."
        )
