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
from importlib import metadata

import jax
import ml_collections
import numpy as np
from flax import nnx

from dataeff_jax import data, distributed, training
from experiments import builders, command_line, ngram_baselines

log = logging.getLogger("train_lm")

# Keys that cannot change the trajectory: a run may go on with others.
FREE_KEYS = (
    "mesh",
    "data.cache_dir",
    "data.num_workers",
    "train.log_every_steps",
    "eval",
    "checkpoint",
)


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
      The summary that is also written to ``summary.json``: ``step``,
      ``validation_loss``, ``perplexity``, the ledger's counts and the n-gram bars.

    Raises:
      ValueError: for a config that cannot run, before anything is computed.
      FloatingPointError: when a loss is not finite; the message names the step and the
        sample ids, and the newest checkpoint is the last good one.
    """
    builders.check_config(config)
    with jax.set_mesh(builders.mesh(config)):
        run = Run(config, pathlib.Path(workdir).absolute(), accept_config_changes)
        return run.train(profile_steps)


class Run:
    """One run: what it is made of, and the loop over its steps."""

    def __init__(self, config, workdir: pathlib.Path, accept_config_changes: bool):
        self.config, self.workdir = config, workdir
        # Data.
        self.corpus = builders.corpus(config)
        self.schedule = builders.schedule(config)
        # Model and optimizer.
        model = builders.model(config, vocab_size=self.corpus.tokenizer.vocab_size)
        ...
