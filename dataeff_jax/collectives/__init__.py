"""Communication between devices: what a compiled program sends."""

from dataeff_jax.collectives._report import (
    Collective,
    collective_bytes,
    collective_report,
)

__all__ = ["Collective", "collective_bytes", "collective_report"]
