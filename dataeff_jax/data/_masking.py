"""Masked language modelling: which tokens are hidden, and behind what.

Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language
Understanding", section 3.1, task 1, https://arxiv.org/abs/1810.04805.
"""

import collections.abc
from typing import Any

import numpy as np


def mask_tokens(
    record: dict[str, Any],
    sample: int,
    *,
    seed: int,
    mask_token: int,
    vocab_size: int,
    special_tokens: collections.abc.Sequence[int],
    mask_rate: float = 0.15,
) -> dict[str, Any]:
    """Choose tokens to predict and hide 80% of them, change 10%, keep 10%.

    Each ordinary token is chosen on its own with probability ``mask_rate``; a chosen
    one becomes ``mask_token`` (80%), a random ordinary token (10%) or stays (10%).
    Special tokens and padding are never chosen. The draw depends on (seed, sample)
    alone, so a row is masked anew in each epoch and equally on every layout.

    Args:
      record: a row with ``tokens`` int[S]; padding is where ``segment_ids`` is 0 or
        ``weights`` is 0, if it has them.
      sample: the number of the sample in the run, as ``batches`` gives it.
      seed: of the run, not negative.
      mask_token: what hides a token.
      vocab_size: tokens are 0 to vocab_size - 1.
      special_tokens: end of text, padding, mask and so on; ``mask_token`` is added.
      mask_rate: share of ordinary tokens to predict, in (0, 1].

    Returns:
      The record with new ``tokens`` int32[S], ``targets`` int32[S] (the tokens as they
      were) and ``weights`` float32[S] (1 where chosen).

    Raises:
      ValueError: a rate outside (0, 1], or a mask token outside the vocabulary.

    Example:
      >>> import functools
      >>> from dataeff_jax import data
      >>> row = {"tokens": np.arange(1, 21)}
      >>> masked = data.mask_tokens(
      ...     row, 7, seed=0, mask_token=99, vocab_size=100, special_tokens=(0,)
      ... )
      >>> chosen = masked["weights"] == 1
      >>> np.array_equal(masked["tokens"][~chosen], row["tokens"][~chosen])
      True
    """
    if not 0 < mask_rate <= 1:
        raise ValueError(f"mask_rate={mask_rate} must lie in (0, 1].")
    special = np.unique([*special_tokens, mask_token])
    if not 0 <= mask_token < vocab_size or special[-1] >= vocab_size:
        raise ValueError(
            f"mask_token={mask_token} and special_tokens={tuple(special_tokens)} must "
            f"lie in 0 to {vocab_size - 1} (vocab_size={vocab_size})."
        )
    tokens = np.asarray(record["tokens"], np.int32)
    choose, kind, random = _uniforms(seed, sample, tokens.size)
    candidate = ~np.isin(tokens, special)
    for padding in ("segment_ids", "weights"):
        if padding in record:
            candidate &= np.asarray(record[padding]) != 0
    chosen = candidate & (choose < mask_rate)
    replacement = _ordinary(random, special, vocab_size)
    hidden = np.where(chosen & (kind < 0.8), np.int32(mask_token), tokens)
    hidden = np.where(chosen & (kind >= 0.8) & (kind < 0.9), replacement, hidden)
    return {
        **record,
        "tokens": hidden.astype(np.int32),
        "targets": tokens,
        "weights": chosen.astype(np.float32),
    }


def _uniforms(seed: int, sample: int, size: int) -> np.ndarray:
    """Return float64[3, size] in [0, 1) of the counter-based Philox generator.

    The raw bits are used because NumPy promises them, and not the derived
    distributions, to stay the same across versions.
    """
    bits = np.random.Philox(key=np.array([seed, sample], np.uint64))
    return (bits.random_raw(3 * size) >> np.uint64(11)).reshape(3, size) * 2.0**-53


def _ordinary(random: np.ndarray, special: np.ndarray, vocab_size: int) -> np.ndarray:
    """Map uniforms to tokens that are not in ``special`` (sorted)."""
    tokens = (random * (vocab_size - len(special))).astype(np.int32)
    for token in special:
        tokens += tokens >= token
    return tokens
