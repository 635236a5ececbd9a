"""1-bit LAMB: layer coefficients learned in the warm-up, momentum as one bit after it.

Conglong Li et al., "1-bit LAMB: communication efficient large-scale large-batch
training with LAMB's convergence speed", https://arxiv.org/abs/2104.06069, algorithm 1.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dataeff_jax import collectives, typing
from dataeff_jax.optimizers import (
    _clipping,
    _compressed_mean,
    _lamb,
    _onebit_adam,
)


class OneBitLambState(NamedTuple):
    """State of 1-bit LAMB; values of layers have shape [1, ..] or [L, 1, ..]."""

    count: jax.Array  # int32[], updates done
    nu_count: jax.Array  # int32[], updates of nu: no more after the freeze
    mu: optax.Updates  # f32, equal on all devices
    nu: optax.Updates  # f32, equal on all devices
    nu_fresh: optax.Updates  # f32, goes on from nu with reconstructed gradients
    coefficient: optax.Updates  # f32, running mean of the layers' trust ratios
    coefficient_count: optax.Updates  # int32, ratios in that mean
    factor: optax.Updates  # f32, what the ratios were multiplied with last
    momentum_scale: optax.Updates  # f32, brings the layers' momenta to one size
    feedback: collectives.ErrorFeedback  # f32[N, ...], P(axis)
    clip: _clipping.SharedNormState | optax.EmptyState


def _fuse(tree) -> dict[str, jax.Array]:
    """All leaves as one vector, under one scale."""
    leaves = [x.astype(jnp.float32).reshape(-1) for x in jax.tree.leaves(tree)]
    return {"fused": jnp.concatenate(leaves) if leaves else jnp.zeros([0])}


def _unfuse(fused: dict[str, jax.Array], like):
    leaves, structure = jax.tree.flatten(like)
    ends = np.cumsum([x.size for x in leaves])[:-1]
    pieces = jnp.split(fused["fused"], ends)
    pieces = [p.reshape(x.shape) for p, x in zip(pieces, leaves, strict=True)]
    return jax.tree.unflatten(structure, pieces)


class _Layers:
    """Sums over layers: over a leaf, or each slice of a stacked one."""

    def __init__(self, is_stacked):
        self._is_stacked = is_stacked

    def map(self, function, tree, *rest):
        """Apply ``function(stacked, leaf, *leaves)``."""

        def of(path, *leaves):
            stacked = self._is_stacked is not None and self._is_stacked(path)
            return function(stacked, *leaves)

        return jax.tree_util.tree_map_with_path(of, tree, *rest)

    def norms(self, tree):
        """Norm of every layer, with axes of one kept."""
        return self.map(lambda s, x: _lamb.layer_norms(x, stacked=s), tree)

    def full(self, tree, value, dtype):
        """A number for every layer."""

        def of(stacked, x):
            shape = tuple(
                n if stacked and axis == 0 else 1 for axis, n in enumerate(x.shape)
            )
            return jnp.full(shape, value, dtype)

        return self.map(of, tree)

    def reduce(self, how, tree):
        """Reduce every layer to a number: ``"max"``, ``"mean"`` or ``"q0.99"``."""

        def of(stacked, x):
            axes = tuple(range(1, x.ndim)) if stacked else tuple(range(x.ndim))
            if not x.size or not axes:
                return x if x.size else jnp.ones((1,) * x.ndim, x.dtype)
            if how == "q0.99":
                return jnp.quantile(x, 0.99, axis=axes, keepdims=True)
            return {"max": jnp.max, "mean": jnp.mean}[how](x, axes, keepdims=True)

        return self.map(of, tree)


def _ratio(numerator, denominator):
    """Quotient of two norms; 1 where either is 0."""
    zero = (numerator == 0) | (denominator == 0)
    return jnp.where(zero, 1, numerator / jnp.where(zero, 1, denominator))


def onebit_lamb(
    learning_rate: optax.ScalarOrSchedule | None,
    *,
    freeze_step: int,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    mask: Any = None,
    is_stacked: Callable[[Any], bool] | None = None,
    axis_name: typing.AxisName | None = None,
    compression: collectives.Compression | None = None,
    max_coeff: float | None = 10.0,
    min_coeff: float | None = 0.01,
    coeff_beta: float = 0.9,
    factor_max: float = 4.0,
    factor_min: float = 0.5,
    factor_threshold: float = 0.1,
    factor_reduction: Literal["max", "mean", "q0.99"] = "max",
    bias_correction: Literal["frozen", "none"] = "frozen",
    zero_variance: Literal["mask", "keep"] = "mask",
    momentum_mask: Any = None,
    max_grad_norm: float | None = None,
    stage: Literal["dynamic", "warmup", "compressed"] | int = "dynamic",
    parity: Literal["deepspeed"] | None = None,
    force_compress: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Builds 1-bit LAMB, which averages over devices by itself.

    The first ``freeze_step`` updates are LAMB's on the exact mean of the gradients, and
    a running mean of each layer's trust ratio is kept. Then momentum travels as in
    :func:`onebit_adam`, the variance in the denominator stays as it is, and the layer's
    mean ratio is multiplied with a bounded factor: how much larger the denominator is
    than one whose variance goes on with the gradients reconstructed from the momentum.

    It owns rate and decay, since the ratio needs the whole update. The rate may be
    given by ``update(learning_rate=...)``, the stage by ``stage=``. A step that is not
    finite on any device changes nothing on all.

    Args:
      learning_rate: a number, a schedule of the step, or None where ``update`` gets it.
      freeze_step: updates before compression begins.
      b1: decay of the mean of gradients.
      b2: decay of the mean of squared gradients.
      eps: added to the root in the denominator.
      weight_decay: strength of the decay, inside the trust ratio.
      mask: tree of bool, or ``params -> tree of bool``: True where weights decay.
      is_stacked: ``path -> bool``, whether a leaf stacks layers on its first axis: each
        has ratios, and scales of messages, of its own.
      axis_name: the mesh axis, or (axis of nodes, axis inside a node); None means one
        device and no compression.
      compression: what is compressed and how; None for the defaults.
      max_coeff: largest trust ratio in the warm-up; None for none.
      min_coeff: smallest trust ratio in the warm-up; None for none.
      coeff_beta: decay of the running mean of ratios, whose bias is corrected.
      factor_max: largest factor in the compressed stage.
      factor_min: smallest factor in the compressed stage.
      factor_threshold: most that the factor changes in a step, relative.
      factor_reduction: of the elements' factors to the layer's. ``"max"`` is the
        paper's; one element whose gradients end, such as a rare word's, decides it.
      bias_correction: as of :func:`onebit_adam`; with ``"none"`` neither moment is
        corrected, in the warm-up either.
      zero_variance: as of :func:`onebit_adam`.
      momentum_mask: as of :func:`onebit_adam`.
      max_grad_norm: as of :func:`onebit_adam`.
      stage: as of :func:`onebit_adam`.
      parity: ``"deepspeed"``, its conventions: one scale for all leaves together after
        their momenta were brought to one size, padding that counts, no mask, no bias
        correction, a mean ratio without correction that skips ratios of exactly 1.
      force_compress: compress on one device too, for tests.

    Returns:
      The optimizer. State: 12 + 4 (1 + 1/N) bytes a parameter and device.

    Raises:
      ValueError: if a value is out of its range.

    Example:
      >>> tx = onebit_lamb(0.1, freeze_step=5)
      >>> params, loss = jnp.array([1.0, -2.0]), lambda w: jnp.sum(w**2)
      >>> state = tx.init(params)
      >>> for _ in range(10):
      ...     updates, state = tx.update(jax.grad(loss)(params), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> round(float(loss(params)), 2)
      0.47

    References:
      Li et al., "1-bit LAMB: communication efficient large-scale large-batch training
      with LAMB's convergence speed", https://arxiv.org/abs/2104.06069, 2021
    """
    _compressed_mean.check_ranges(
        b1=_compressed_mean.fraction(b1),
        b2=_compressed_mean.fraction(b2),
        coeff_beta=_compressed_mean.fraction(coeff_beta),
        eps=_compressed_mean.not_negative(eps),
        freeze_step=_compressed_mean.positive(freeze_step),
        max_grad_norm=_compressed_mean.not_negative(max_grad_norm),
        factor_threshold=_compressed_mean.not_negative(factor_threshold),
        factor_reduction=_compressed_mean.one_of(
            factor_reduction, "max", "mean", "q0.99"
        ),
        bias_correction=_compressed_mean.one_of(bias_correction, "frozen", "none"),
        zero_variance=_compressed_mean.one_of(zero_variance, "mask", "keep"),
        parity=_compressed_mean.one_of(parity, "deepspeed"),
    )
    built_for = _onebit_adam.resolve_stage(stage, freeze_step)
    original = parity is not None
    if original:
        compression = _compressed_mean.DEEPSPEED
        bias_correction, zero_variance = "none", "keep"
    if compression is None:
        compression = collectives.Compression(is_stacked=is_stacked)
    corrects, clipped = bias_correction == "frozen", max_grad_norm is not None
    layers = _Layers(is_stacked)

    def init_fn(params):
        sent = jax.eval_shape(_fuse, params) if original else params
        return OneBitLambState(
            count=jnp.zeros([], jnp.int32),
            nu_count=jnp.zeros([], jnp.int32),
            mu=_compressed_mean.zeros_for(params),
            nu=_compressed_mean.zeros_for(params),
            nu_fresh=_compressed_mean.zeros_for(params),
            coefficient=layers.full(params, 0, jnp.float32),
            coefficient_count=layers.full(params, 0, jnp.int32),
            factor=layers.full(params, 1, jnp.float32),
            momentum_scale=layers.full(params, 1, jnp.float32),
            feedback=collectives.error_feedback(
                sent, axis_name, compression=compression
            ),
            clip=_clipping.init_shared_norm() if clipped else optax.EmptyState(),
        )

    def corrected(moment, decay, count):
        return optax.tree.bias_correction(moment, decay, count) if corrects else moment

    def denominator(nu, count):
        nu = corrected(nu, b2, count)
        return jax.tree.map(lambda v: jnp.sqrt(v) + eps, nu)

    def with_decay(adam, params):
        if isinstance(weight_decay, int | float) and weight_decay == 0:
            return adam
        decays = _compressed_mean.resolve_mask(mask, params)
        if decays is None:
            decays = jax.tree.map(lambda _: True, params)
        return jax.tree.map(
            lambda u, p, d: u + weight_decay * p.astype(jnp.float32) if d else u,
            adam,
            params,
            decays,
        )

    def warmup(grads, state, params, rate):
        mean, clip = _compressed_mean.exact_mean(grads, axis_name), state.clip
        if clipped:
            mean, clip = _clipping.clip_mean(
                mean, grads, clip, max_norm=max_grad_norm, axis_name=axis_name
            )
        mu, nu = _compressed_mean.update_moments(mean, state.mu, state.nu, b1, b2)
        count = optax.safe_increment(state.count)
        adam = jax.tree.map(
            jnp.divide, corrected(mu, b1, count), denominator(nu, count)
        )
        update = with_decay(adam, params)
        ratio = jax.tree.map(_ratio, layers.norms(params), layers.norms(update))
        if max_coeff is not None:
            ratio = jax.tree.map(lambda r: jnp.minimum(r, max_coeff), ratio)
        if min_coeff is not None:
            ratio = jax.tree.map(lambda r: jnp.maximum(r, min_coeff), ratio)
        updates = jax.tree.map(lambda u, r: -rate * (r * u), update, ratio)
        # The original leaves ratios of exactly 1 out of the mean.
        counts = jax.tree.map(lambda r: (r != 1) | (not original), ratio)
        coefficient = jax.tree.map(
            lambda c, r, new: jnp.where(new, coeff_beta * c + (1 - coeff_beta) * r, c),
            state.coefficient,
            ratio,
            counts,
        )
        return updates, state._replace(
            count=count,
            nu_count=optax.safe_increment(state.nu_count),
            mu=mu,
            nu=nu,
            coefficient=coefficient,
            coefficient_count=jax.tree.map(
                lambda n, new: n + new.astype(jnp.int32),
                state.coefficient_count,
                counts,
            ),
            clip=clip,
        )

    def mean_ratio(state):
        if original:
            return state.coefficient

        def of(coefficient, count):
            weight = 1 - coeff_beta ** count.astype(jnp.float32)
            return jnp.where(
                count > 0, coefficient / jnp.where(count > 0, weight, 1), 1
            )

        return jax.tree.map(of, state.coefficient, state.coefficient_count)

    def momentum_scale(state, first):
        """How much to scale each layer's momentum so that all have one size."""
        if not original:
            return state.momentum_scale
        sizes = jax.tree.map(
            lambda norm, m: norm / jnp.sqrt(jnp.float32(max(m.size // norm.size, 1))),
            layers.norms(state.mu),
            state.mu,
        )
        flat = jnp.concatenate([x.reshape(-1) for x in jax.tree.leaves(sizes)])
        mean = jnp.mean(flat)
        fresh = jax.tree.map(lambda x: _ratio(mean, x), sizes)
        return _compressed_mean.select(first, fresh, state.momentum_scale)

    def synced_momentum(grads, state, scale):
        mine = jax.tree.map(
            lambda m, g, k: k * (b1 * m + (1 - b1) * g.astype(jnp.float32)),
            state.mu,
            grads,
            scale,
        )
        active = _compressed_mean.active_coordinates(
            state.nu, momentum_mask, zero_variance == "mask"
        )
        sent, sent_active = mine, active
        if original:
            sent = _fuse(mine)
            sent_active = (
                None if active is None else {"fused": _fuse(active)["fused"] > 0}
            )
        mean, feedback = _compressed_mean.compressed_mean(
            sent,
            axis_name,
            state.feedback,
            compression=compression,
            active=sent_active,
            force_compress=force_compress,
        )
        mean = _unfuse(mean, mine) if original else mean
        return jax.tree.map(jnp.divide, mean, scale), feedback

    def bounded_factor(state, den, den_fresh, adam, update):
        factor = layers.reduce(
            factor_reduction, jax.tree.map(jnp.divide, den, den_fresh)
        )
        if not (isinstance(weight_decay, int | float) and weight_decay == 0):
            share = jax.tree.map(_ratio, layers.norms(adam), layers.norms(update))
            share = jax.tree.map(lambda s: jnp.minimum(s, 1), share)
            factor = jax.tree.map(lambda f, s: f * s + (1 - s), factor, share)

        def bound(f, last):
            f = jnp.clip(f, factor_min, factor_max)
            return jnp.clip(
                f, (1 - factor_threshold) * last, (1 + factor_threshold) * last
            )

        return jax.tree.map(bound, factor, state.factor)

    def compressed(grads, state, params, rate):
        clip = state.clip
        if clipped:
            grads, clip = _clipping.clip_local(
                grads, clip, max_norm=max_grad_norm, axis_name=axis_name
            )
        first = state.count == state.nu_count  # nu_fresh goes on from nu
        scale = momentum_scale(state, first)
        mu, feedback = synced_momentum(grads, state, scale)
        rebuilt = jax.tree.map(lambda m, old: (m - b1 * old) / (1 - b1), mu, state.mu)
        start = _compressed_mean.select(first, state.nu, state.nu_fresh)
        nu_fresh = optax.tree.update_moment_per_elem_norm(rebuilt, start, b2, 2)
        count = optax.safe_increment(state.count)
        den = denominator(state.nu, state.nu_count)
        den_fresh = denominator(nu_fresh, count)
        adam = jax.tree.map(jnp.divide, corrected(mu, b1, count), den)
        update = with_decay(adam, params)
        factor = bounded_factor(state, den, den_fresh, adam, update)
        updates = jax.tree.map(
            lambda u, r, f: -rate * (r * f * u), update, mean_ratio(state), factor
        )
        return updates, state._replace(
            count=count,
            mu=mu,
            nu_fresh=nu_fresh,
            factor=factor,
            momentum_scale=scale,
            feedback=feedback,
            clip=clip,
        )

    def update_fn(
        updates, state, params=None, *, learning_rate=None, stage=None, **extra_args
    ):
        del extra_args
        if params is None:
            raise ValueError("1-bit LAMB needs params: update(grads, state, params).")
        rate = _compressed_mean.rate_at(built_with, state.count, learning_rate)
        chosen = built_for if stage is None else stage
        updates = _compressed_mean.settle(updates, axis_name)
        rest = (params, jnp.asarray(rate, jnp.float32))
        return _onebit_adam.run_stage(
            chosen, freeze_step, warmup, compressed, updates, state, *rest
        )

    built_with = learning_rate
    return _compressed_mean.skip_nonfinite(
        optax.GradientTransformationExtraArgs(init_fn, update_fn)
    )
