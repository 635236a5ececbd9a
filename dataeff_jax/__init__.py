"""Data-, compute- and communication-efficient training in JAX.

    import dataeff_jax as de

The namespaces load on first use, so ``import dataeff_jax`` imports none of grain,
orbax or flax.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # editors and type checkers do not follow __getattr__
    from dataeff_jax import (
        aot,
        collectives,
        curriculum,
        data,
        distributed,
        models,
        optimizers,
        schedules,
        testing,
        token_dropping,
        training,
        typing,
    )

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "aot",
    "collectives",
    "curriculum",
    "data",
    "distributed",
    "models",
    "optimizers",
    "schedules",
    "testing",
    "token_dropping",
    "training",
    "typing",
]


def __getattr__(name: str):
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted(__all__)
