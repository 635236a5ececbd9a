"""A token cache is whole, of the asked text and tokenizer, or refused."""

import json
import os
import pathlib
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from dataeff_jax import data
from dataeff_jax.data import _cache, _publish

ROOT = pathlib.Path(data.__file__).parents[2]
TEXTS = ["one", "", "three and more", "Ünïcödé 🙂", "x" * 5000]
TOKENIZER = data.ByteTokenizer()


class WideTokenizer(data.ByteTokenizer):
    """Bytes shifted beyond what 16 bits hold."""

    vocab_size = 70_257
    end_of_text = 70_256
    fingerprint = "wide"

    def encode(self, text):
        return super().encode(text) + 70_000


def source(texts=TEXTS):
    return data.MemorySource(list(texts))


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "my data" / "run 1"


def build_of(directory):
    return json.loads((directory / "manifest.json").read_text())["build"]


def siblings(directory):
    return sorted(p.name for p in directory.parent.iterdir() if p != directory)


@pytest.mark.parametrize("tokenizer", [TOKENIZER, WideTokenizer()], ids=["u16", "u32"])
def test_cache_holds_the_tokens_of_every_document(tokenizer, directory):
    cache = data.tokenize(source(), tokenizer, directory)
    assert len(cache) == len(TEXTS)
    for index, text in enumerate(TEXTS):
        np.testing.assert_array_equal(cache[index], tokenizer.encode(text))
    assert cache.num_tokens == sum(cache.lengths) == len(cache.tokens)
    expected = np.uint16 if tokenizer is TOKENIZER else np.uint32
    assert cache.tokens.dtype == expected
    assert isinstance(cache.tokens, np.memmap)
    assert siblings(directory) == []


def test_cache_is_plain_numpy(directory):
    data.tokenize(source(), TOKENIZER, directory)
    tokens = np.load(directory / "tokens.npy")
    offsets = np.load(directory / "offsets.npy")
    assert bytes(tokens[offsets[2] : offsets[3]].tolist()) == b"three and more"
    assert offsets.dtype == np.int64


def test_documents_without_any_token_make_a_cache(directory):
    cache = data.tokenize(source(["", ""]), TOKENIZER, directory)
    assert (len(cache), cache.num_tokens, len(cache[1])) == (2, 0, 0)


def test_pieces_of_any_size_give_the_same_cache(directory, tmp_path, monkeypatch):
    whole = data.tokenize(source(), TOKENIZER, directory)
    small = lambda source: _chunks(source, num_characters=7)  # noqa: E731
    _chunks = _cache._chunks
    monkeypatch.setattr(_cache, "_chunks", small)
    pieces = data.tokenize(source(), TOKENIZER, tmp_path / "pieces")
    for name in _cache.ARRAYS:
        assert (pieces.directory / name).read_bytes() == (
            whole.directory / name
        ).read_bytes()


def test_fitting_cache_is_reused_without_writing(directory):
    first = data.tokenize(source(), TOKENIZER, directory)
    calls = []
    again = data.tokenize(
        source(), TOKENIZER, directory, progress=lambda *done: calls.append(done)
    )
    assert again.manifest == first.manifest
    assert calls == []


def test_progress_counts_documents(directory):
    calls = []
    data.tokenize(
        source(), TOKENIZER, directory, progress=lambda *done: calls.append(done)
    )
    assert calls[-1] == (len(TEXTS), len(TEXTS))


def test_cache_of_another_text_is_refused_with_both_fingerprints(directory):
    cache = data.tokenize(source(), TOKENIZER, directory)
    held = cache.manifest["source"]
    message = rf"another source: .*fingerprint {held}, asked for is \w{{64}}\. Use ano"
    with pytest.raises(ValueError, match=message):
        data.tokenize(source(["other"]), TOKENIZER, directory)
    assert build_of(directory) == cache.manifest["build"]


def test_cache_of_another_tokenizer_is_refused_with_both_fingerprints(directory):
    data.tokenize(source(), TOKENIZER, directory)
    message = f"another tokenizer: .*{TOKENIZER.fingerprint}, asked for is wide"
    with pytest.raises(ValueError, match=message):
        data.tokenize(source(), WideTokenizer(), directory)


def test_own_source_fingerprint_stands_for_the_text(directory):
    arguments = (TOKENIZER, directory)
    first = data.tokenize(source(), *arguments, source_fingerprint="version 1")
    again = data.tokenize(source(["x"]), *arguments, source_fingerprint="version 1")
    assert again.manifest == first.manifest
    with pytest.raises(ValueError, match="version 1, asked for is version 2"):
        data.tokenize(source(), *arguments, source_fingerprint="version 2")


def test_overwrite_replaces_another_text(directory):
    old = data.tokenize(source(), TOKENIZER, directory)
    new = data.tokenize(source(["new"]), TOKENIZER, directory, overwrite=True)
    assert bytes(new[0].tolist()) == b"new"
    assert bytes(old[2].tolist()) == b"three and more"  # still mapped
    assert siblings(directory) == []


def test_directory_with_other_files_is_never_replaced(directory):
    directory.mkdir(parents=True)
    (directory / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="holds other files"):
            data.tokenize(source(), TOKENIZER, directory, overwrite=overwrite)
    assert (directory / "thesis.tex").read_text() == "years of work"


def test_empty_directory_is_used(directory):
    directory.mkdir(parents=True)
    assert len(data.tokenize(source(), TOKENIZER, directory)) == len(TEXTS)


def test_symbolic_link_to_a_directory_is_followed(directory, tmp_path):
    directory.mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(directory)
    data.tokenize(source(), TOKENIZER, link)
    assert len(data.TokenCache(directory)) == len(data.TokenCache(link))


def test_empty_source_is_refused(directory):
    with pytest.raises(ValueError, match="source is empty"):
        data.tokenize([], TOKENIZER, directory)
    assert not directory.exists()


def test_record_without_text_is_named_with_its_fields(directory):
    records = data.MemorySource([{"text": "a"}, {"body": "b", "id": 1}])
    with pytest.raises(ValueError, match=r"Record 1 has no field 'text'.*: body, id"):
        data.tokenize(records, TOKENIZER, directory, source_fingerprint="x")
    assert not directory.exists() and siblings(directory) == []


def cut_a_byte(path):
    path.write_bytes(path.read_bytes()[:-1])


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def remove(path):
    path.unlink()


@pytest.mark.parametrize("name", _cache.ARRAYS)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_a_byte, r"has {smaller} bytes, the manifest says {size}"),
        (cut_in_half, r"has {half} bytes, the manifest says {size}"),
        (remove, r"has 0 bytes, the manifest says {size}"),
        (flip_a_bit, r"has checksum \w+, the manifest says \w+"),
    ],
)
def test_damaged_array_is_refused_by_name(name, damage, message, directory):
    data.tokenize(source(), TOKENIZER, directory)
    path = directory / name
    size = path.stat().st_size
    damage(path)
    sizes = dict(size=size, smaller=size - 1, half=size // 2)
    with pytest.raises(ValueError, match=f"{name} {message.format(**sizes)}"):
        data.TokenCache(directory)
    with pytest.raises(ValueError, match=f"{name} .*overwrite=True"):
        data.tokenize(source(), TOKENIZER, directory)
    assert len(data.tokenize(source(), TOKENIZER, directory, overwrite=True)) == 5


@pytest.mark.parametrize("name", _cache.ARRAYS)
def test_array_of_another_cache_of_equal_size_is_refused(name, directory, tmp_path):
    data.tokenize(source(), TOKENIZER, directory)
    texts = [*TEXTS[1:], TEXTS[0]]  # the same documents in another order
    data.tokenize(source(texts), TOKENIZER, tmp_path / "other")
    shutil.copy(tmp_path / "other" / name, directory / name)
    with pytest.raises(ValueError, match=f"{name} has checksum"):
        data.TokenCache(directory)


def test_large_files_are_checked_in_blocks(directory, monkeypatch):
    monkeypatch.setattr(_cache, "_CHECKED_BYTES", 4096)
    monkeypatch.setattr(_cache, "_BLOCK_BYTES", 1024)
    data.tokenize(source(), TOKENIZER, directory)
    assert (directory / "tokens.npy").stat().st_size > 4096
    assert len(data.TokenCache(directory)) == len(TEXTS)
    flip_a_bit(directory / "tokens.npy")
    with pytest.raises(ValueError, match="has checksum"):
        data.TokenCache(directory)


def edited(directory, **changes):
    path = directory / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_documents": 6}, "offsets.npy holds 6 entries, the manifest says 7"),
        ({"num_tokens": 5}, r"tokens.npy holds \d+ entries, the manifest says 5"),
        ({"version": 2}, r"has format \('dataeff_jax.tokens', 2\), this version reads"),
        ({"files": {}}, "json lacks files/hashes.npy, files/offsets.npy, "),
        ({"format": "else"}, r"has format \('else', 1\), this version reads"),
    ],
)
def test_wrong_manifest_is_refused(changes, message, directory):
    data.tokenize(source(), TOKENIZER, directory)
    edited(directory, **changes)
    with pytest.raises(ValueError, match=message):
        data.TokenCache(directory)


@pytest.mark.parametrize("content", ["", "{", "[]", "null"])
def test_damaged_manifest_is_refused_by_name(content, directory):
    data.tokenize(source(), TOKENIZER, directory)
    (directory / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        data.TokenCache(directory)


def test_missing_cache_is_refused_at_once(directory):
    with pytest.raises(ValueError, match="is no token cache"):
        data.TokenCache(directory)


def test_pickled_cache_reopens_its_build_only(directory):
    cache = data.tokenize(source(), TOKENIZER, directory)
    pickled = pickle.dumps(cache)
    assert len(pickled) < 500
    np.testing.assert_array_equal(pickle.loads(pickled)[2], cache[2])
    data.tokenize(source(["new"]), TOKENIZER, directory, overwrite=True)
    with pytest.raises(ValueError, match="was rebuilt since it was opened"):
        pickle.loads(pickled)


def test_cache_directory_tells_texts_and_tokenizers_apart(tmp_path):
    names = {
        data.cache_directory(tmp_path, source(texts), tokenizer)
        for texts in (["a"], ["b"])
        for tokenizer in (TOKENIZER, WideTokenizer())
    }
    assert len(names) == 4


class Slow:
    """Lets a test act while a build is half-way."""

    fingerprint = "slow"

    def __init__(self, texts, during):
        self._texts, self._during = texts, during

    def __len__(self):
        return len(self._texts)

    def __getitem__(self, index):
        if index == 1:
            self._during()
        return {"text": self._texts[index]}


def test_second_build_of_the_same_text_uses_the_one_that_was_first(directory):
    def during():
        data.tokenize(
            source(["a", "b"]), TOKENIZER, directory, source_fingerprint="slow"
        )
        builds.append(build_of(directory))

    builds = []
    cache = data.tokenize(Slow(["a", "b"], during), TOKENIZER, directory)
    assert cache.manifest["build"] == builds[0]
    assert siblings(directory) == []


def test_second_build_of_another_text_is_refused_and_never_mixes(directory):
    def during():
        data.tokenize(source(["other"]), TOKENIZER, directory)

    with pytest.raises(ValueError, match="was made from another source"):
        data.tokenize(Slow(["a", "b"], during), TOKENIZER, directory)
    assert bytes(data.TokenCache(directory)[0].tolist()) == b"other"
    assert siblings(directory) == []


def test_failed_build_leaves_nothing(directory):
    def during():
        raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError, match="disk on fire"):
        data.tokenize(Slow(["a", "b"], during), TOKENIZER, directory)
    assert not directory.exists() and siblings(directory) == []


KILLED = """
import sys, time
from dataeff_jax import data

class Source:
    fingerprint = "killed"
    def __len__(self):
        return 3
    def __getitem__(self, index):
        if index == 2:
            print("half-way", flush=True)
            time.sleep(600)
        return {"text": "x" * 5_000_000}

data.tokenize(Source(), data.ByteTokenizer(), sys.argv[1])
"""


def test_remains_of_a_killed_writer_are_never_read_and_are_removed(directory):
    writer = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(directory)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with writer:
        assert writer.stdout.readline() == "half-way\n"
        # A live writer's files stay, whatever others do beside them.
        _publish.remove_leftovers(directory)
        assert len(siblings(directory)) == 2
        writer.send_signal(signal.SIGKILL)
    assert not directory.exists() and len(siblings(directory)) == 2
    with pytest.raises(ValueError, match="is no token cache"):
        data.TokenCache(directory)
    cache = data.tokenize(source(), TOKENIZER, directory)
    assert siblings(directory) == []
    np.testing.assert_array_equal(cache[2], TOKENIZER.encode(TEXTS[2]))


def test_killed_between_the_two_renames_of_a_replacement_the_old_cache_returns(
    directory,
):
    old = data.tokenize(source(), TOKENIZER, directory)
    stem = directory.parent / f".{directory.name}.0123456789abcdef"
    directory.rename(f"{stem}.old")
    pathlib.Path(f"{stem}.new").mkdir()
    pathlib.Path(f"{stem}.lock").touch()
    with pytest.raises(ValueError, match="is no token cache"):
        data.TokenCache(directory)
    again = data.tokenize(source(), TOKENIZER, directory)
    assert again.manifest == old.manifest
    assert siblings(directory) == []


def test_many_builds_at_once_give_one_whole_cache(directory):
    texts = [[f"text {i} of {side}" for i in range(300)] for side in "ab"]
    built, refused = [], []

    def build(side):
        try:
            cache = data.tokenize(source(texts[side]), TOKENIZER, directory)
            got = [bytes(cache[i].tolist()).decode() for i in range(len(cache))]
            built.append(got == texts[side])
        except ValueError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=build, args=(n % 2,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built and all(built) and len(built) + len(refused) == 8
    assert all("was made from another source" in error for error in refused)
    assert siblings(directory) == []


def test_lock_file_of_a_dead_process_blocks_nobody(directory):
    directory.parent.mkdir(parents=True)
    lock = directory.parent / f".{directory.name}.0123456789abcdef.lock"
    lock.touch()
    data.tokenize(source(), TOKENIZER, directory)
    assert siblings(directory) == []


def test_neighbours_with_similar_names_are_left_alone(directory):
    directory.parent.mkdir(parents=True)
    names = [
        ".run 1.backup.lock.txt",
        ".run 10.0123.lock",
        "run 1.new",
        ".run 1.a.b.new",
    ]
    for name in names:
        (directory.parent / name).touch()
    data.tokenize(source(), TOKENIZER, directory)
    assert siblings(directory) == sorted(names)


def test_reader_sees_the_old_or_the_new_cache_while_it_is_rebuilt(directory):
    texts = [["old"] * 50, ["a new one"] * 70]
    data.tokenize(source(texts[0]), TOKENIZER, directory)
    stop, wrong, seen = threading.Event(), [], set()

    def read():
        while not stop.is_set():
            try:
                cache = data.TokenCache(directory)
                content = [bytes(cache[i].tolist()).decode() for i in range(len(cache))]
                seen.add(content[0])
                if content not in texts:
                    wrong.append(content)
            except Exception as error:
                wrong.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    deadline = time.monotonic() + 30
    for rebuild in range(1, 40):
        new = source(texts[rebuild % 2])
        data.tokenize(new, TOKENIZER, directory, overwrite=True)
        if (rebuild > 10 and len(seen) == 2) or time.monotonic() > deadline:
            break
    stop.set()
    reader.join()
    assert not wrong
    assert seen == {"old", "a new one"}
