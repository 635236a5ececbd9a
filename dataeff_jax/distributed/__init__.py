"""Meshes, shardings, per-device gradients and processes."""

from dataeff_jax.distributed._agreement import check_agreement
from dataeff_jax.distributed._grad import local_value_and_grad, vary
from dataeff_jax.distributed._mesh import (
    HOST_KEYS,
    check_batch_size,
    data_mesh,
    device_fields,
    replicate,
    shard_batch,
    to_host,
)
from dataeff_jax.distributed._processes import guard, initialize
from dataeff_jax.distributed._specs import specs_of
from dataeff_jax.distributed._watch import Watch

__all__ = [
    "HOST_KEYS",
    "Watch",
    "check_agreement",
    "check_batch_size",
    "data_mesh",
    "device_fields",
    "guard",
    "initialize",
    "local_value_and_grad",
    "replicate",
    "shard_batch",
    "specs_of",
    "to_host",
    "vary",
]
