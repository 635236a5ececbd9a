"""Whether all processes of a run were started with the same."""

import hashlib

import jax
import numpy as np
from jax.experimental import multihost_utils


def check_agreement(text: str, *, what: str) -> None:
    """Raises in every process unless all give the same text.

    Processes with different configs would train on, each on its own parameters, and
    average gradients that do not belong together. All must call this together.

    Args:
      text: what must be the same everywhere.
      what: its name, for the message.

    Raises:
      ValueError: naming the processes that differ from process 0.

    Example:
      >>> check_agreement("seed=0", what="config")
    """
    if jax.process_count() == 1:
        return
    own = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint32)
    found = multihost_utils.process_allgather(own)
    differing = np.flatnonzero((found != found[0]).any(axis=1)).tolist()
    if differing:
        raise ValueError(
            f"the {what} of process {', '.join(map(str, differing))} is not that of"
            " process 0; start all processes with the same."
        )
