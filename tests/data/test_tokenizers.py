"""Tokenizers round-trip any text, are deterministic, and know their end of text."""

import os
import pathlib
import subprocess
import sys

import hypothesis
import numpy as np
import pytest
import tokenizers
from hypothesis import strategies as st

from dataeff_jax import data

TEXTS = ["the cat sat on the mat", "the dog sat on the log", "naïve café 🙂", ""] * 3
# Hypothesis's own deadline is a wall-clock assertion.
settings = hypothesis.settings(max_examples=40, deadline=None)


@pytest.fixture(scope="module")
def bpe():
    return data.BPETokenizer.train(TEXTS, vocab_size=300)


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request, bpe):
    return {"bytes": data.ByteTokenizer(), "bpe": bpe}[request.param]


@settings
@hypothesis.given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back(text, bpe):
    for tokenizer in (data.ByteTokenizer(), bpe):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokens_are_int32_inside_the_vocabulary(tokenizer):
    for text in TEXTS:
        tokens = tokenizer.encode(text)
        assert tokens.dtype == np.int32 and tokens.ndim == 1
        assert ((tokens >= 0) & (tokens < tokenizer.vocab_size)).all()


def test_batch_equals_one_by_one(tokenizer):
    for text, tokens in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        np.testing.assert_array_equal(tokens, tokenizer.encode(text))


def test_end_of_text_inside_a_text_is_ordinary_text(tokenizer):
    tokens = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.end_of_text not in tokens
    assert tokenizer.decode(tokens) == "a<|endoftext|>b"


def test_decoding_shows_end_of_text(tokenizer):
    a, b = tokenizer.encode("one"), tokenizer.encode("two")
    tokens = [tokenizer.end_of_text, *a, tokenizer.end_of_text, *b]
    assert tokenizer.decode(tokens) == "<|endoftext|>one<|endoftext|>two"


def test_saved_tokenizer_is_the_same(tokenizer, tmp_path):
    path = tmp_path / "my data" / "tokenizer.json"
    tokenizer.save(path)
    again = data.load_tokenizer(path)
    assert type(again) is type(tokenizer)
    assert again.fingerprint == tokenizer.fingerprint
    assert (again.vocab_size, again.end_of_text) == (
        tokenizer.vocab_size,
        tokenizer.end_of_text,
    )
    np.testing.assert_array_equal(again.encode("the cat"), tokenizer.encode("the cat"))
    assert [p.name for p in path.parent.iterdir()] == ["tokenizer.json"]


def test_training_twice_gives_the_same_tokenizer():
    corpus = data.corpus()
    texts = [corpus[i]["text"] for i in range(60)]
    one, two = (data.BPETokenizer.train(texts, vocab_size=600) for _ in range(2))
    assert one.vocab_size == 600
    assert one.fingerprint == two.fingerprint
    assert one.fingerprint != data.BPETokenizer.train(texts, vocab_size=599).fingerprint


def test_trained_tokenizer_is_kept_by_text_and_size(tmp_path):
    source = data.MemorySource(TEXTS)
    one = data.trained_tokenizer(source, 270, tmp_path)
    stamp = {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    assert data.trained_tokenizer(source, 270, tmp_path).fingerprint == one.fingerprint
    assert {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()} == stamp
    data.trained_tokenizer(source, 280, tmp_path)
    data.trained_tokenizer(data.MemorySource(["other"]), 270, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_vocabulary_below_the_bytes_is_refused():
    with pytest.raises(ValueError, match="vocab_size=256 is below 257"):
        data.BPETokenizer.train(TEXTS, vocab_size=256)


def test_foreign_tokenizer_needs_its_end_of_text_named(tmp_path):
    vocabulary = {"[SEP]": 0, "a": 1}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="a")
    foreign = tokenizers.Tokenizer(model)
    foreign.add_special_tokens(["[SEP]"])
    path = tmp_path / "foreign.json"
    foreign.save(str(path))
    with pytest.raises(ValueError, match=r"special tokens are \['\[SEP\]'\]"):
        data.load_tokenizer(path)
    loaded = data.BPETokenizer.load(path, end_of_text="[SEP]")
    assert loaded.end_of_text == loaded.token_id("[SEP]") == 0
    assert loaded.token_id("[MASK]") is None


@pytest.mark.parametrize("content", ["", "{}", '{"model": {"type": "BP'])
def test_file_with_half_a_byte_pair_tokenizer_is_refused(content, tmp_path):
    path = tmp_path / "bpe.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"bpe\.json holds no tokenizer: "):
        data.BPETokenizer.load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ("", "is not valid JSON"),
        ("{}", "holds no tokenizer"),
        ('{"dataeff_jax_tokenizer": "bytes", "version": 2}', "this version reads"),
    ],
)
def test_file_without_a_tokenizer_is_refused(content, message, tmp_path):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        data.load_tokenizer(path)


FORKING = """
import os, sys
from dataeff_jax import data
tokenizer = data.BPETokenizer.train(["to be or not to be"] * 50, vocab_size=260)
tokenizer.encode_batch(["to be"] * 50)
child = os.fork()
tokenizer.encode_batch(["to be"] * 50)
if child == 0:
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_forking_after_threads_have_encoded_neither_hangs_nor_warns():
    environment = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    root = pathlib.Path(data.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", FORKING],
        env={**environment, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
