"""The questions that every optimizer of this library must answer, asked in one place.

Each function takes ``make(axis_name, learning_rate) -> optimizer``, trains a small
problem with ``training.data_parallel_step`` and raises AssertionError, by way of
``numpy.testing``, where an answer is wrong.
"""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dataeff_jax import distributed, training, typing
from dataeff_jax.testing import _problems

Make = Callable[[typing.AxisName, Any], optax.GradientTransformation]


def _expect(truth: bool, text: str) -> None:
    if not truth:
        raise AssertionError(text)


def train(
    tx: optax.GradientTransformation,
    *,
    num_devices: int,
    num_steps: int,
    dtype: Any = jnp.float32,
    accumulation_steps: int = 1,
    state: training.TrainState | None = None,
    first_step: int = 0,
    extra: Callable[[int], dict[str, Any]] | None = None,
) -> tuple[training.TrainState, list[float], int]:
    """Trains the two-layer perceptron of :func:`mlp_loss` for some steps.

    Args:
      tx: the optimizer, communicating over ``"data"``.
      num_devices: of the mesh.
      num_steps: updates.
      dtype: of the parameters.
      accumulation_steps: micro-batches of an update.
      state: where to go on; None for a new one.
      first_step: number of the first update, which decides the batch.
      extra: step -> extra arguments of the update.

    Returns:
      The state, the losses before the updates, and how many programs were compiled.

    Example:
      >>> import optax
      >>> from dataeff_jax import optimizers
      >>> tx = optax.chain(optimizers.pmean_grads("data"), optax.sgd(0.01))
      >>> _, losses, compiled = train(tx, num_devices=1, num_steps=3)
      >>> len(losses), compiled
      (3, 1)
    """
    step = training.data_parallel_step(
        _problems.mlp_loss, tx, accumulation_steps=accumulation_steps
    )
    losses = []
    with jax.set_mesh(distributed.data_mesh(num_devices)):
        if state is None:
            params = _problems.mlp_params(dtype=dtype)
            state = training.TrainState.create(params, tx)
        batch = distributed.shard_batch(_problems.mlp_batch())
        for i in range(first_step, first_step + num_steps):
            state, metrics = step(
                state, batch, jax.random.key(0), **(extra(i) if extra else {})
            )
            losses.append(training.read_metrics(metrics)["loss"])
    compiled = getattr(step, "_cache_size")()  # noqa: B009, not in jax's type stubs
    return state, losses, compiled


def check_trains(make: Make, *, num_devices: int) -> None:
    """Checks that the loss falls, in one program, and types of the state stay.

    Args:
      make: ``(axis_name, learning_rate) -> optimizer``.
      num_devices: of the mesh.

    Raises:
      AssertionError: if not.

    Example:
      >>> from dataeff_jax import optimizers
      >>> check_trains(lambda axis, rate: optax.chain(
      ...     optimizers.pmean_grads(axis), optax.adam(rate)), num_devices=1)
    """
    tx = make("data", 3e-2)
    with jax.set_mesh(distributed.data_mesh(num_devices)):
        start = training.TrainState.create(_problems.mlp_params(), tx)
        types = jax.tree.map(jax.typeof, start)
    state, losses, compiled = train(
        tx, num_devices=num_devices, num_steps=20, state=start
    )
    # Dense Adam gets to 0.83 of the first loss, dense LAMB to 0.87.
    _expect(losses[-1] < losses[0] * 0.9, f"the loss went {losses[0]} -> {losses[-1]}")
    _expect(compiled == 1, f"{compiled} programs were compiled")
    with jax.set_mesh(distributed.data_mesh(num_devices)):
        _expect(jax.tree.map(jax.typeof, state) == types, "types of the state changed")
    for leaf in jax.tree.leaves(state.params):
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy, copies[0])


def check_keeps_dtype(make: Make, *, num_devices: int) -> None:
    """Checks that bfloat16 parameters stay so and that their training stays finite.

    Args:
      make: ``(axis_name, learning_rate) -> optimizer``.
      num_devices: of the mesh.

    Raises:
      AssertionError: if not.

    Example:
      >>> from dataeff_jax import optimizers
      >>> check_keeps_dtype(lambda axis, rate: optax.chain(
      ...     optimizers.pmean_grads(axis), optax.adam(rate)), num_devices=1)
    """
    state, losses, _ = train(
        make("data", 3e-2), num_devices=num_devices, num_steps=8, dtype=jnp.bfloat16
    )
    for leaf in jax.tree.leaves(state.params):
        _expect(leaf.dtype == jnp.bfloat16, f"a parameter became {leaf.dtype}")
    _expect(losses[-1] < losses[0], f"the loss went {losses[0]} -> {losses[-1]}")


def check_takes_any_rate(make: Make, *, num_devices: int) -> None:
    """Checks that a rate may be a number, a schedule, or injected, with one result.

    Args:
      make: ``(axis_name, learning_rate) -> optimizer``.
      num_devices: of the mesh.

    Raises:
      AssertionError: if not.

    Example:
      >>> from dataeff_jax import optimizers
      >>> check_takes_any_rate(lambda axis, rate: optax.chain(
      ...     optimizers.pmean_grads(axis), optax.adam(rate)), num_devices=1)
    """
    injected = optax.inject_hyperparams(
        lambda learning_rate: make("data", learning_rate)
    )
    optimizers = (
        make("data", 1e-2),
        make("data", optax.constant_schedule(1e-2)),
        injected(learning_rate=1e-2),
    )
    params = [
        train(tx, num_devices=num_devices, num_steps=6)[0].params for tx in optimizers
    ]
    for other in params[1:]:
        # A constant folded by the compiler may round differently from an argument, and
        # a sign at 0 may turn then: one step of 1e-2 at most.
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), params[0], other
        )


def check_accumulates(make: Make, *, num_devices: int) -> None:
    """Checks that micro-batches count as one step with the same result.

    Args:
      make: ``(axis_name, learning_rate) -> optimizer``.
      num_devices: of the mesh, at most 8.

    Raises:
      AssertionError: if not.

    Example:
      >>> from dataeff_jax import optimizers
      >>> check_accumulates(lambda axis, rate: optax.chain(
      ...     optimizers.pmean_grads(axis), optax.adam(rate)), num_devices=1)
    """
    whole, parts = (
        train(
            make("data", 1e-2),
            num_devices=num_devices,
            num_steps=6,
            accumulation_steps=count,
        )[0]
        for count in (1, 2)
    )
    _expect(int(parts.step) == 6, "micro-batches were counted as steps")
    # Sums in another order; a sign at 0 may turn.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4),
        whole.params,
        parts.params,
    )


def check_resumes(make: Make, directory: pathlib.Path, *, num_devices: int) -> None:
    """Checks that a run restored at any of several steps goes on bit by bit.

    Args:
      make: ``(axis_name, learning_rate) -> optimizer``.
      directory: an empty one.
      num_devices: of the mesh.

    Raises:
      AssertionError: if not.

    Example:
      >>> import tempfile
      >>> from dataeff_jax import optimizers
      >>> check_resumes(lambda axis, rate: optax.chain(
      ...     optimizers.pmean_grads(axis), optax.adam(rate)),
      ...     pathlib.Path(tempfile.mkdtemp()), num_devices=1)
    """
    tx, saved_at, last = make("data", 1e-2), (3, 6, 9, 11), 14
    with training.Checkpoints(directory, keep=len(saved_at)) as checkpoints:
        state, first = None, 0
        for stop in (*saved_at, last):
            state, _, _ = train(
                tx,
                num_devices=num_devices,
                num_steps=stop - first,
                first_step=first,
                state=state,
            )
            first = stop
            if stop != last:
                checkpoints.save(stop, state, {})
        unbroken = state
        with jax.set_mesh(distributed.data_mesh(num_devices)):
            like = training.TrainState.create(_problems.mlp_params(), tx)
        for stop in saved_at:
            state, _ = checkpoints.restore(like, step=stop)
            state, _, _ = train(
                tx,
                num_devices=num_devices,
                num_steps=last - stop,
                first_step=stop,
                state=state,
            )
            jax.tree.map(np.testing.assert_array_equal, state, unbroken)
