"""What counting alone reaches: unigram and interpolated Kneser-Ney bigram models.

A trained language model has to beat both on the same validation tokens.

Kneser and Ney, "Improved backing-off for M-gram language modeling", ICASSP 1995;
Chen and Goodman, "An Empirical Study of Smoothing Techniques for Language Modeling",
https://arxiv.org/abs/cmp-lg/9606011, section 2.7 (interpolated form) and the discount
estimate D = n1 / (n1 + 2 n2) of Ney, Essen and Kneser (1994).
"""

from typing import NamedTuple

import numpy as np


class NgramLosses(NamedTuple):
    """Cross-entropies of validation tokens, in nats a token."""

    unigram: float
    bigram: float
    uniform: float  # ln(vocab_size): what an untrained model starts near


def token_stream(documents) -> np.ndarray:
    """Return ``E d1 E d2 ... dn E``, the stream that packed rows are cut from.

    Args:
      documents: tokenized documents with ``end_of_text``, for example one side of
        ``dataeff_jax.data.split_documents``.

    Returns:
      int64[T], T = documents + their tokens + 1.

    Example:
      >>> from dataeff_jax import data
      >>> token_stream(data.TokenDocuments([[1, 2], [3]], end_of_text=0)).tolist()
      [0, 1, 2, 0, 3, 0]
    """
    end_of_text = np.array([documents.end_of_text], np.int64)
    pieces = [end_of_text]
    for index in range(len(documents)):
        pieces += [np.asarray(documents[index], np.int64), end_of_text]
    return np.concatenate(pieces)


def unigram_probabilities(stream: np.ndarray, *, vocab_size: int) -> np.ndarray:
    """Return the share of each token among the targets of a stream.

    Tokens that do not occur take the mass of half an occurrence together, so that a
    validation token cannot cost infinitely much; where all occur nothing is added.

    Args:
      stream: int[T]; its first token is a context only.
      vocab_size: V.

    Returns:
      float64[V], sums to 1.

    Example:
      >>> unigram_probabilities(np.array([0, 1, 1, 0]), vocab_size=2).round(3).tolist()
      [0.333, 0.667]
    """
    counts = np.bincount(stream[1:], minlength=vocab_size).astype(np.float64)
    unseen = counts == 0
    if unseen.any():
        counts[unseen] = 0.5 / unseen.sum()
    return counts / counts.sum()


class KneserNeyBigram:
    """An interpolated Kneser-Ney bigram model with one discount.

        p(w | v) = max(c(v w) - D, 0) / c(v)  +  D N(v .) / c(v) * p1(w)
        p1(w)    = max(N(. w) - D1, 0) / N(. .)  +  D1 n(.) / N(. .) / V

    where c counts, N(v .) is how many kinds of token follow v, N(. w) how many kinds
    stand before w, N(. .) the kinds of bigram, n(.) the kinds of w that occur. The
    discount is estimated as D = n1 / (n1 + 2 n2) from the numbers of bigrams that occur
    once and twice, D1 in the same way from N(. w). A context that never occurred gives
    p1. Memory and time are those of sorting the stream once.

    Args:
      stream: int[T], the training tokens.
      vocab_size: V, below 2^31.

    Example:
      >>> model = KneserNeyBigram(np.array([0, 1, 2, 1, 2, 0, 2, 1]), vocab_size=3)
      >>> model.probabilities(np.repeat(1, 3), np.arange(3)).sum().round(12)
      np.float64(1.0)
    """

    def __init__(self, stream: np.ndarray, *, vocab_size: int):
        stream = np.asarray(stream, np.int64)
        if len(stream) < 2:
            raise ValueError(
                f"A bigram needs two tokens; the stream has {len(stream)}."
            )
        self._vocab_size = vocab_size
        pairs = stream[:-1] * vocab_size + stream[1:]
        self._pairs, self._counts = np.unique(pairs, return_counts=True)
        contexts, followers = np.divmod(self._pairs, vocab_size)
        self.discount = _discount(self._counts)
        self._context_counts = np.bincount(stream[:-1], minlength=vocab_size)
        self._num_followers = np.bincount(contexts, minlength=vocab_size)
        num_preceding = np.bincount(followers, minlength=vocab_size)  # N(. w)
        self._lower = _interpolated_lower_order(num_preceding)

    def probabilities(self, contexts: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return p(tokens | contexts), float64[n]."""
        pairs = np.asarray(contexts, np.int64) * self._vocab_size + tokens
        place = np.searchsorted(self._pairs, pairs)
        place = np.minimum(place, len(self._pairs) - 1)
        counts = np.where(self._pairs[place] == pairs, self._counts[place], 0)
        total = self._context_counts[contexts]
        known = total > 0
        divisor = np.where(known, total, 1)
        direct = np.maximum(counts - self.discount, 0) / divisor
        reserved = self.discount * self._num_followers[contexts] / divisor
        return np.where(
            known, direct + reserved * self._lower[tokens], self._lower[tokens]
        )


def _discount(counts: np.ndarray) -> float:
    """Return n1 / (n1 + 2 n2), or 1/2 where nothing occurs once."""
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    # D = 0 would leave nothing for unseen tokens, D = 1 nothing for those seen once.
    return once / (once + 2 * twice) if once and twice else 0.5


def _interpolated_lower_order(num_preceding: np.ndarray) -> np.ndarray:
    """Return p1: the continuation counts, discounted and mixed with 1 / V."""
    kinds = num_preceding.sum()
    discount = _discount(num_preceding)
    reserved = discount * (num_preceding > 0).sum() / kinds
    direct = np.maximum(num_preceding - discount, 0) / kinds
    return direct + reserved / len(num_preceding)


def ngram_losses(
    train: np.ndarray, validation: np.ndarray, *, vocab_size: int
) -> NgramLosses:
    """Return the losses that counting reaches on the validation stream.

    Every token but the first is a target once, end_of_text included, as in the
    evaluation of a trained model.

    Args:
      train: int[T], the training stream; see ``token_stream``.
      validation: int[U], the validation stream.
      vocab_size: V.

    Returns:
      Mean cross-entropies in nats a token.

    Example:
      >>> stream = np.array([0, 1, 2] * 50)
      >>> losses = ngram_losses(stream, stream, vocab_size=3)
      >>> losses.bigram < losses.unigram < losses.uniform + 1e-9
      True
    """
    train, validation = np.asarray(train), np.asarray(validation)
    unigram = unigram_probabilities(train, vocab_size=vocab_size)
    bigram = KneserNeyBigram(train, vocab_size=vocab_size)
    targets = validation[1:]
    return NgramLosses(
        unigram=float(-np.log(unigram[targets]).mean()),
        bigram=float(-np.log(bigram.probabilities(validation[:-1], targets)).mean()),
        uniform=float(np.log(vocab_size)),
    )
