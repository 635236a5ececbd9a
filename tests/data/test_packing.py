"""Packed rows cut one stream of all documents, so every token is predicted once."""

import pickle

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from dataeff_jax import data

END = 0
tokens = st.integers(1, 99)
documents = st.lists(st.lists(tokens, max_size=23), min_size=1, max_size=12)
# Hypothesis's own deadline is a wall-clock assertion.
settings = hypothesis.settings(max_examples=150, deadline=None)


def stream_of(documents):
    """E d1 E d2 ... dn E, written out."""
    stream = [END]
    for document in documents:
        stream += [*document, END]
    return stream


def rows_of(documents, length, **arguments):
    packed = data.TokenDocuments(documents, end_of_text=END)
    rows = data.PackedRows(packed, length=length, **arguments)
    return [rows[r] for r in range(len(rows))]


def expected_segments(documents, length):
    """segment_ids and positions of the whole stream, token by token."""
    segment_ids, positions = [], []
    for number, token in enumerate(stream_of(documents)[:-1]):
        new_row = number % length == 0
        if new_row:
            segment, position = 1, 0
        elif token == END:
            segment, position = segment + 1, 0
        else:
            position += 1
        segment_ids.append(segment)
        positions.append(position)
    return segment_ids, positions


@settings
@hypothesis.given(documents=documents, length=st.integers(1, 17))
def test_every_token_is_predicted_exactly_once(documents, length):
    rows = rows_of(documents, length, keep_remainder=True)
    weights = np.concatenate([row["weights"] for row in rows]) > 0
    stream = stream_of(documents)
    got = np.concatenate([row["targets"] for row in rows])[weights]
    assert got.tolist() == stream[1:]
    got = np.concatenate([row["tokens"] for row in rows])[weights]
    assert got.tolist() == stream[:-1]


@settings
@hypothesis.given(documents=documents, length=st.integers(1, 17))
def test_segments_and_positions_follow_the_documents(documents, length):
    rows = rows_of(documents, length, keep_remainder=True)
    weights = np.concatenate([row["weights"] for row in rows]) > 0
    segment_ids, positions = expected_segments(documents, length)
    for name, want in (("segment_ids", segment_ids), ("positions", positions)):
        got = np.concatenate([row[name] for row in rows])
        assert got[weights].tolist() == want
        assert not got[~weights].any()


@settings
@hypothesis.given(documents=documents, length=st.integers(1, 17))
def test_without_the_remainder_only_whole_rows_are_left(documents, length):
    whole = (len(stream_of(documents)) - 1) // length
    hypothesis.assume(whole)
    rows = rows_of(documents, length)
    kept = rows_of(documents, length, keep_remainder=True)
    assert len(rows) == whole
    for row, same in zip(rows, kept, strict=False):
        assert same.pop("weights").all()
        assert row.keys() == same.keys()
        assert all(np.array_equal(row[name], same[name]) for name in row)


def test_padding_is_end_of_text_of_segment_zero_and_weight_zero():
    (row,) = rows_of([[5, 6]], 6, keep_remainder=True)
    assert row["tokens"].tolist() == [END, 5, 6, END, END, END]
    assert row["targets"].tolist() == [5, 6, END, END, END, END]
    assert row["segment_ids"].tolist() == [1, 1, 1, 0, 0, 0]
    assert row["positions"].tolist() == [0, 1, 2, 0, 0, 0]
    assert row["weights"].tolist() == [1, 1, 1, 0, 0, 0]


def test_document_over_many_rows_goes_on_as_a_segment_of_its_own():
    rows = rows_of([list(range(1, 12))], 4)
    assert [row["tokens"].tolist() for row in rows] == [
        [END, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
    for row in rows:
        assert row["segment_ids"].tolist() == [1, 1, 1, 1]
        assert row["positions"].tolist() == [0, 1, 2, 3]


def test_rows_as_segments_have_no_segment_ids():
    for row in rows_of([[1, 2, 3], [4]], 2, segments="row"):
        assert set(row) == {"tokens", "targets", "sample_id"}


def test_types_are_what_a_batch_needs():
    (row,) = rows_of([[1, 2, 3]], 4, keep_remainder=True)
    types = {name: np.asarray(value).dtype.name for name, value in row.items()}
    assert types == {
        "tokens": "int32",
        "targets": "int32",
        "segment_ids": "int32",
        "positions": "int32",
        "weights": "float32",
        "sample_id": "int64",
    }


def test_tokens_beyond_16_bits_and_a_cache_pack_the_same(tmp_path):
    class Wide(data.ByteTokenizer):
        vocab_size, end_of_text, fingerprint = 70_257, 70_256, "wide"

        def encode(self, text):
            return super().encode(text) + 70_000

    source = data.MemorySource(["abc", "", "de"])
    cache = data.tokenize(source, Wide(), tmp_path / "my data" / "run 1")
    (row,) = (data.PackedRows(cache, length=8)[r] for r in range(1))
    letters = [70_000 + ord(c) for c in "abcde"]
    end = 70_256
    want = [end, *letters[:3], end, end, *letters[3:]]
    assert row["tokens"].tolist() == want
    assert row["targets"].tolist() == [*want[1:], end]
    assert row["segment_ids"].tolist() == [1, 1, 1, 1, 2, 3, 3, 3]


def test_rows_pickle_with_their_cache(tmp_path):
    source = data.MemorySource(["some text"] * 300)
    cache = data.tokenize(source, data.ByteTokenizer(), tmp_path / "cache")
    train, _ = data.split_documents(
        data.tokenize(
            data.MemorySource([f"text {i}" for i in range(300)]),
            data.ByteTokenizer(),
            tmp_path / "other",
        ),
        validation_fraction=0.5,
    )
    for documents in (cache, train):
        rows = data.PackedRows(documents, length=16)
        again = pickle.loads(pickle.dumps(rows))
        assert len(again) == len(rows)
        np.testing.assert_array_equal(again[7]["tokens"], rows[7]["tokens"])


@pytest.mark.parametrize("index", [-1, 2])
def test_row_outside_is_an_index_error(index):
    rows = data.PackedRows(data.TokenDocuments([[1] * 9], end_of_text=0), length=5)
    with pytest.raises(IndexError, match=f"index={index} is outside"):
        rows[index]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 0}, "length=0 must be at least 1"),
        ({"length": 2, "segments": "no"}, "must be 'document' or 'row'"),
        ({"length": 5}, "1 documents give 4 targets, fewer than one row of length=5"),
    ],
)
def test_impossible_rows_are_refused(arguments, message):
    documents = data.TokenDocuments([[1, 2, 3]], end_of_text=0)
    with pytest.raises(ValueError, match=message):
        data.PackedRows(documents, **arguments)
