"""The train step, ledger, checkpoints, logs and plots."""

from dataeff_jax.training._checkpoint import (
    CHECKPOINT_DIRECTORY,
    CONFIG_FILE,
    Checkpoints,
    restore,
)
from dataeff_jax.training._config import (
    check_same_config,
    config_hash,
    flatten_config,
)
from dataeff_jax.training._evaluate import evaluate
from dataeff_jax.training._ledger import Ledger
from dataeff_jax.training._state import TrainState
from dataeff_jax.training._step import data_parallel_step, read_metrics, row_keys

__all__ = [
    "CHECKPOINT_DIRECTORY",
    "CONFIG_FILE",
    "Checkpoints",
    "Ledger",
    "TrainState",
    "check_same_config",
    "config_hash",
    "data_parallel_step",
    "evaluate",
    "flatten_config",
    "read_metrics",
    "restore",
    "row_keys",
]
