"""Sources, tokenizers, token caches, packing and batches."""

from dataeff_jax.data._batches import batches, evaluation_batches, prefetch
from dataeff_jax.data._cache import TokenCache, tokenize
from dataeff_jax.data._corpora import CorpusSource, corpus
from dataeff_jax.data._packing import PackedRows
from dataeff_jax.data._sources import JsonlSource, MemorySource, Source, TextSource
from dataeff_jax.data._splits import (
    Documents,
    DocumentSubset,
    RowSubset,
    TokenDocuments,
    random_split,
    split_documents,
)
from dataeff_jax.data._tokenizers import (
    BPETokenizer,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
)

__all__ = [
    "BPETokenizer",
    "ByteTokenizer",
    "CorpusSource",
    "DocumentSubset",
    "Documents",
    "JsonlSource",
    "MemorySource",
    "PackedRows",
    "RowSubset",
    "Source",
    "TextSource",
    "TokenCache",
    "TokenDocuments",
    "Tokenizer",
    "batches",
    "corpus",
    "evaluation_batches",
    "load_tokenizer",
    "prefetch",
    "random_split",
    "split_documents",
    "tokenize",
]
