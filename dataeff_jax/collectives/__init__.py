"""Communication between devices: compressed means, and what a program sends."""

from dataeff_jax.collectives._compressed import compressed_pmean, compressed_psum
from dataeff_jax.collectives._compression import (
    Compression,
    exclude_vectors,
    pack_bits,
    unpack_bits,
)
from dataeff_jax.collectives._error_feedback import (
    ErrorFeedback,
    device_spec,
    error_feedback,
    logical_errors,
    mesh_sizes,
    pending_mean,
    physical_errors,
    resize_errors,
)
from dataeff_jax.collectives._plan import LeafLayout, Plan, compression_plan
from dataeff_jax.collectives._report import (
    Collective,
    check_collectives,
    collective_bytes,
    collective_report,
)

__all__ = [
    "Collective",
    "Compression",
    "ErrorFeedback",
    "LeafLayout",
    "Plan",
    "check_collectives",
    "collective_bytes",
    "collective_report",
    "compressed_pmean",
    "compressed_psum",
    "compression_plan",
    "device_spec",
    "error_feedback",
    "exclude_vectors",
    "logical_errors",
    "mesh_sizes",
    "pack_bits",
    "pending_mean",
    "physical_errors",
    "resize_errors",
    "unpack_bits",
]
