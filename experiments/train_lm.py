"""Trains a language model from a configuration.

    python -m experiments.train_lm --config=configs/gpt_baseline.py --workdir=runs/gpt

The work directory receives the resolved config, checkpoints, metrics.jsonl, TensorBoard
events, plots and a summary. Started again with the same work directory, the run goes on
after its newest complete checkpoint, exactly.
"""

import json
import logging
import pathlib
import platform
import sys
import time

import jax
import ml_collections
import numpy as np
from flax import nnx

import dataeff_jax
from dataeff_jax import data, distributed, models, training
from experiments import builders, command_line, ngram_baselines

log = logging.getLogger(__name__)


def train_and_evaluate(
    config: ml_collections.ConfigDict,
    workdir: str | pathlib.Path,
    *,
    profile_steps: tuple[int, int] | None = None,
    accept_config_changes: bool = False,
) -> dict:
    """Trains as ``config`` says and returns the final metrics.

    Args:
      config: a configuration of the schema in ``configs/common.py``.
      workdir: where everything that the run writes lies; resumed from if it holds a
        checkpoint of the same configuration.
      profile_steps: first and last step of a profiler trace.
      accept_config_changes: go on with a checkpoint whose config differs.

    Returns:
      ``step``, ``validation_loss``, ``perplexity`` and the ledger's counts.

    Raises:
      ValueError: for a config that cannot run, before anything is computed.
      FloatingPointError: when a loss is not finite; the message names the step and the
        sample ids, and the newest checkpoint is the last good one.
    """
    workdir = pathlib.Path(workdir).absolute()
    builders.check_config(config)

    # Mesh and data.
    mesh = builders.mesh(config)
    checkpoints = training.Checkpoints(workdir / "checkpoints", keep=config.checkpoint.keep)
    ...
