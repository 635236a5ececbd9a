"""Stacks of blocks: one `Block` whose parameters have a leading layer axis, [L, ...].

The layout is the same whatever runs it. Scanning compiles one block for any depth;
unrolling runs faster on CPUs. Layers that a block tells apart (`Block.layer_runs`) are
scanned in runs, over slices of the same arrays.
"""

import functools
import itertools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from dataeff_jax import typing
from dataeff_jax.models import _block, _layers


def make_blocks(
    num_layers: int,
    *,
    block: type[_block.Block] = _block.Block,
    rngs: nnx.Rngs,
    **kwargs,
) -> _block.Block:
    """One `Block` whose parameters are stacks [L, ...] of independent draws.

    Args:
        num_layers: L.
        block: Its class.
        rngs: Source of keys, nnx.Rngs.
        **kwargs: Arguments of the class.

    Returns:
        The stack, to be run by `run_blocks`.

    Example:
        >>> sizes = dict(width=8, num_heads=2, ffw_width=16)
        >>> make_blocks(3, rngs=nnx.Rngs(0), **sizes).up.kernel.shape
        (3, 8, 16)
    """

    @nnx.split_rngs(splits=num_layers)
    @nnx.vmap
    def make(rngs):
        return block(rngs=rngs, **kwargs)

    return make(rngs)


def run_blocks(
    blocks: nnx.Module,
    x: typing.Array,
    *,
    keys: typing.KeyArray | None = None,
    layers: _block.Layers = "scan",
    remat: Literal["block"] | None = None,
    **kwargs,
) -> Any:
    """Runs a stack of blocks, layer after layer.

    Args:
        blocks: A block whose parameters have a leading layer axis, [L, ...].
        x: [B, S, D].
        keys: One key a row, [B]; layer l uses them folded with l.
        layers: "scan" (one compiled block) or "unroll" (L copies, faster on CPUs).
        remat: "block" saves only each block's input and recomputes the rest.
        **kwargs: Further arguments of the block, the same for every layer.

    Returns:
        [B, S, D]; where blocks return a pair (x, extra), a pair with the sum of what
        they return beside x.

    Example:
        >>> sizes = dict(width=8, num_heads=2, ffw_width=16)
        >>> blocks = make_blocks(2, rngs=nnx.Rngs(0), **sizes)
        >>> run_blocks(blocks, jnp.ones((1, 4, 8))).shape
        (1, 4, 8)
    """
    state = nnx.state(blocks)
    num_layers = jax.tree.leaves(state)[0].shape[0]
    runs = [(blocks, num_layers)]
    if isinstance(blocks, _block.Block):
        runs = blocks.layer_runs(num_layers, size=x.shape[1], training=keys is not None)
    if layers == "unroll":
        parts = unstack(state, num_layers)
        runs = [(block, 1) for block, count in runs for _ in range(count)]
    else:
        parts = split_layers(state, tuple(count for _, count in runs))
    extras, start = [], 0
    for (block, count), part in zip(runs, parts, strict=True):
        # A loop keeps XLA from merging the passes of recomputed blocks; one layer has
        # none.
        layer = _layer(block, keys, kwargs, remat, prevent_cse=count == 1)
        if layers == "unroll":
            x, extra = layer(x, part, start)
        else:
            x, extra = _scan(layer, x, part, jnp.arange(start, start + count))
        extras.append(extra)
        start += count
    if extras[0] is None:
        return x
    return x, functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), extras)


def _layer(block, keys, kwargs, remat, *, prevent_cse):
    """One layer as a function (x, its parameters, its index) -> (x, extra or None)."""
    graphdef = nnx.graphdef(block)

    def layer(x, state, index):
        block = nnx.merge(graphdef, state)
        out = block(x, keys=_layers.fold_rows(keys, index), **kwargs)
        return out if isinstance(out, tuple) else (out, None)

    if remat == "block":
        return jax.checkpoint(layer, prevent_cse=prevent_cse)
    return layer


def _scan(layer, x, state, indices):
    """Layers in a loop; what they return beside x is summed over them."""
    x, extra = jax.lax.scan(lambda x, part: layer(x, *part), x, (state, indices))
    return x, jax.tree.map(lambda e: jnp.sum(e, axis=0), extra)


def unstack(tree: typing.PyTree, num_layers: int) -> list[typing.PyTree]:
    """Splits stacked leaves [L, ...] into L trees, with one stack as the gradient.

    Autodiff of L slices would add up L arrays of the whole size.

    Args:
        tree: Leaves with a leading layer axis.
        num_layers: L.

    Returns:
        A list of L trees.

    Example:
        >>> [part["w"].shape for part in unstack({"w": jnp.ones((2, 3))}, 2)]
        [(3,), (3,)]
    """
    leaves, treedef = jax.tree.flatten(tree)
    parts = [_unstack(num_layers, leaf) for leaf in leaves]
    return [jax.tree.unflatten(treedef, part) for part in zip(*parts, strict=True)]


def split_layers(tree: typing.PyTree, counts: tuple[int, ...]) -> list[typing.PyTree]:
    """Splits stacked leaves [L, ...] into runs of layers, [count, ...] each.

    The gradient is one concatenation; autodiff of slices would add up whole stacks.

    Args:
        tree: Leaves with a leading layer axis.
        counts: Layers of each run; their sum is L.

    Returns:
        A list of trees, one a run.

    Example:
        >>> [part["w"].shape for part in split_layers({"w": jnp.ones((3, 2))}, (1, 2))]
        [(1, 2), (2, 2)]
    """
    if len(counts) == 1:
        return [tree]
    leaves, treedef = jax.tree.flatten(tree)
    parts = [_split(counts, leaf) for leaf in leaves]
    return [jax.tree.unflatten(treedef, part) for part in zip(*parts, strict=True)]


def _unstack_leaf(num_layers, leaf):
    return tuple(leaf[index] for index in range(num_layers))


def _unstack_forward(num_layers, leaf):
    return _unstack_leaf(num_layers, leaf), None


def _unstack_backward(num_layers, _, parts):
    return (jnp.stack(parts),)


_unstack = jax.custom_vjp(_unstack_leaf, nondiff_argnums=(0,))
_unstack.defvjp(_unstack_forward, _unstack_backward)


def _split_leaf(counts, leaf):
    stops = itertools.accumulate(counts)
    return tuple(leaf[s - n : s] for s, n in zip(stops, counts, strict=True))


def _split_forward(counts, leaf):
    return _split_leaf(counts, leaf), None


def _split_backward(counts, _, parts):
    return (jnp.concatenate(parts),)


_split = jax.custom_vjp(_split_leaf, nondiff_argnums=(0,))
_split.defvjp(_split_forward, _split_backward)
