"""The train step, ledger, checkpoints, logs and plots."""

from dataeff_jax.training._checkpoint import (
    CHECKPOINT_DIRECTORY,
    CONFIG_FILE,
    Checkpoints,
    restore,
)
from dataeff_jax.training._claim import claim
from dataeff_jax.training._config import (
    check_same_config,
    config_hash,
    flatten_config,
    read_config,
)
from dataeff_jax.training._evaluate import evaluate
from dataeff_jax.training._executables import Executables
from dataeff_jax.training._finite import check_finite
from dataeff_jax.training._ledger import Ledger
from dataeff_jax.training._logging import (
    METRICS_FILE,
    WALL_CLOCK_FIELDS,
    MetricsLogger,
    read_log,
    without_wall_clock,
)
from dataeff_jax.training._plots import plot_runs, summary_table
from dataeff_jax.training._progress import Progress
from dataeff_jax.training._state import TrainState
from dataeff_jax.training._step import (
    data_parallel_step,
    read_metrics,
    read_pending,
    row_keys,
)
from dataeff_jax.training._timeline import Feed, Timeline

__all__ = [
    "CHECKPOINT_DIRECTORY",
    "CONFIG_FILE",
    "METRICS_FILE",
    "WALL_CLOCK_FIELDS",
    "Checkpoints",
    "Executables",
    "Feed",
    "Ledger",
    "MetricsLogger",
    "Progress",
    "Timeline",
    "TrainState",
    "check_finite",
    "check_same_config",
    "claim",
    "config_hash",
    "data_parallel_step",
    "evaluate",
    "flatten_config",
    "plot_runs",
    "read_config",
    "read_log",
    "read_metrics",
    "read_pending",
    "restore",
    "row_keys",
    "summary_table",
    "without_wall_clock",
]
