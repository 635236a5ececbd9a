"""Pallas kernels for GPUs, each beside its reference in jax.numpy.

A kernel becomes the default only with a measured gain over what XLA makes of its
reference. None has been timed yet; `implementation="mosaic_gpu"` asks for one.
"""

from pallas_kernels.token_gather import (
    token_gather,
    token_gather_norm,
    token_gather_norm_reference,
    token_gather_reference,
    token_scatter,
    token_scatter_reference,
)

__all__ = [
    "token_gather",
    "token_gather_norm",
    "token_gather_norm_reference",
    "token_gather_reference",
    "token_scatter",
    "token_scatter_reference",
]
