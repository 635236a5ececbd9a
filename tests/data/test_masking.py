"""Masked tokens follow BERT's rates, spare special tokens, and depend on the sample."""

import functools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from dataeff_jax import data

V, MASK, SPECIAL = 40, 4, (0, 1, 7)
mask = functools.partial(
    data.mask_tokens, mask_token=MASK, vocab_size=V, special_tokens=SPECIAL
)
# Hypothesis's own deadline is a wall-clock assertion.
settings = hypothesis.settings(max_examples=60, deadline=None)


@settings
@hypothesis.given(
    tokens=st.lists(st.integers(0, V - 1), min_size=1, max_size=60),
    sample=st.integers(0, 2**40),
    seed=st.integers(0, 2**32),
)
def test_only_chosen_ordinary_tokens_change(tokens, sample, seed):
    record = {"tokens": np.array(tokens), "sample_id": np.int64(3)}
    masked = mask(record, sample, seed=seed)
    chosen = masked["weights"] == 1
    assert np.array_equal(masked["targets"], tokens)
    assert np.array_equal(masked["tokens"][~chosen], masked["targets"][~chosen])
    assert not np.isin(masked["targets"][chosen], (*SPECIAL, MASK)).any()
    assert not np.isin(masked["tokens"][chosen], SPECIAL).any()
    assert masked["sample_id"] == 3


def test_rates_are_those_of_the_paper():
    tokens = np.random.default_rng(0).integers(10, V, 200_000)
    masked = mask({"tokens": tokens}, 0, seed=0)
    chosen = masked["weights"] == 1
    n = chosen.sum()
    after, before = masked["tokens"][chosen], tokens[chosen]
    hidden, kept = (after == MASK).mean(), (after == before).mean()
    # Four standard errors of each share; a random token equals the old one in 1 / 36.
    ordinary = V - len(SPECIAL) - 1
    for got, want, size in (
        (chosen.mean(), 0.15, tokens.size),
        (hidden, 0.8, n),
        (kept, 0.1 + 0.1 / ordinary, n),
    ):
        assert abs(got - want) < 4 * np.sqrt(want * (1 - want) / size)


def test_random_tokens_are_uniform_over_the_ordinary_ones():
    tokens = np.full(400_000, 10)
    masked = mask({"tokens": tokens}, 0, seed=1, mask_rate=1.0)
    drawn = masked["tokens"][(masked["tokens"] != 10) & (masked["tokens"] != MASK)]
    counts = np.bincount(drawn, minlength=V)
    ordinary = np.setdiff1d(np.arange(V), [*SPECIAL, MASK, 10])
    assert counts.sum() == counts[ordinary].sum()
    expected = len(drawn) / len(ordinary)
    # Chi-squared of 34 degrees: mean 34, standard deviation 8.2; five of them.
    assert ((counts[ordinary] - expected) ** 2 / expected).sum() < 34 + 5 * 8.3


def test_mask_depends_on_seed_and_sample_only():
    record = {"tokens": np.arange(10, 40)}
    np.random.seed(0)
    first = mask(record, 7, seed=3)
    np.random.seed(1)
    again = mask({**record, "segment_ids": np.ones(30)}, 7, seed=3)
    np.testing.assert_array_equal(first["tokens"], again["tokens"])
    others = [mask(record, 8, seed=3), mask(record, 7, seed=4)]
    assert all((first["weights"] != other["weights"]).any() for other in others)


def test_draws_are_pinned():
    # Raw bits of Philox keyed by (seed, sample): a change would alter resumed runs.
    masked = mask({"tokens": np.arange(10, 40)}, 7, seed=3)
    assert np.flatnonzero(masked["weights"]).tolist() == [5, 13, 17, 25, 26]


@pytest.mark.parametrize("name", ["segment_ids", "weights"])
def test_padding_is_never_chosen(name):
    inside = np.arange(30) < 12
    record = {"tokens": np.full(30, 20), name: inside.astype(np.float32)}
    masked = mask(record, 0, seed=0, mask_rate=1.0)
    assert masked["weights"].tolist() == inside.tolist()


def test_batches_mask_a_row_anew_in_every_epoch():
    tokens = np.random.default_rng(0).integers(10, V, (4, 64))
    rows = data.MemorySource({"tokens": tokens})
    masked = functools.partial(mask, seed=0)
    steps = data.batches(rows, batch_size=2, seed=0, transform=masked)
    by_row = {row: set() for row in range(4)}
    for step in range(6):  # three epochs
        batch = steps[step]
        for row, weights in zip(batch["sample_id"], batch["weights"], strict=True):
            by_row[int(row)].add(tuple(weights))
    assert all(len(seen) == 3 for seen in by_row.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mask_rate": 0}, r"mask_rate=0 must lie in \(0, 1\]"),
        ({"mask_rate": 1.1}, r"mask_rate=1\.1 must lie in \(0, 1\]"),
        ({"mask_token": V}, "must lie in 0 to 39"),
        ({"special_tokens": (V + 3,)}, "must lie in 0 to 39"),
    ],
)
def test_impossible_masks_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        mask({"tokens": np.arange(5)}, 0, seed=0, **arguments)
