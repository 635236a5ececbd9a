"""Splits share no document and no row, in any epoch."""

import collections

import numpy as np
import pytest

from dataeff_jax import data


@pytest.fixture
def cache(tmp_path):
    # Every text three times, in places far apart.
    texts = [f"text {i % 200}" for i in range(600)]
    return data.tokenize(data.MemorySource(texts), data.ByteTokenizer(), tmp_path / "c")


def texts_of(documents):
    return [bytes(documents[i].tolist()).decode() for i in range(len(documents))]


def test_copies_of_a_document_fall_on_one_side(cache):
    train, validation = data.split_documents(cache, validation_fraction=0.3)
    assert not set(texts_of(train)) & set(texts_of(validation))
    assert collections.Counter(texts_of(train) + texts_of(validation)) == (
        collections.Counter(texts_of(cache))
    )


@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.5])
def test_sides_hold_about_their_share(fraction, cache):
    sizes = [
        len(data.split_documents(cache, validation_fraction=fraction, seed=seed)[1]) / 3
        for seed in range(20)
    ]
    # 20 binomial means of 200 distinct texts: four standard errors.
    error = 4 * np.sqrt(200 * fraction * (1 - fraction) / 20)
    assert abs(np.mean(sizes) - 200 * fraction) < error
    assert len(set(sizes)) > 1  # the seed matters


def test_side_of_a_document_depends_on_nothing_but_its_text(cache, tmp_path):
    texts = [*texts_of(cache)[::-1][:350], "a new one"]
    tokenizer = data.BPETokenizer.train(texts, vocab_size=300)
    other = data.tokenize(data.MemorySource(texts), tokenizer, tmp_path / "other")
    train, validation = data.split_documents(cache, validation_fraction=0.3)
    again = data.split_documents(other, validation_fraction=0.3)
    sides = [{tokenizer.decode(side[i]) for i in range(len(side))} for side in again]
    assert not sides[0] & set(texts_of(validation))
    assert not sides[1] & set(texts_of(train))


def test_subset_has_the_lengths_of_its_documents(cache):
    for side in data.split_documents(cache, validation_fraction=0.3):
        assert side.lengths.tolist() == [len(side[i]) for i in range(len(side))]
        assert side.end_of_text == cache.end_of_text


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 1.5])
def test_fraction_outside_zero_to_one_is_refused(fraction, cache):
    with pytest.raises(ValueError, match=f"validation_fraction={fraction} must lie"):
        data.split_documents(cache, validation_fraction=fraction)


def test_split_with_an_empty_side_is_refused_with_both_counts(cache):
    with pytest.raises(ValueError, match="gives 600 for training and 0 for validation"):
        data.split_documents(cache, validation_fraction=1e-9)


def ids(rows, **arguments):
    steps = data.batches(rows, **arguments)
    return lambda first, last: np.concatenate(
        [steps[t]["sample_id"] for t in range(first, last)]
    ).tolist()


def test_repeating_a_subset_with_reshuffling_never_leaves_it():
    rows = data.MemorySource({"labels": np.arange(12)})
    (subset,) = data.random_split(rows, sizes=(5,), seed=5)
    drawn = ids(subset, batch_size=1, seed=5)(0, 20)
    chosen = {int(subset[i]["labels"]) for i in range(5)}
    assert set(drawn) == chosen
    assert set(collections.Counter(drawn).values()) == {4}
    epochs = {tuple(drawn[i : i + 5]) for i in range(0, 20, 5)}
    assert len(epochs) > 1  # reshuffled


def test_parts_share_no_row_in_any_epoch():
    rows = data.MemorySource({"labels": np.arange(12)})
    train, validation = data.random_split(rows, sizes=(9, 3), seed=5)
    for epoch in range(6):
        seen = ids(train, batch_size=3, seed=1)(3 * epoch, 3 * epoch + 3)
        held = ids(validation, batch_size=3, seed=1)(epoch, epoch + 1)
        assert sorted(seen + held) == list(range(12))


@pytest.mark.parametrize("sizes", [(13,), (9, 4), (5, 0), ()])
def test_impossible_sizes_are_refused(sizes):
    rows = data.MemorySource({"labels": np.arange(12)})
    with pytest.raises(ValueError, match="must be positive with a sum of at most 12"):
        data.random_split(rows, sizes=sizes, seed=0)


def test_documents_in_memory_need_at_least_one():
    with pytest.raises(ValueError, match="no document"):
        data.TokenDocuments([], end_of_text=0)
