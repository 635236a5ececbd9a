"""Gradients of one device's own rows inside ``shard_map``."""

from collections.abc import Callable

import jax

from dataeff_jax import typing


def vary(tree: typing.PyTree, axis_name: typing.AxisName | None) -> typing.PyTree:
    """Types values as possibly different on each device of an axis.

    Changes no value and moves no data. Leaves that vary already are left as they are.

    Args:
      tree: arrays of any shape, inside ``shard_map``.
      axis_name: the mesh axis; None returns the tree as it is.

    Returns:
      The tree, varying over the axis.

    Example:
      >>> float(vary(jax.numpy.ones(()), None))
      1.0
    """
    if axis_name is None:
        return tree
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)

    def leaf(x):
        missing = tuple(
            n for n in names if n not in jax.typeof(x).manual_axis_type.varying
        )
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(leaf, tree)


def local_value_and_grad(
    function: Callable, *, axis_name: typing.AxisName | None, has_aux: bool = False
) -> Callable:
    """Makes ``value_and_grad`` of the first argument without the hidden sum.

    Under ``shard_map`` with ``check_vma=True`` the gradient with respect to a value
    that is equal on all devices is summed over them. A chain of transformations that
    communicates by itself needs the device's own gradient, so the argument is typed as
    varying first.

    Args:
      function: ``f(params, *args) -> scalar``, or ``(scalar, aux)``.
      axis_name: the mesh axis; None means one device.
      has_aux: whether the function returns a second value.

    Returns:
      ``g(params, *args) -> (value, grads)``; grads have the shapes and dtypes of params
      and vary over the axis.

    Example:
      >>> local_value_and_grad(lambda w: w**2, axis_name=None)(3.0)[1].item()
      6.0
    """
    value_and_grad = jax.value_and_grad(function, has_aux=has_aux)

    def local(params, *args):
        return value_and_grad(vary(params, axis_name), *args)

    return local
