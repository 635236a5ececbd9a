"""1-bit Adam: momentum travels as one bit once the variance has settled.

Hanlin Tang et al., "1-bit Adam: communication efficient large-scale training with
Adam's convergence speed", https://arxiv.org/abs/2102.02888, algorithm 1.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dataeff_jax import collectives, typing
from dataeff_jax.optimizers import _clipping, _compressed_mean

WARMUP, COMPRESSED = "warmup", "compressed"


class OneBitAdamState(NamedTuple):
    """State of 1-bit Adam."""

    count: jax.Array  # int32[], updates done
    nu_count: jax.Array  # int32[], updates of nu: no more after the freeze
    mu: optax.Updates  # f32, mean of gradients, equal on all devices
    nu: optax.Updates  # f32, mean of squared gradients, equal on all devices
    feedback: collectives.ErrorFeedback  # f32[N, ...], P(axis)
    clip: _clipping.SharedNormState | optax.EmptyState


def freeze_stage(step: int, freeze_step: int) -> str:
    """Names the stage of an update: what 1-bit Adam and LAMB take as ``stage``.

    A program compiled for one stage holds that stage's collectives alone.

    Args:
      step: updates done before, a Python integer.
      freeze_step: updates with an exact mean.

    Returns:
      ``"warmup"`` or ``"compressed"``.

    Example:
      >>> [freeze_stage(step, 2) for step in range(4)]
      ['warmup', 'warmup', 'compressed', 'compressed']
    """
    return WARMUP if step < freeze_step else COMPRESSED


def resolve_stage(stage: Any, freeze_step: Any) -> str:
    """The stage's name, of a name or of a Python integer: the updates done before."""
    if isinstance(stage, int) and not isinstance(stage, bool):
        return freeze_stage(stage, freeze_step)
    if stage not in ("dynamic", WARMUP, COMPRESSED):
        raise ValueError(
            f"stage={stage!r} must be 'warmup', 'compressed', 'dynamic', or the number"
            " of updates done."
        )
    return stage


def run_stage(stage, freeze_step, warmup, compressed, grads, state, *rest):
    """Run one of two functions ``(grads, state, *rest)``, chosen now or on the device.

    On the device the program holds the collectives of both.
    """
    stage = resolve_stage(stage, freeze_step)
    if stage == "dynamic":
        frozen = state.count >= freeze_step
        return jax.lax.cond(frozen, compressed, warmup, grads, state, *rest)
    run = warmup if stage == WARMUP else compressed
    return run(grads, state, *rest)


def _scale_by_onebit_adam(
    *,
    freeze_step,
    b1=0.9,
    b2=0.999,
    eps=1e-8,
    eps_root=0.0,
    axis_name=None,
    compression=None,
    bias_correction="frozen",
    zero_variance="mask",
    momentum_mask=None,
    max_grad_norm=None,
    mu_dtype=None,
    stage="dynamic",
    parity=None,
    force_compress=False,
):
    """`scale_by_onebit_adam` without the guard."""
    _compressed_mean.check_ranges(
        b1=_compressed_mean.fraction(b1),
        b2=_compressed_mean.fraction(b2),
        eps=_compressed_mean.not_negative(eps),
        freeze_step=_compressed_mean.positive(freeze_step),
        max_grad_norm=_compressed_mean.not_negative(max_grad_norm),
        bias_correction=_compressed_mean.one_of(bias_correction, "frozen", "none"),
        zero_variance=_compressed_mean.one_of(zero_variance, "mask", "keep"),
        parity=_compressed_mean.one_of(parity, "deepspeed"),
    )
    built_for = resolve_stage(stage, freeze_step)
    if parity is not None:
        compression = _compressed_mean.DEEPSPEED
        bias_correction, zero_variance = "none", "keep"
    compression = compression or collectives.Compression()
    clipped = max_grad_norm is not None

    def init_fn(params):
        return OneBitAdamState(
            count=jnp.zeros([], jnp.int32),
            nu_count=jnp.zeros([], jnp.int32),
            mu=_compressed_mean.zeros_for(params, mu_dtype),
            nu=_compressed_mean.zeros_for(params),
            feedback=collectives.error_feedback(
                params, axis_name, compression=compression
            ),
            clip=_clipping.init_shared_norm() if clipped else optax.EmptyState(),
        )

    def direction(mu, nu, count, nu_count):
        mu = optax.tree.cast(mu, jnp.float32)
        if bias_correction == "frozen":
            mu = optax.tree.bias_correction(mu, b1, count)
            nu = optax.tree.bias_correction(nu, b2, nu_count)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v + eps_root) + eps), mu, nu)

    def warmup(grads, state):
        mean, clip = _compressed_mean.exact_mean(grads, axis_name), state.clip
        if clipped:
            mean, clip = _clipping.clip_mean(
                mean, grads, clip, max_norm=max_grad_norm, axis_name=axis_name
            )
        mu, nu = _compressed_mean.update_moments(mean, state.mu, state.nu, b1, b2)
        count = optax.safe_increment(state.count)
        nu_count = optax.safe_increment(state.nu_count)
        updates = direction(mu, nu, count, nu_count)
        return updates, state._replace(
            count=count, nu_count=nu_count, mu=mu, nu=nu, clip=clip
        )

    def compressed(grads, state):
        clip = state.clip
        if clipped:
            grads, clip = _clipping.clip_local(
                grads, clip, max_norm=max_grad_norm, axis_name=axis_name
            )
        mine = jax.tree.map(
            lambda m, g: b1 * m.astype(jnp.float32) + (1 - b1) * g.astype(jnp.float32),
            state.mu,
            grads,
        )
        active = _compressed_mean.active_coordinates(
            state.nu, momentum_mask, zero_variance == "mask"
        )
        mean, feedback = _compressed_mean.compressed_mean(
            mine,
            axis_name,
            state.feedback,
            compression=compression,
            active=active,
            force_compress=force_compress,
        )
        count = optax.safe_increment(state.count)
        updates = direction(mean, state.nu, count, state.nu_count)
        mu = optax.tree.cast_like(mean, state.mu)
        return updates, state._replace(count=count, mu=mu, feedback=feedback, clip=clip)

    def update_fn(updates, state, params=None, *, stage=None, **extra_args):
        del params, extra_args
        chosen = built_for if stage is None else stage
        updates = _compressed_mean.settle(updates, axis_name)
        return run_stage(chosen, freeze_step, warmup, compressed, updates, state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def scale_by_onebit_adam(
    *,
    freeze_step: int,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    axis_name: typing.AxisName | None = None,
    compression: collectives.Compression | None = None,
    bias_correction: Literal["frozen", "none"] = "frozen",
    zero_variance: Literal["mask", "keep"] = "mask",
    momentum_mask: Any = None,
    max_grad_norm: float | None = None,
    mu_dtype: Any = None,
    stage: Literal["dynamic", "warmup", "compressed"] | int = "dynamic",
    parity: Literal["deepspeed"] | None = None,
    force_compress: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Scales gradients as 1-bit Adam, averaging them over devices.

    :func:`onebit_adam` without decay and rate; see there. Gradients are those of each
    device. A step whose gradient is not finite on any device gives updates of zero and
    leaves the state as it is.

    Args:
      freeze_step: as of :func:`onebit_adam`.
      b1: as of :func:`onebit_adam`.
      b2: as of :func:`onebit_adam`.
      eps: as of :func:`onebit_adam`.
      eps_root: as of :func:`onebit_adam`.
      axis_name: as of :func:`onebit_adam`.
      compression: as of :func:`onebit_adam`.
      bias_correction: as of :func:`onebit_adam`.
      zero_variance: as of :func:`onebit_adam`.
      momentum_mask: as of :func:`onebit_adam`.
      max_grad_norm: as of :func:`onebit_adam`.
      mu_dtype: as of :func:`onebit_adam`.
      stage: as of :func:`onebit_adam`.
      parity: as of :func:`onebit_adam`.
      force_compress: as of :func:`onebit_adam`.

    Returns:
      The transformation; updates are float32 and equal on all devices.

    Example:
      >>> tx = scale_by_onebit_adam(freeze_step=1)
      >>> params = {"w": jnp.ones(3)}
      >>> updates, state = tx.update(params, tx.init(params))
      >>> updates["w"].round(3).tolist()
      [1.0, 1.0, 1.0]
    """
    options = dict(locals())
    return _compressed_mean.skip_nonfinite(_scale_by_onebit_adam(**options))


def onebit_adam(
    learning_rate: optax.ScalarOrSchedule | None,
    *,
    freeze_step: int,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    weight_decay: float = 0.0,
    mask: Any = None,
    axis_name: typing.AxisName | None = None,
    compression: collectives.Compression | None = None,
    bias_correction: Literal["frozen", "none"] = "frozen",
    zero_variance: Literal["mask", "keep"] = "mask",
    momentum_mask: Any = None,
    max_grad_norm: float | None = None,
    mu_dtype: Any = None,
    stage: Literal["dynamic", "warmup", "compressed"] | int = "dynamic",
    parity: Literal["deepspeed"] | None = None,
    force_compress: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Builds 1-bit Adam, which averages over devices by itself.

    The first ``freeze_step`` updates are Adam's on the exact mean of the gradients.
    Then ``nu``, and the correction of its bias, stay as they are, and each device i
    contributes ``m_i = b1 mu + (1 - b1) g_i`` to a mean that travels as one bit a value
    with error feedback: ``mu = mean(m_i)``. Warm-up takes 15% to 25% of a run.

    Give it the gradients of each device (``distributed.local_value_and_grad``), inside
    ``shard_map``; no other link may average them. ``update`` takes ``learning_rate=``
    and ``stage=`` as extra arguments. Make the state outside ``shard_map``.

    Args:
      learning_rate: a number, a schedule of the step, or None where ``update`` gets it.
      freeze_step: updates before compression begins.
      b1: decay of the mean of gradients.
      b2: decay of the mean of squared gradients.
      eps: added to the root in the denominator.
      eps_root: added inside the root.
      weight_decay: strength of the decay, not part of the momentum.
      mask: tree of bool, or ``params -> tree of bool``: True where weights decay.
      axis_name: the mesh axis, or (axis of nodes, axis inside a node) for full
        precision inside a node; None means one device and no compression.
      compression: what is compressed and how; None for the defaults.
      bias_correction: ``"frozen"``, that of ``nu`` stops with ``nu``; ``"none"``.
      zero_variance: ``"mask"``, coordinates whose gradient was 0 in all of the warm-up
        keep a momentum of 0; ``"keep"`` lets them take giant steps.
      momentum_mask: tree of bool (arrays, or one bool a leaf), False where momentum
        stays 0 in the compressed stage.
      max_grad_norm: limit of the gradient's norm; the same factor on all devices.
        Where only local gradients are known their norms, which are larger, are
        corrected by the ratio seen in the warm-up. Sends one more float32.
      mu_dtype: of ``mu``; None for float32.
      stage: ``"dynamic"``, chosen on the device by the count; or the stage that the
        program is compiled for, by name or as the number of updates done.
      parity: ``"deepspeed"``, its conventions: one scale a tensor, padding that counts,
        nothing excluded, no mask, no bias correction.
      force_compress: compress on one device too, for tests.

    Returns:
      The optimizer. Errors take 4 (1 + 1/N) bytes a parameter and device.

    Raises:
      ValueError: if a value is out of its range.

    Example:
      >>> tx = onebit_adam(0.1, freeze_step=5)
      >>> params, loss = jnp.array([1.0, -2.0]), lambda w: jnp.sum(w**2)
      >>> state = tx.init(params)
      >>> for _ in range(10):
      ...     updates, state = tx.update(jax.grad(loss)(params), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> round(float(loss(params)), 2)
      1.14

    References:
      Tang et al., "1-bit Adam: communication efficient large-scale training with Adam's
      convergence speed", https://arxiv.org/abs/2102.02888, 2021
    """
    options = dict(locals())
    for name in ("learning_rate", "weight_decay", "mask"):
        del options[name]
    return _compressed_mean.skip_nonfinite(
        optax.chain(
            _scale_by_onebit_adam(**options),
            optax.add_decayed_weights(weight_decay, mask),
            _compressed_mean.scale_by_rate(learning_rate),
        )
    )
