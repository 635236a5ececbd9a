"""Curriculum learning: analyze once, then sample by difficulty."""

from dataeff_jax.curriculum._analyzer import analyze
from dataeff_jax.curriculum._buckets import PickedRows, percentile_buckets
from dataeff_jax.curriculum._dataset import Sampler, batches, dataset
from dataeff_jax.curriculum._deepspeed import (
    DeepSpeedCurriculum,
    read_deepspeed_config,
)
from dataeff_jax.curriculum._deepspeed_index import import_deepspeed_index
from dataeff_jax.curriculum._deepspeed_more import (
    DeepSpeedTokenBudget,
    read_deepspeed_length_schedule,
    read_deepspeed_token_budget,
)
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
from dataeff_jax.curriculum._mixture import Mixture
from dataeff_jax.curriculum._model_loss import model_loss, model_perplexity
from dataeff_jax.curriculum._parquet import export_parquet
from dataeff_jax.curriculum._phases import PhasedOrder
from dataeff_jax.curriculum._records import ArraySource, Records
from dataeff_jax.curriculum._sampler import SampleOrder
from dataeff_jax.curriculum._scores import sampling_weights
from dataeff_jax.curriculum._token_budget import TokenBudget

__all__ = [
    "ArraySource",
    "Criterion",
    "DeepSpeedCurriculum",
    "DeepSpeedTokenBudget",
    "DifficultyIndex",
    "DocumentRows",
    "LengthCurriculum",
    "Lexicographic",
    "Metric",
    "Mixture",
    "PhasedOrder",
    "PickedRows",
    "Records",
    "SampleOrder",
    "Sampler",
    "TokenBudget",
    "Trimming",
    "analyze",
    "batches",
    "dataset",
    "export_parquet",
    "function_metric",
    "import_deepspeed_index",
    "model_loss",
    "model_perplexity",
    "percentile_buckets",
    "percentile_count",
    "read_deepspeed_config",
    "read_deepspeed_length_schedule",
    "read_deepspeed_token_budget",
    "reshape",
    "sampling_weights",
    "segment",
    "sequence_length",
    "truncate",
    "vocabulary_rarity",
]
