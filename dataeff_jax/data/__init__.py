"""Sources, tokenizers, token caches, packing and batches."""

from dataeff_jax.data._batches import batches, evaluation_batches, prefetch
from dataeff_jax.data._cache import TokenCache, cache_directory, tokenize
from dataeff_jax.data._corpora import CORPORA, CorpusSource, corpus
from dataeff_jax.data._masking import mask_tokens
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
from dataeff_jax.data._table_sources import (
    ArrayRecordSource,
    HuggingFaceSource,
    ParquetSource,
    open_source,
)
from dataeff_jax.data._tokenizers import (
    BPETokenizer,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    trained_tokenizer,
)

__all__ = [
    "CORPORA",
    "ArrayRecordSource",
    "BPETokenizer",
    "ByteTokenizer",
    "CorpusSource",
    "DocumentSubset",
    "Documents",
    "HuggingFaceSource",
    "JsonlSource",
    "MemorySource",
    "PackedRows",
    "ParquetSource",
    "RowSubset",
    "Source",
    "TextSource",
    "TokenCache",
    "TokenDocuments",
    "Tokenizer",
    "batches",
    "cache_directory",
    "corpus",
    "evaluation_batches",
    "load_tokenizer",
    "mask_tokens",
    "open_source",
    "prefetch",
    "random_split",
    "split_documents",
    "tokenize",
    "trained_tokenizer",
]
