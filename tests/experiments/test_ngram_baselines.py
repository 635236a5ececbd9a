"""The n-gram baselines equal a term-by-term transcription of their formulas."""

import collections
import itertools
import math

import numpy as np
import pytest

from dataeff_jax import data
from experiments import ngram_baselines


def kneser_ney(stream, vocab_size, context, token):
    """p(token | context) by Chen and Goodman's equations, counted with dictionaries."""
    bigrams = collections.Counter(itertools.pairwise(stream))

    def discount(counts):
        n1 = sum(1 for count in counts if count == 1)
        n2 = sum(1 for count in counts if count == 2)
        return n1 / (n1 + 2 * n2) if n1 and n2 else 0.5

    preceding = collections.Counter(w for _, w in bigrams)
    d1 = discount(preceding.values())
    kinds = len(bigrams)
    lower = max(preceding[token] - d1, 0) / kinds
    lower += d1 * len(preceding) / kinds / vocab_size

    total = sum(count for (v, _), count in bigrams.items() if v == context)
    if total == 0:
        return lower
    d = discount(bigrams.values())
    followers = sum(1 for v, _ in bigrams if v == context)
    return max(bigrams[context, token] - d, 0) / total + d * followers / total * lower


STREAMS = {
    "random": np.random.default_rng(0).integers(0, 7, 60),
    "skewed": np.random.default_rng(1).zipf(1.6, 80) % 7,
    "last_token_is_no_context": np.array([0, 1, 2, 0, 1, 2, 0, 5]),
    "two_tokens": np.array([3, 4]),
    "one_kind": np.array([2, 2, 2, 2]),
}
streams = pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
V = 8  # token 7 never occurs


@streams
def test_bigram_equals_the_formula_term_by_term(stream):
    model = ngram_baselines.KneserNeyBigram(stream, vocab_size=V)
    contexts, tokens = (a.ravel() for a in np.mgrid[:V, :V])
    want = [
        kneser_ney(stream.tolist(), V, v, w)
        for v, w in zip(contexts.tolist(), tokens.tolist(), strict=True)
    ]
    # Sums of a few float64 terms in another order.
    np.testing.assert_allclose(model.probabilities(contexts, tokens), want, rtol=1e-13)


@streams
def test_probabilities_are_positive_and_sum_to_one(stream):
    model = ngram_baselines.KneserNeyBigram(stream, vocab_size=V)
    unigram = ngram_baselines.unigram_probabilities(stream, vocab_size=V)
    assert unigram.min() > 0 and unigram.sum() == pytest.approx(1, abs=1e-14)
    for context in range(V):
        p = model.probabilities(np.full(V, context), np.arange(V))
        assert p.min() > 0 and p.sum() == pytest.approx(1, abs=1e-13)


def test_unigram_is_the_share_of_targets_when_all_tokens_occur():
    stream = np.array([0, 1, 1, 2, 0, 1])
    got = ngram_baselines.unigram_probabilities(stream, vocab_size=3)
    np.testing.assert_allclose(got, [1 / 5, 3 / 5, 1 / 5], rtol=1e-15)


def test_losses_are_means_over_all_targets_of_the_validation_stream():
    train, validation = STREAMS["random"], STREAMS["skewed"]
    losses = ngram_baselines.ngram_losses(train, validation, vocab_size=V)
    pairs = zip(validation[:-1].tolist(), validation[1:].tolist(), strict=True)
    want = [-math.log(kneser_ney(train.tolist(), V, v, w)) for v, w in pairs]
    assert losses.bigram == pytest.approx(np.mean(want), rel=1e-13)
    assert losses.uniform == pytest.approx(math.log(V), rel=1e-15)


def test_the_targets_are_those_of_the_packed_rows():
    documents = data.TokenDocuments([[1, 2], [], [3, 4, 5]], end_of_text=0)
    stream = ngram_baselines.token_stream(documents)
    rows = data.PackedRows(documents, length=4, keep_remainder=True)
    counted = [rows[r]["targets"][rows[r]["weights"] > 0] for r in range(len(rows))]
    np.testing.assert_array_equal(np.concatenate(counted), stream[1:])


def test_a_stream_without_a_bigram_is_refused():
    with pytest.raises(ValueError, match="the stream has 1"):
        ngram_baselines.KneserNeyBigram(np.array([1]), vocab_size=V)
