"""Tokenizers: bytes, and byte-level byte-pair encoding by the ``tokenizers`` package.

Byte-pair encoding: Sennrich et al., "Neural Machine Translation of Rare Words with
Subword Units", https://arxiv.org/abs/1508.07909.
"""

import collections.abc
import hashlib
import json
import os
import pathlib
from typing import Any, Protocol

import numpy as np
import tokenizers

from dataeff_jax.data import _sources

END_OF_TEXT = "<|endoftext|>"
_BYTES = {"dataeff_jax_tokenizer": "bytes", "version": 1, "end_of_text": 256}


class Tokenizer(Protocol):
    """What the rest of the library asks of a tokenizer.

    Anything with these members serves; ``fingerprint`` has to differ between tokenizers
    that encode differently, since it decides whether a token cache is reused.

    Example:
      >>> from dataeff_jax import data
      >>> tokenizer: data.Tokenizer = data.ByteTokenizer()
      >>> [tokens.tolist() for tokens in tokenizer.encode_batch(["a", "bc"])]
      [[97], [98, 99]]
    """

    vocab_size: int
    end_of_text: int
    fingerprint: str

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of ``text``, int32[n], without end_of_text."""
        ...

    def encode_batch(self, texts: collections.abc.Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text."""
        ...

    def decode(self, ids: Any) -> str:
        """Return the text of ``ids``."""
        ...


def _fingerprint(content: Any) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


class ByteTokenizer:
    """UTF-8 bytes 0 to 255, and 256 for the end of a text.

    Every text comes back exactly; nothing is trained.

    Example:
      >>> from dataeff_jax import data
      >>> tokenizer = data.ByteTokenizer()
      >>> tokenizer.encode("hé").tolist(), tokenizer.vocab_size
      ([104, 195, 169], 257)
      >>> tokenizer.decode(tokenizer.encode("hé"))
      'hé'
    """

    vocab_size = 257
    end_of_text = 256
    fingerprint = _fingerprint(_BYTES)

    def encode(self, text: str) -> np.ndarray:
        """Return the bytes of ``text``, int32[n]."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_batch(self, texts: collections.abc.Sequence[str]) -> list[np.ndarray]:
        """Return the bytes of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Any) -> str:
        """Return the text of ``ids``; broken UTF-8 shows as U+FFFD."""
        ids = np.asarray(ids)
        texts = np.split(ids, np.flatnonzero(ids == self.end_of_text))
        return END_OF_TEXT.join(
            text[text < 256].astype(np.uint8).tobytes().decode("utf-8", "replace")
            for text in texts
        )

    def save(self, path: str | os.PathLike) -> None:
        """Write the tokenizer to one JSON file."""
        _write(path, json.dumps(_BYTES))


def _write(path: str | os.PathLike, content: str) -> None:
    """Write a file so that a reader sees all of it or nothing."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(content, encoding="utf-8")
    os.replace(temporary, path)


class BPETokenizer:
    """Byte-level byte-pair encoding; any text round-trips exactly.

    ``<|endoftext|>`` inside a text is encoded as ordinary characters: a document cannot
    end itself.

    Args:
      tokenizer: a ``tokenizers.Tokenizer``; ``train`` and ``load`` make one.
      end_of_text: the special token that stands before every document.

    Raises:
      ValueError: the vocabulary has no such token.

    Example:
      >>> from dataeff_jax import data
      >>> texts = ["the cat sat on the mat", "the dog sat on the log"]
      >>> tokenizer = data.BPETokenizer.train(texts, vocab_size=270)
      >>> tokens = tokenizer.encode("the cat")
      >>> len(tokens), tokenizer.decode(tokens), tokenizer.vocab_size
      (3, 'the cat', 270)
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, *, end_of_text: str = END_OF_TEXT
    ):
        token = tokenizer.token_to_id(end_of_text)
        if token is None:
            added = tokenizer.get_added_tokens_decoder()
            special = sorted(entry.content for entry in added.values())
            raise ValueError(
                f"The vocabulary has no token {end_of_text!r}; its special tokens are "
                f"{special}. Pass end_of_text=... with one of them."
            )
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self.end_of_text: int = token
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self.fingerprint: str = _fingerprint(json.loads(tokenizer.to_str()))

    @classmethod
    def train(
        cls,
        texts: collections.abc.Iterable[str],
        *,
        vocab_size: int,
        progress: bool = False,
    ) -> "BPETokenizer":
        """Learn merges from ``texts``; the same texts give the same tokenizer.

        Args:
          texts: the training texts, read once.
          vocab_size: number of tokens wanted, at least 257 (the bytes and end_of_text);
            a small text gives fewer.
          progress: show the trainer's bar.

        Returns:
          The tokenizer.
        """
        if vocab_size < 257:
            raise ValueError(
                f"vocab_size={vocab_size} is below 257, the 256 bytes and end_of_text."
            )
        _guard_forks()
        model = tokenizers.Tokenizer(tokenizers.models.BPE())
        byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.pre_tokenizer = byte_level  # pyright: ignore[reportAttributeAccessIssue]
        model.decoder = tokenizers.decoders.ByteLevel()  # pyright: ignore
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=progress,
        )
        model.train_from_iterator(texts, trainer)
        return cls(model)

    @classmethod
    def load(
        cls, path: str | os.PathLike, *, end_of_text: str = END_OF_TEXT
    ) -> "BPETokenizer":
        """Read a ``tokenizer.json`` as ``save`` or Hugging Face's packages write it."""
        try:
            model = tokenizers.Tokenizer.from_str(_read(path))
        except ValueError:
            raise  # not readable at all
        except Exception as error:  # the package has no narrower class
            raise ValueError(
                f"{path} holds no tokenizer: {error}; delete it to have it made again."
            ) from error
        model.no_padding()
        model.no_truncation()
        return cls(model, end_of_text=end_of_text)

    def save(self, path: str | os.PathLike) -> None:
        """Write the tokenizer to one JSON file."""
        _write(path, self._tokenizer.to_str())

    def token_id(self, token: str) -> int | None:
        """Return the number of a token, for example ``"[MASK]"``; None if unknown."""
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of ``text``, int32[n], without end_of_text."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.asarray(ids, np.int32)

    def encode_batch(self, texts: collections.abc.Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text, computed on all cores."""
        _guard_forks()
        encodings = self._tokenizer.encode_batch_fast(
            list(texts), add_special_tokens=False
        )
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Any) -> str:
        """Return the text of ``ids``."""
        ids = np.asarray(ids).tolist()
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _guard_forks() -> None:
    """Let threads encode here, and keep them off in processes forked from this one.

    Threads do not survive a fork; the ``tokenizers`` package prints a warning unless
    this variable is set. A value that the user has set is left alone.
    """
    if "TOKENIZERS_PARALLELISM" not in os.environ:
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        os.register_at_fork(after_in_child=_no_threads)


def _no_threads() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _read(path: str | os.PathLike) -> str:
    path = pathlib.Path(path)
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give a tokenizer.json.")
    return path.read_text(encoding="utf-8")


def trained_tokenizer(
    source: Any, vocab_size: int, directory: str | os.PathLike
) -> BPETokenizer:
    """Train a ``BPETokenizer`` on a source, or load the one that was trained before.

    Args:
      source: records with ``"text"``.
      vocab_size: as for ``BPETokenizer.train``.
      directory: where tokenizers are kept; the file's name tells text and size.

    Returns:
      The tokenizer.

    Example:
      >>> import tempfile
      >>> from dataeff_jax import data
      >>> source = data.MemorySource(["to be or not to be"])
      >>> data.trained_tokenizer(source, 260, tempfile.mkdtemp()).vocab_size
      260
    """
    name = {"source": _sources.texts_fingerprint(source), "vocab_size": vocab_size}
    path = pathlib.Path(directory) / f"bpe-{vocab_size}-{_fingerprint(name)[:16]}.json"
    if path.is_file():
        return BPETokenizer.load(path)
    texts = (source[index]["text"] for index in range(len(source)))
    tokenizer = BPETokenizer.train(texts, vocab_size=vocab_size)
    tokenizer.save(path)
    return tokenizer


def load_tokenizer(path: str | os.PathLike) -> ByteTokenizer | BPETokenizer:
    """Return the tokenizer that ``save`` has written to ``path``.

    Args:
      path: a ``tokenizer.json`` of either kind.

    Returns:
      A ``ByteTokenizer`` or a ``BPETokenizer``.

    Raises:
      ValueError: a file that is missing or holds no tokenizer.

    Example:
      >>> import pathlib, tempfile
      >>> from dataeff_jax import data
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "tokenizer.json"
      >>> data.ByteTokenizer().save(path)
      >>> data.load_tokenizer(path).vocab_size
      257
    """
    try:
        content = json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}.") from error
    if isinstance(content, dict) and content.get("dataeff_jax_tokenizer") == "bytes":
        if content != _BYTES:
            raise ValueError(f"{path} is {content}, this version reads {_BYTES}.")
        return ByteTokenizer()
    if not isinstance(content, dict) or "model" not in content:
        raise ValueError(f"{path} holds no tokenizer: it has no 'model'.")
    return BPETokenizer.load(path)
