"""The one place that chooses between a kernel and its reference."""

from collections.abc import Callable
from typing import Any, Literal

import jax

from pallas_kernels import compat

Implementation = Literal["xla", "mosaic_gpu", "interpret"]


def call(
    reference: Callable[..., Any],
    kernel: Callable[..., Any],
    *args: jax.Array,
    implementation: Implementation | None,
    unsupported: str | None = None,
) -> Any:
    """Runs a kernel or its reference on the same arguments.

    None takes the reference: no kernel has been timed on a GPU yet, and one becomes the
    default only where it wins.

    Args:
        reference: The operation in jax.numpy.
        kernel: The same as a Mosaic GPU kernel, with a keyword `interpret`.
        *args: Arrays.
        implementation: "xla" for the reference, "mosaic_gpu" for the kernel (H100 or
            newer), "interpret" for the kernel on a CPU, slowly; None chooses.
        unsupported: Why the kernel cannot take these arguments, or None.

    Returns:
        What either returns.

    Raises:
        NotImplementedError: If a GPU kernel is asked for what it does not support.
        ValueError: If the implementation is unknown.

    Example:
        >>> call(lambda x: x + 1, lambda x: x, 1, implementation=None)
        2
    """
    if implementation in (None, "xla"):
        return reference(*args)
    if implementation == "interpret":
        return kernel(*args, interpret=compat.interpret_params())
    if implementation != "mosaic_gpu":
        raise ValueError(
            f"implementation={implementation!r} is unknown; use None, 'xla', "
            "'mosaic_gpu' or 'interpret'."
        )
    if unsupported is not None:
        raise NotImplementedError(f"{unsupported}; use implementation='xla'.")
    out = kernel(*args, interpret=None)
    # Mosaic types its outputs as equal on all devices, whatever went in.
    return jax.tree.map(lambda leaf: vary_together(leaf, *args)[0], out)


def vary_together(*arrays: jax.Array) -> tuple[Any, ...]:
    """Types arrays as varying over every manual axis that one of them varies over.

    Args:
        *arrays: Arrays.

    Returns:
        The same values in the same order.

    Example:
        >>> len(vary_together(jax.numpy.ones(2), jax.numpy.ones(3)))
        2
    """
    axes = [frozenset(jax.typeof(a).manual_axis_type.varying) for a in arrays]
    union = frozenset().union(*axes)
    return tuple(
        a
        if own == union
        else jax.lax.pcast(a, tuple(sorted(union - own)), to="varying")
        for a, own in zip(arrays, axes, strict=True)
    )
