"""The names that this library's signatures use."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax

__all__ = [
    "Array",
    "AxisName",
    "Batch",
    "KeyArray",
    "Params",
    "PyTree",
    "Schedule",
]

Array: TypeAlias = jax.Array  #: on a device, or traced
AxisName: TypeAlias = str | tuple[str, ...]  #: of a mesh
Batch: TypeAlias = dict[str, Any]  #: arrays whose first axis is the row, [B, ...]
KeyArray: TypeAlias = jax.Array  #: typed keys, as jax.random.key makes them
Params: TypeAlias = Any  #: a pytree of arrays
PyTree: TypeAlias = Any  #: of anything
Schedule: TypeAlias = Callable[[Any], Any]  #: clock (steps or tokens) -> value
