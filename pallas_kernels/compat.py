"""Differences between versions of jax, and nothing else."""

from typing import Any


def interpret_params() -> Any:
    """What makes a Mosaic GPU kernel run on a CPU, for tests.

    Returns:
        An object for `interpret=`.

    Example:
        >>> type(interpret_params()).__name__
        'InterpretGPUParams'
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if hasattr(plgpu, "InterpretGPUParams"):  # public from jax 0.11
        return plgpu.InterpretGPUParams()
    from jax._src.pallas.mosaic_gpu.interpret import params

    return params.InterpretGPUParams()
