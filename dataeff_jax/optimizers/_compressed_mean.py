"""What the compressed optimizers share: means, masks, the guard, the rate."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dataeff_jax import collectives, distributed, typing
from dataeff_jax.optimizers import _communication

# One scale per tensor and padding that counts, as DeepSpeed has it.
DEEPSPEED = collectives.Compression(
    segment="tensor", padding="counted", exclude=None, min_size=0
)


def num_devices(axis_name: typing.AxisName | None) -> int:
    """Devices that average together, inside ``shard_map``."""
    names = (axis_name,) if isinstance(axis_name, str) else axis_name or ()
    return math.prod(jax.lax.axis_size(name) for name in names)


def compressed_mean(
    tree, axis_name, feedback, *, compression, active=None, force_compress=False
):
    """Compressed mean; on one device the values themselves, unless forced."""
    if num_devices(axis_name) > 1 or force_compress:
        return collectives.compressed_pmean(
            tree, axis_name, feedback, compression=compression, active=active
        )
    mean = exact_mean(tree, axis_name)
    if active is not None:
        mean = jax.tree.map(lambda x, a: jnp.where(a, x, 0), mean, active)
    return mean, feedback


def exact_mean(tree, axis_name):
    """Mean in float32, in one collective."""
    tree = jax.tree.map(lambda x: x.astype(jnp.float32), tree)
    if axis_name is None:
        return tree
    return _communication.mean_over_devices(tree, axis_name)


def update_moments(grads, mu, nu, b1, b2):
    """Both moments of Adam, as optax computes them, in their own dtypes."""
    new_mu = optax.tree.update_moment(grads, mu, b1, 1)
    new_nu = optax.tree.update_moment_per_elem_norm(grads, nu, b2, 2)
    return optax.tree.cast_like(new_mu, mu), new_nu


def zeros_for(params, dtype=None):
    """Float32 (or given) zeros for each parameter."""
    dtype = jnp.float32 if dtype is None else dtype
    return jax.tree.map(lambda p: jnp.zeros_like(p, dtype=dtype), params)


def resolve_mask(mask: Any, tree: typing.PyTree) -> typing.PyTree | None:
    """A tree of bool: of a function of the parameters, or of a prefix of the tree."""
    if mask is None:
        return None
    found = mask(tree) if callable(mask) else mask
    # Told by the names that differ, not by the structures of whole trees.
    return jax.tree.map(lambda m, t: jax.tree.map(lambda _: m, t), found, tree)


def active_coordinates(nu, momentum_mask, mask_zero_variance: bool):
    """Where momentum may be other than 0; None for everywhere.

    A sign is never 0, so a coordinate that never had a gradient would get plus or minus
    the scale, divided by the root of a variance of 0.
    """
    mask = None
    if momentum_mask is not None:
        # Entries may be arrays of the leaf's shape or one bool for the whole leaf.
        mask = resolve_mask(momentum_mask, nu)
        mask = jax.tree.map(
            lambda m, v: jnp.broadcast_to(jnp.asarray(m, bool), v.shape), mask, nu
        )
    if not mask_zero_variance:
        return mask
    active = jax.tree.map(lambda v: v > 0, nu)
    if mask is None:
        return active
    return jax.tree.map(jnp.logical_and, active, mask)


def all_finite(tree) -> jax.Array:
    """Whether all values are finite, bool[]."""
    found = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(found)) if found else jnp.array(True)


def select(keep_new, new, old):
    """The new tree, or the old one."""
    return jax.tree.map(lambda a, b: jnp.where(keep_new, a, b), new, old)


def skip_nonfinite(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Leaves parameters and state as they are when an update is not finite.

    A NaN or infinity on one device makes the mean, and with it the update, not finite
    on all of them, so all skip the same step and nothing is sent to agree on it. The
    state keeps its bits, counters and errors included.

    Args:
      tx: an optimizer whose updates are equal on all devices.

    Returns:
      The optimizer with the guard; its state is that of ``tx``.

    Example:
      >>> tx = skip_nonfinite(optax.adam(0.1))
      >>> params = jnp.ones(2)
      >>> updates, state = tx.update(jnp.array([1.0, jnp.inf]), tx.init(params), params)
      >>> updates.tolist(), state[0].count.item()
      ([0.0, 0.0], 0)
    """
    tx = optax.with_extra_args_support(tx)

    def update_fn(updates, state, params=None, **extra_args):
        updates, new = tx.update(updates, state, params, **extra_args)
        finite = all_finite(updates)
        zeros = jax.tree.map(jnp.zeros_like, updates)
        return select(finite, updates, zeros), select(finite, new, state)

    return optax.GradientTransformationExtraArgs(tx.init, update_fn)


def rate_at(learning_rate, count, given):
    """The rate: of this update's argument, of the schedule, or the number."""
    if given is not None:
        return jnp.asarray(given, jnp.float32)
    if learning_rate is None:
        raise ValueError(
            "the optimizer was built without a rate; call"
            " update(grads, state, params, learning_rate=...)."
        )
    return learning_rate(count) if callable(learning_rate) else learning_rate


def scale_by_rate(learning_rate) -> optax.GradientTransformationExtraArgs:
    """Scales by minus the rate, which ``update(learning_rate=...)`` may give."""

    def init_fn(params):
        del params
        return optax.ScaleByScheduleState(count=jnp.zeros([], jnp.int32))

    def update_fn(updates, state, params=None, *, learning_rate=None, **extra_args):
        del params, extra_args
        rate = rate_at(built_with, state.count, learning_rate)
        count = optax.safe_increment(state.count)
        updates = jax.tree.map(lambda u: -rate * u, updates)
        return updates, optax.ScaleByScheduleState(count=count)

    built_with = learning_rate
    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def per_device_zeros(params, axis_name, dtype=jnp.float32):
    """Zeros ``[N, ...]`` for each parameter, ``P(axis)``; outside ``shard_map``."""
    devices, _ = collectives.mesh_sizes(axis_name)

    def leaf(p):
        shape = (devices, *p.shape)
        if axis_name is None:
            return jnp.zeros(shape, dtype)
        own = collectives.device_spec(axis_name)
        own = own if len(own) else (None,)
        sharding = jax.P(*own, *jax.typeof(p).sharding.spec)
        return jnp.zeros(shape, dtype, out_sharding=sharding)

    return jax.tree.map(leaf, params)


def settle(tree, axis_name):
    """Type gradients as equal along axes of one device, where nothing differs."""
    names = (axis_name,) if isinstance(axis_name, str) else axis_name or ()
    single = {name for name in names if jax.lax.axis_size(name) == 1}

    def leaf(x):
        typed = tuple(single & set(jax.typeof(x).manual_axis_type.varying))
        return jax.lax.pmean(x, typed) if typed else x

    return jax.tree.map(leaf, tree) if single else tree


def vary_like_devices(tree, axis_name):
    """Type values as different on the devices, where there are several."""
    names = (axis_name,) if isinstance(axis_name, str) else axis_name or ()
    several = tuple(name for name in names if jax.lax.axis_size(name) > 1)
    return distributed.vary(tree, several) if several else tree


def check_ranges(**values: tuple[Any, Callable[[Any], bool], str]) -> None:
    """Raise ValueError for a number out of its range; traced ones are not looked at."""
    for name, (value, allowed, text) in values.items():
        if value is None or isinstance(value, jax.Array):
            continue
        if not allowed(value):
            raise ValueError(f"{name}={value!r} must be {text}.")


def fraction(value: Any) -> tuple[Any, Callable[[Any], bool], str]:
    """A number of [0, 1), for :func:`check_ranges`."""
    return value, lambda x: 0 <= x < 1, "at least 0 and less than 1"


def not_negative(value: Any) -> tuple[Any, Callable[[Any], bool], str]:
    """A number of at least 0, for :func:`check_ranges`."""
    return value, lambda x: x >= 0, "at least 0"


def positive(value: Any) -> tuple[Any, Callable[[Any], bool], str]:
    """A number of at least 1, for :func:`check_ranges`."""
    return value, lambda x: x >= 1, "at least 1"


def one_of(value: Any, *choices: Any) -> tuple[Any, Callable[[Any], bool], str]:
    """One of some values, for :func:`check_ranges`."""
    return value, lambda x: x in choices, "one of " + ", ".join(map(repr, choices))
