"""Checkpoints: asynchronous, atomic, and exact on any number of devices."""

import contextlib
import logging
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx
from orbax.checkpoint import checkpoint_managers

from dataeff_jax import typing
from dataeff_jax.training import _config, _state

CHECKPOINT_DIRECTORY = "checkpoints"
CONFIG_FILE = "config.json"

_TEMPORARY = ".orbax-checkpoint-tmp"
_logger = logging.getLogger(__name__)


def _name(path) -> str:
    """A dotted name, the same for dicts, NamedTuples and Flax states."""
    return ".".join(
        str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path
    )


def _named_leaves(tree: typing.PyTree) -> dict[str, Any]:
    """Leaves by name, so that what is stored depends on no Python class."""
    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    paths = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_variable)[0]
    names = [_name(path) for path, _ in paths]
    if len(set(names)) < len(names):
        raise ValueError(f"two leaves have the same name: {sorted(names)}.")
    return dict(zip(names, jax.tree.leaves(tree), strict=True))


def _items(state: _state.TrainState) -> dict[str, dict[str, Any]]:
    """Parameters apart from the rest, so that a model can be loaded alone."""
    return {
        "params": _named_leaves(state.params),
        "optimizer": _named_leaves({"step": state.step, "opt_state": state.opt_state}),
    }


def _abstract(leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _check_fits(what: str, stored: Mapping[str, Any], wanted: Mapping[str, Any]):
    """Raises unless names, shapes and dtypes are the same: nothing is cast silently."""
    missing, unknown = wanted.keys() - stored.keys(), stored.keys() - wanted.keys()
    if missing or unknown:
        raise ValueError(
            f"the checkpoint's {what} do not fit: missing {sorted(missing)}, not asked"
            f" for {sorted(unknown)}; present are {sorted(stored)}. Restore with the"
            " model and optimizer that the run was started with."
        )

    def of(leaf):
        return f"{jax.numpy.dtype(leaf.dtype).name}{list(leaf.shape)}"

    differing = [
        f"{name}: stored {of(stored[name])}, wanted {of(leaf)}"
        for name, leaf in wanted.items()
        if of(stored[name]) != of(leaf)
    ]
    if differing:
        raise ValueError(
            f"the checkpoint's {what} have other shapes or dtypes than asked for: "
            + "; ".join(differing)
        )


class Checkpoints:
    """The checkpoints of one run, the newest few of which are kept.

    Saving copies the state and writes it in the background; a checkpoint appears under
    its final name only when it is whole. What a killed run left half-written is never
    restored: it is reported and removed when the directory is opened again. Restoring
    works on any number of devices, and every leaf keeps its dtype and bits.

    Args:
      directory: where the checkpoints lie; made if needed.
      keep: how many of the newest to keep, at least 1.
      read_only: change nothing, not even leftovers of a run that may still be going.

    Raises:
      ValueError: if keep is less than 1.

    Example:
      >>> import tempfile, optax
      >>> state = _state.TrainState.create({"w": jax.numpy.ones(2)}, optax.sgd(0.1))
      >>> with Checkpoints(tempfile.mkdtemp(), keep=2) as checkpoints:
      ...     _ = checkpoints.save(5, state, {"tokens": 2**40})
      ...     checkpoints.restore_latest(state)[1]
      {'step': 5, 'tokens': 1099511627776}
    """

    def __init__(
        self, directory: str | pathlib.Path, *, keep: int = 2, read_only: bool = False
    ):
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1.")
        self.directory = pathlib.Path(directory).absolute()
        if not read_only:
            self._report_incomplete()
        self._manager = ocp.CheckpointManager(
            self.directory,
            item_handlers={
                "params": ocp.StandardCheckpointHandler(),
                "optimizer": ocp.StandardCheckpointHandler(),
                "loop": ocp.JsonCheckpointHandler(),
            },
            options=ocp.CheckpointManagerOptions(
                preservation_policy=checkpoint_managers.LatestN(keep),
                cleanup_tmp_directories=not read_only,
                create=not read_only,
            ),
        )

    def _report_incomplete(self) -> None:
        if jax.process_index() != 0:
            return
        for path in sorted(self.directory.glob(f"*{_TEMPORARY}*")):
            _logger.warning(
                "checkpoint of step %s is incomplete: the run ended while it was being"
                " written; it is ignored and removed from %s",
                path.name.split(_TEMPORARY)[0],
                self.directory,
            )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Returns the steps stored, oldest first, once what was saved is written."""
        self.wait()  # Orbax lists a step as soon as its writing starts
        return sorted(self._manager.all_steps())

    def save(
        self, step: int, state: _state.TrainState, loop: Mapping[str, Any]
    ) -> bool:
        """Starts writing a checkpoint; the state may be donated at once afterwards.

        In a run of several processes all must call it together.

        Args:
          step: optimizer steps done, a Python integer.
          state: the state after that step.
          loop: what else the loop needs (ledger, data position, config), in values that
            JSON can hold; integers of any size come back exact.

        Returns:
          False if the step is stored already, else True.
        """
        if step in self._manager.all_steps():
            return False
        items: dict[str, ocp.args.CheckpointArgs] = {
            "loop": ocp.args.JsonSave({"step": step, **loop})
        }
        for name, leaves in _items(state).items():
            items[name] = ocp.args.StandardSave(leaves)
        # Forced, since the caller decides when to save.
        return self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def _stored(self, step: int, item: str) -> Mapping[str, Any]:
        with self._naming(step):
            found = self._manager.item_metadata(step)
        metadata = found[item] if item in found else None
        if metadata is None:
            raise ValueError(
                f"the checkpoint {self.directory / str(step)} has no {item!r}; it was"
                " not written by this library, or part of it was deleted."
            )
        return metadata.tree if hasattr(metadata, "tree") else metadata

    def _restore(self, step: int, item: str, wanted: Mapping[str, Any]):
        _check_fits(item, self._stored(step, item), wanted)
        abstract = {name: _abstract(leaf) for name, leaf in wanted.items()}
        args = ocp.args.Composite(**{item: ocp.args.StandardRestore(abstract)})
        with self._naming(step):
            return self._manager.restore(step, args=args)[item]

    @contextlib.contextmanager
    def _naming(self, step: int) -> Iterator[None]:
        """Turns what Orbax says about damaged files into an error that names them."""
        try:
            yield
        except (KeyError, OSError, ValueError) as error:
            reason = str(error).replace("\n", " ")[:200]
            raise ValueError(
                f"the checkpoint {self.directory / str(step)} is damaged: {reason};"
                " delete it to use the one before."
            ) from error

    def _step(self, step: int | None) -> int:
        steps = self.steps()
        if not steps:
            raise ValueError(
                f"there is no checkpoint in {self.directory}; give the work directory"
                " of a run that has saved one."
            )
        if step is not None and step not in steps:
            raise ValueError(
                f"there is no checkpoint of step {step} in {self.directory}; there are"
                f" {steps}."
            )
        return steps[-1] if step is None else step

    def restore(
        self, like: _state.TrainState, *, step: int | None = None
    ) -> tuple[_state.TrainState, dict[str, Any]]:
        """Restores the state and the loop's values.

        Args:
          like: a state with the wanted shapes, dtypes and shardings, of arrays or of
            ``jax.ShapeDtypeStruct`` with ``sharding``.
          step: which checkpoint; None means the newest.

        Returns:
          The state and what :meth:`save` got as ``loop``, with ``step``.

        Raises:
          ValueError: if there is none, or names, shapes or dtypes differ.
        """
        step = self._step(step)
        leaves = {
            item: self._restore(step, item, wanted)
            for item, wanted in _items(like).items()
        }
        params = _like(like.params, leaves["params"])
        rest = _like(
            {"step": like.step, "opt_state": like.opt_state}, leaves["optimizer"]
        )
        state = _state.TrainState(rest["step"], params, rest["opt_state"])
        return state, self.loop(step)

    def restore_latest(
        self, like: _state.TrainState
    ) -> tuple[_state.TrainState, dict[str, Any]] | None:
        """Restores the newest checkpoint; None if there is none yet."""
        return self.restore(like) if self.steps() else None

    def loop(self, step: int | None = None) -> dict[str, Any]:
        """Reads only the loop's values of a checkpoint, the newest by default."""
        step = self._step(step)
        args = ocp.args.Composite(loop=ocp.args.JsonRestore())
        with self._naming(step):
            return self._manager.restore(step, args=args)["loop"]

    def restore_params(
        self, like: typing.Params, *, step: int | None = None
    ) -> typing.Params:
        """Restores the parameters alone, in the shapes and shardings of ``like``."""
        leaves = self._restore(self._step(step), "params", _named_leaves(like))
        return _like(like, leaves)

    def wait(self) -> None:
        """Waits until what was saved is written; raises if writing failed."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for the writing and closes the directory."""
        self._manager.close()


def _like(tree: typing.PyTree, leaves: Mapping[str, Any]) -> typing.PyTree:
    """Puts named leaves into the structure of a tree."""
    return jax.tree.unflatten(
        jax.tree.structure(tree), [leaves[name] for name in _named_leaves(tree)]
    )


def _model_block(workdir: pathlib.Path) -> dict[str, Any]:
    path = workdir / CONFIG_FILE
    if not path.is_file():
        raise ValueError(
            f"{workdir} has no {CONFIG_FILE}; give the work directory of a run."
        )
    config = _config.read_config(path)
    block = config.get("model")
    if not isinstance(block, dict) or not {"name", "kwargs"} <= block.keys():
        raise ValueError(
            f"{path} needs a key 'model' with 'name' and 'kwargs', but has"
            f" {sorted(config)} and model={block!r}."
        )
    return block


def restore(workdir: str | pathlib.Path, *, step: int | None = None) -> nnx.Module:
    """Builds the model of a finished or running run and loads its parameters.

    Args:
      workdir: work directory, with ``config.json`` and ``checkpoints``.
      step: which checkpoint; None means the newest.

    Returns:
      The model, on the default device.

    Raises:
      ValueError: if there is no config or checkpoint, the model is unknown, or the
        parameters do not fit it.

    Example:
      >>> restore("/nowhere")
      Traceback (most recent call last):
      ...
      ValueError: /nowhere has no config.json; give the work directory of a run.
    """
    from dataeff_jax import models

    workdir = pathlib.Path(workdir)
    block = _model_block(workdir)
    make = getattr(models, block["name"], None)
    if make is None:
        names = [name for name in dir(models) if name[:1].isupper()]
        raise ValueError(f"there is no model {block['name']!r}; there are {names}.")
    directory = workdir / CHECKPOINT_DIRECTORY
    if not directory.is_dir():
        raise ValueError(f"there is no checkpoint in {directory}; the run saved none.")
    model = make(**block["kwargs"], rngs=nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    with Checkpoints(directory, read_only=True) as checkpoints:
        nnx.update(model, checkpoints.restore_params(params, step=step))
    return model
