"""Curriculum learning: analyze once, then sample by difficulty."""

from dataeff_jax.curriculum._analyzer import analyze
from dataeff_jax.curriculum._dataset import Sampler, batches, dataset
from dataeff_jax.curriculum._deepspeed import (
    DeepSpeedCurriculum,
    read_deepspeed_config,
)
from dataeff_jax.curriculum._deepspeed_index import import_deepspeed_index
from dataeff_jax.curriculum._difficulty import (
    Lexicographic,
    Metric,
    function_metric,
    sequence_length,
    vocabulary_rarity,
)
from dataeff_jax.curriculum._document_rows import DocumentRows
from dataeff_jax.curriculum._eligibility import Criterion, percentile_count
from dataeff_jax.curriculum._index import DifficultyIndex
from dataeff_jax.curriculum._length import reshape, segment, truncate
from dataeff_jax.curriculum._length_batches import LengthCurriculum, Trimming
from dataeff_jax.curriculum._model_loss import model_loss, model_perplexity
from dataeff_jax.curriculum._parquet import export_parquet
from dataeff_jax.curriculum._records import ArraySource, Records
from dataeff_jax.curriculum._sampler import SampleOrder

__all__ = [
    "ArraySource",
    "Criterion",
    "DeepSpeedCurriculum",
    "DifficultyIndex",
    "DocumentRows",
    "LengthCurriculum",
    "Lexicographic",
    "Metric",
    "Records",
    "SampleOrder",
    "Sampler",
    "Trimming",
    "analyze",
    "batches",
    "dataset",
    "export_parquet",
    "function_metric",
    "import_deepspeed_index",
    "model_loss",
    "model_perplexity",
    "percentile_count",
    "read_deepspeed_config",
    "reshape",
    "segment",
    "sequence_length",
    "truncate",
    "vocabulary_rarity",
]
