"""A tiny regression problem whose numbers are easy to check by hand."""

import jax
import jax.numpy as jnp
import numpy as np

from dataeff_jax import typing


def mlp_params(seed: int = 0, *, dtype=jnp.float32) -> typing.Params:
    """Makes the parameters of a two-layer perceptron, 4 -> 8 -> 3.

    Args:
      seed: of NumPy's generator.
      dtype: of the arrays.

    Returns:
      ``{"hidden": {"kernel", "bias"}, "output": {"kernel", "bias"}}`` as NumPy arrays.

    Example:
      >>> mlp_params()["hidden"]["kernel"].shape
      (4, 8)
    """
    rng = np.random.default_rng(seed)

    def layer(fan_in, fan_out):
        kernel = rng.normal(size=(fan_in, fan_out)) / np.sqrt(fan_in)
        return {"kernel": kernel.astype(dtype), "bias": np.zeros(fan_out, dtype)}

    return {"hidden": layer(4, 8), "output": layer(8, 3)}


def mlp_batch(seed: int = 0, *, rows: int = 16, weighted: bool = False) -> typing.Batch:
    """Makes rows of inputs and targets, with weights from {0, 0.5, 1, 2} if asked.

    Args:
      seed: of NumPy's generator.
      rows: B.
      weighted: whether to add ``weights`` float32[B].

    Returns:
      ``inputs`` float32[B, 4], ``targets`` float32[B, 3], ``sample_id`` int64[B].

    Example:
      >>> sorted(mlp_batch(rows=2))
      ['inputs', 'sample_id', 'targets']
    """
    rng = np.random.default_rng(seed)
    batch = {
        "inputs": rng.normal(size=(rows, 4)).astype(np.float32),
        "targets": rng.normal(size=(rows, 3)).astype(np.float32),
        "sample_id": 2**31 + 5 + np.arange(rows),
    }
    if weighted:
        batch["weights"] = rng.choice([0, 0.5, 1, 2], size=rows).astype(np.float32)
        batch["weights"][0] = 1  # never all zero
    return batch


def mlp_loss(params, batch, keys):
    """Sums the squared error of each row, times its weight.

    With keys, half of the inputs are dropped, so that a wrong key shows in the loss.

    Args:
      params: of :func:`mlp_params`.
      batch: of :func:`mlp_batch`.
      keys: keys[B], or None for no dropout.

    Returns:
      ``(loss_sum float32[], weight_sum)``; the latter is a Python number without
      weights.

    Example:
      >>> mlp_loss(mlp_params(), mlp_batch(rows=8), None)[1]
      8
    """
    x = batch["inputs"].astype(params["hidden"]["kernel"].dtype)  # [B, 4]
    if keys is not None:
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (4,)))(keys)
        x = x * kept.astype(x.dtype)
    for name in ("hidden", "output"):
        x = x @ params[name]["kernel"] + params[name]["bias"][None]
        x = jnp.tanh(x) if name == "hidden" else x
    errors = jnp.sum((x.astype(jnp.float32) - batch["targets"]) ** 2, axis=-1)  # [B]
    if "weights" in batch:
        return jnp.sum(errors * batch["weights"]), jnp.sum(batch["weights"])
    return jnp.sum(errors), errors.shape[0]
