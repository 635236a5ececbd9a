"""Evaluation: every token of a fixed set once, whatever the number of devices."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dataeff_jax import distributed, typing
from dataeff_jax.training import _loss


@functools.partial(jax.jit, static_argnames=("loss_fn", "axis_name"))
def _loss_sums(params, batch, *, loss_fn, axis_name):
    """Loss and weight of each device's rows, float32[N] each, without a collective."""

    def body(params, batch):
        sums = _loss.call_loss(loss_fn, params, batch, None)
        return jax.tree.map(
            lambda x: distributed.vary(jnp.float32(x), axis_name)[None], sums
        )

    if axis_name is None:
        return body(params, batch)
    run = jax.shard_map(
        body,
        in_specs=(distributed.specs_of(params), jax.P(axis_name)),
        out_specs=jax.P(axis_name),
    )
    return run(params, jax.sharding.reshard(batch, jax.P(axis_name)))


def evaluate(
    loss_fn: Callable[..., Any],
    params: typing.Params,
    batches: Iterable[typing.Batch],
    *,
    axis_name: str | None = "data",
) -> dict[str, float]:
    """Measures the mean loss over a finite set of batches.

    Losses and weights are summed on the host in float64, and padding rows have weight
    0, so every token counts once and the count is exact.

    Args:
      loss_fn: ``(params, batch, keys) -> (loss_sum, weight_sum)``, called with
        ``keys=None`` (no dropout). Pass the same function each time: it is compiled
        once for each function.
      params: tree of arrays, equal on all devices.
      batches: host-local batches, NumPy arrays [B / P, ...] of one shape; all
        processes must give the same number of them.
      axis_name: mesh axis of the rows; None means one device and no mesh.

    Returns:
      ``loss`` per unit of weight, ``perplexity`` = exp(loss) (inf where that
      overflows), and ``tokens``, the sum of weights.

    Raises:
      ValueError: if there is no batch, or no weight in any, or the loss function asks
        for a key that is missing.

    Example:
      >>> loss_fn = lambda w, batch, keys: (w * batch["x"].sum(), batch["x"].size)
      >>> batch = {"x": np.ones((2, 3), np.float32)}
      >>> evaluate(loss_fn, jnp.zeros(()), [batch, batch], axis_name=None)
      {'loss': 0.0, 'perplexity': 1.0, 'tokens': 12}
    """
    sums = []
    for batch in batches:
        if axis_name is not None:
            batch = distributed.shard_batch(batch, axis_name=axis_name)
        else:
            batch = distributed.device_fields(batch)
        sums.append(_loss_sums(params, batch, loss_fn=loss_fn, axis_name=axis_name))
    if not sums:
        raise ValueError("there is no batch to evaluate on; the data set is empty.")
    host = distributed.to_host(sums)
    loss, weight = np.sum(np.asarray(host, np.float64), axis=(0, 2))
    if not weight > 0:
        raise ValueError(f"the weights of all {len(sums)} batches sum to {weight}.")
    mean = float(loss / weight)
    tokens = int(weight) if weight == int(weight) else float(weight)
    perplexity = math.exp(mean) if mean < 709 else math.inf
    return {"loss": mean, "perplexity": perplexity, "tokens": tokens}
