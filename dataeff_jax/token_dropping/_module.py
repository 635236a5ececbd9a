"""Random-LTD as a transform of a Flax NNX model, whose parameters stay where they are.

Selected blocks get a class that drops tokens around their own `__call__`; no module is
wrapped, so paths, and with them checkpoints, are those of the plain model.
"""

import dataclasses
import functools
import inspect
import itertools
import operator
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from dataeff_jax import models
from dataeff_jax.token_dropping import _functional, _sampling

Path = tuple[Any, ...]  # of names and indices
Where = Callable[[Path, int | None], bool]
Model = TypeVar("Model", bound=nnx.Module)


@dataclasses.dataclass(frozen=True)
class _Options:
    """What is static about a block that drops."""

    num_kept: int | tuple[int | None, ...] | None  # of each layer, for a stack
    place: int  # tells the blocks of a model apart
    always_keep: tuple[int, ...]
    group: int
    kinds: tuple[tuple[str, _functional.ArgumentKind], ...]


class _RandomLTD:
    """Goes before a block's class: the block sees a random part of its tokens."""

    plain: Any  # the block's own class
    random_ltd: _Options
    random_ltd_stream: nnx.RngStream | None
    deterministic: bool

    def __call__(self, x, *args, **kwargs):
        call = functools.partial(self.plain.__call__, self)
        signature = inspect.signature(call)
        rows = self._row_keys(kwargs, x.shape[0])
        for name in ("keys", "rngs"):  # a block without randomness takes neither
            if not _takes(signature, name):
                kwargs.pop(name, None)
        options, size = self.random_ltd, x.shape[1]
        kept = options.num_kept
        if rows is not None and isinstance(kept, tuple):
            raise ValueError(
                "this block stands for a stack of layers that keep different numbers "
                "of tokens; models.run_blocks runs it."
            )
        if rows is None or not isinstance(kept, int) or kept >= size:
            return call(x, *args, **kwargs)
        indices = _sampling.sample_token_indices(
            jax.vmap(jax.random.fold_in, in_axes=(0, None))(rows, options.place),
            size,
            num_kept=kept,
            always_keep=options.always_keep,
            group=options.group,
        )
        arguments = _by_name(signature, x, args, kwargs)
        return _functional.drop_tokens(
            call, x, indices, kinds=dict(options.kinds), **arguments
        )

    def _row_keys(self, kwargs, num_rows):
        """One key a row, or None where nothing is to be dropped."""
        keys, rngs = kwargs.get("keys"), kwargs.get("rngs")
        if self.deterministic:
            return None
        if keys is not None:
            if keys.shape != (num_rows,):
                raise ValueError(
                    f"keys has shape {keys.shape}; it must be one key a row, "
                    f"({num_rows},)."
                )
            return keys
        stream = self.random_ltd_stream if rngs is None else rngs["token_drop"]
        if stream is None:
            return None
        fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
        return fold(stream(), jnp.arange(num_rows))

    def layer_runs(self, num_layers, *, size, training):
        """Runs of layers that keep the same number of tokens; all, if none drops."""
        kept = self.random_ltd.num_kept
        if self.deterministic or not training:
            return [(self, num_layers)]
        if not isinstance(kept, tuple):
            kept = (kept,) * num_layers
        kept = [None if k is None or k >= size else k for k in kept]
        return [
            (_copy(self, num_kept), len(list(run)))
            for num_kept, run in itertools.groupby(kept)
        ]


def _copy(block, num_kept):
    """The block with another number of kept tokens; its arrays are shared."""
    new = object.__new__(type(block))
    options = dataclasses.replace(block.random_ltd, num_kept=num_kept)
    # Not by setattr, which refuses under a trace that the block is older than.
    vars(new).update(vars(block) | {"random_ltd": options})
    return new


def _takes(signature, name):
    return any(
        p.name == name or p.kind is p.VAR_KEYWORD for p in signature.parameters.values()
    )


def _by_name(signature, x, args, kwargs):
    """Arguments of a call besides x, by name, with positions if there is a place."""
    bound = signature.bind(x, *args, **kwargs)
    first = next(iter(signature.parameters))
    arguments = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            raise ValueError(
                f"the block takes *{name}; token dropping follows arguments by name, "
                "so give them names in the block's __call__."
            )
        if kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= value
        elif name != first:
            arguments[name] = value
    if "positions" in signature.parameters:
        arguments.setdefault("positions", None)
    return arguments


@functools.cache  # one class per class, so that graph definitions compare equal
def _dropping_class(plain):
    """The class of a block that drops, for the class of a plain one."""
    space = {"__module__": plain.__module__, "plain": plain}
    return type(f"RandomLTD{plain.__name__}", (_RandomLTD, plain), space)


def _convert(block: Any, options: _Options, rngs: nnx.Rngs | None = None) -> Any:
    plain = block.plain if isinstance(block, _RandomLTD) else type(block)
    new: Any = object.__new__(_dropping_class(plain))
    vars(new).update(vars(block))
    new.random_ltd = options
    # A stream of its own, as Dropout has: blocks share no state.
    new.random_ltd_stream = None if rngs is None else rngs["token_drop"].fork()
    if not hasattr(new, "deterministic"):
        new.deterministic = False  # what Module.eval() and Module.train() set
    return new


def dropping_block(
    block: Model,
    *,
    num_kept: int,
    always_keep: Sequence[int] = (),
    group: int = 1,
    kinds: Mapping[str, _functional.ArgumentKind] | None = None,
    rngs: nnx.Rngs | None = None,
) -> Model:
    """Makes one block see a random part of its tokens; what `with_random_ltd` does.

    Args:
        block: Any module called as block(x [B, S, D], ...) -> [B, S, D].
        num_kept: K, tokens that the block sees; K >= S is the plain block.
        always_keep: As of `sample_token_indices`.
        group: As of `sample_token_indices`.
        kinds: As of `drop_tokens`.
        rngs: Where to draw from (stream `token_drop`) when a call brings neither `keys`
            [B] nor `rngs`; kept as state of the block. None: such a call drops nothing.

    Returns:
        A new block that shares the arrays; `block` is as before.

    Raises:
        ValueError: If the numbers do not fit together.

    Example:
        >>> block = dropping_block(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), num_kept=2)
        >>> keys = jax.random.split(jax.random.key(0), 1)
        >>> y = block(jnp.ones((1, 8, 4)), keys=keys)
        >>> int((y == 1).all(axis=-1).sum())  # tokens that passed by
        6

    References:
        Yao et al., Random-LTD, 2022, https://arxiv.org/abs/2211.11586
    """
    options = _options(operator.index(num_kept), _place(()), always_keep, group, kinds)
    return _convert(block, options, rngs)


def _options(num_kept, place, always_keep, group, kinds):
    for number in num_kept if isinstance(num_kept, tuple) else (num_kept,):
        if number is not None:
            _sampling.check_sampling(
                num_kept=number, always_keep=always_keep, group=group
            )
    kinds = tuple(sorted((kinds or {}).items()))
    return _Options(num_kept, place, tuple(always_keep), group, kinds)


def with_random_ltd(
    model: Model,
    *,
    num_kept: int | Sequence[int | None],
    where: Where | None = None,
    always_keep: Sequence[int] = (),
    group: int = 1,
    kinds: Mapping[str, _functional.ArgumentKind] | None = None,
    rngs: nnx.Rngs | None = None,
) -> Model:
    """A model whose middle layers each see a random part of the tokens: random-LTD.

    Every selected layer draws its own K tokens of every row, in every step, computes
    them alone, with the positions, segments and padding that they had, and lets the
    others pass by. The new model shares the parameters of `model`, at the same paths.

    It drops only where it is given randomness: models of this library by `keys`, one
    a row; others by `keys` or `rngs` that they hand on to their blocks. Without, after
    `model.eval()`, or where K >= S it is the plain model, bit for bit. K is static:
    a new value is a new program, so a schedule should move in steps.

    Args:
        model: Layers in a stack (GPT, BERT, ViT of this library) or in a list.
        num_kept: K, or one entry a layer, None where it does not drop.
        where: (path, layer_index) -> bool selects layers. Path is that of the module,
            such as ("blocks",) for a stack or ("blocks", 3) in a list; the index is
            None for modules in neither. None takes all but the first and the last
            layer, as the paper does, or those that have an entry in `num_kept`.
        always_keep: Positions that every layer keeps; see `sample_token_indices`.
        group: Neighbours that go together; see `sample_token_indices`.
        kinds: How arguments of the blocks follow their tokens; see `drop_tokens`.
        rngs: As of `dropping_block`; for models with lists that hand on neither.

    Returns:
        A new model of the same kind; `model` is as before.

    Raises:
        ValueError: If no layer is selected or the numbers do not fit together.

    Example:
        >>> model = models.GPT(vocab_size=16, max_length=8, num_layers=4, width=8,
        ...                    num_heads=2, rngs=nnx.Rngs(0))
        >>> dropping = with_random_ltd(model, num_kept=4)
        >>> keys = jax.random.split(jax.random.key(0), 1)
        >>> dropping(jnp.zeros((1, 8), jnp.int32), keys=keys).shape
        (1, 8, 16)

    References:
        Yao et al., Random-LTD, 2022, https://arxiv.org/abs/2211.11586
    """
    if not isinstance(num_kept, Sequence):
        num_kept = operator.index(num_kept)  # schedules may give NumPy's integers
    layers = list(_layers_of(model))
    where = _default_where(layers, num_kept) if where is None else where
    if rngs is not None and any(layer.stacked for layer in layers):
        raise ValueError(
            "rngs would be state of a single layer, but the model has a stack of them; "
            "leave rngs out and call the model with keys, one a row."
        )
    chosen = {
        path: _options(kept, _place(path), always_keep, group, kinds)
        for path, kept in _select(layers, where, num_kept).items()
    }

    def convert(path, node):
        path = tuple(path)
        return _convert(node, chosen[path], rngs) if path in chosen else node

    return nnx.recursive_map(convert, model)


def _place(path):
    """What tells a block's draws from those of others and from its own dropout."""
    return zlib.crc32(repr(("random_ltd", *path)).encode()) >> 1


class _Layer(NamedTuple):
    path: Path
    index: int | None  # in its stack or list
    group: Path | None  # path of the stack or list
    stacked: bool


def _layers_of(model) -> Iterator[_Layer]:
    """Every module that could drop, outer ones first; a stack counts as its layers."""
    modules = [(tuple(path), node) for path, node in nnx.iter_modules(model) if path]
    for path, node in sorted(modules, key=lambda item: len(item[0])):
        if isinstance(path[-1], int):
            yield _Layer(path, path[-1], path[:-1], stacked=False)
        elif isinstance(node, models.Block) and node.norm1.scale.ndim == 2:
            for index in range(node.norm1.scale.shape[0]):
                yield _Layer(path, index, path, stacked=True)
        else:
            yield _Layer(path, None, None, stacked=False)


def _default_where(layers, num_kept) -> Where:
    """All but the first and last of the model's one row of layers."""
    outermost = [
        layer
        for layer in layers
        if layer.group is not None and not any(isinstance(p, int) for p in layer.group)
    ]
    counts = {layer.group: 0 for layer in outermost}
    for layer in outermost:
        counts[layer.group] += 1
    counts = {group: count for group, count in counts.items() if count > 2}
    if len(counts) != 1:
        raise ValueError(
            f"the model has {len(counts)} stacks or lists of at least 3 modules "
            f"({sorted(map(repr, counts))}), so its middle layers are not plain; "
            "select layers by `where`."
        )
    [(group, count)] = counts.items()
    first = 1 if isinstance(num_kept, int) else 0
    return lambda path, index: (
        index is not None
        and group in (path, path[:-1])
        and first <= index < count - first
    )


def _select(layers, where, num_kept):
    """Kept tokens of each selected module: a number, or one a layer for a stack."""
    chosen: dict[Path, Any] = {}
    for layer in layers:
        inside = any(layer.path[: len(p)] == p for p in chosen if p != layer.path)
        kept = None
        if not inside and where(layer.path, layer.index):
            kept = _kept_of(num_kept, layer)
        if layer.stacked and not inside:
            chosen[layer.path] = (*chosen.get(layer.path, ()), kept)
        elif kept is not None:
            chosen[layer.path] = kept
    chosen = {
        path: kept
        for path, kept in chosen.items()
        if not isinstance(kept, tuple) or set(kept) != {None}
    }
    if not chosen:
        raise ValueError(
            f"no layer was selected among {sorted({x.path for x in layers}, key=repr)};"
            " random-LTD needs at least one. Paths are tuples of names and indices."
        )
    return chosen


def _kept_of(num_kept, layer):
    if isinstance(num_kept, int):
        return num_kept
    if layer.index is None or layer.index >= len(num_kept):
        raise ValueError(
            f"num_kept has {len(num_kept)} entries, but the layer at {layer.path} has "
            f"the index {layer.index}; give one entry a layer."
        )
    return num_kept[layer.index]
