"""0/1 Adam: one bit while the variance settles, then local steps between messages.

Yucheng Lu et al., "Maximizing communication efficiency for large-scale training via
0/1 Adam", https://arxiv.org/abs/2202.06009, algorithm 1.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dataeff_jax import collectives, typing
from dataeff_jax.optimizers import (
    _clipping,
    _compressed_mean,
    _zero_one_schedule,
)


class ZeroOneAdamState(NamedTuple):
    """State of 0/1 Adam.

    ``params`` are the anchor: where all devices were at the last synchronisation. The
    parameters that a device takes its gradient at are :meth:`local_params`.
    """

    count: jax.Array  # int32[], updates done
    nu_count: jax.Array  # int32[], updates of nu
    mu: optax.Updates  # f32, momentum at the last synchronisation, equal on all devices
    nu: optax.Updates  # f32, equal on all devices
    local_mu: optax.Updates  # f32[N, ...], P(axis), momentum of each device since then
    drift: optax.Updates  # f32[N, ...], P(axis), rate times momentum, summed since then
    rate_sum: optax.Updates  # f32[] a leaf, the rates alone, summed alike
    decay: optax.Updates  # f32[] a leaf, what weight decay has left since then
    unusable: jax.Array  # bool[N], P(axis), a gradient was not finite since then
    went_local: jax.Array  # bool[], local steps have begun
    nu_scale: jax.Array  # f32[], corrects the bias of nu
    eps: jax.Array  # f32[]
    feedback: collectives.ErrorFeedback  # f32[N, ...], P(axis)
    clip: _clipping.SharedNormState | optax.EmptyState

    def local_params(self, params: typing.Params) -> typing.Params:
        """Returns the parameters at which this device takes its gradient.

        Args:
          params: the anchor. Leaves that the state does not know stay as they are.

        Returns:
          ``decay * params - drift / (sqrt(nu) + eps)``, which differ between devices.
        """

        def leaf(nu, p, drift, decay):
            if isinstance(nu, optax.MaskedNode):
                return p
            den = jnp.sqrt(nu * self.nu_scale) + self.eps
            return (decay * p.astype(jnp.float32) - drift[0] / den).astype(p.dtype)

        return jax.tree.map(
            leaf,
            self.nu,
            params,
            self.drift,
            self.decay,
            is_leaf=lambda x: isinstance(x, optax.MaskedNode),
        )


def local_params(params: typing.Params, opt_state: optax.OptState) -> typing.Params:
    """The parameters at which a device takes its gradient, inside ``shard_map``.

    With an optimizer whose devices go on by themselves between messages
    (:func:`zero_one_adam`) they differ from the ``params`` that all hold; with any
    other they are the same. ``training.data_parallel_step`` calls it; a loop of your
    own must, too.

    Args:
      params: as given to ``update``.
      opt_state: the optimizer's state, chains included.

    Returns:
      The device's own parameters.

    Example:
      >>> params = {"w": jnp.ones(2)}
      >>> local_params(params, optax.adam(0.1).init(params)) is params
      True
    """
    has = lambda x: isinstance(x, ZeroOneAdamState)  # noqa: E731
    for state in jax.tree.leaves(opt_state, is_leaf=has):
        if has(state):
            params = state.local_params(params)
    return params


def zero_one_adam(
    learning_rate: optax.ScalarOrSchedule | None,
    *,
    var_freeze_step: int,
    var_update_scaler: int = 16,
    local_step_scaler: int = 32768,
    local_step_clipper: int = 16,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Any = None,
    axis_name: typing.AxisName | None = None,
    compression: collectives.Compression | None = None,
    bias_correction: Literal["frozen", "none"] = "frozen",
    zero_variance: Literal["mask", "keep"] = "mask",
    momentum_mask: Any = None,
    max_grad_norm: float | None = None,
    stage: Literal["dynamic", "full", "onebit", "local", "sync"] | int = "dynamic",
    parity: Literal["deepspeed"] | None = None,
    force_compress: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Builds 0/1 Adam, which averages over devices by itself, and not at every step.

    :class:`ZeroOneSchedule` says what an update does. ``"full"``: Adam on the exact
    mean. ``"onebit"``: the gradient's mean travels as one bit, the variance stays.
    ``"local"``: nothing is sent; device i sums rate times momentum,
    ``u_i += rate m_i``, and takes its next gradient at ``params - u_i / sqrt(nu)``.
    ``"sync"``: the same, then ``u = mean(u_i)`` travels as one bit, ``params`` move by
    ``-u / sqrt(nu)`` and ``u / sum(rate)`` is everybody's momentum.

    Updates are 0 between synchronisations: ``params`` stay equal on all devices, may be
    saved or evaluated at any step, and gradients must be taken at
    :func:`local_params`. It owns rate and decay; the rate may be given by
    ``update(learning_rate=...)``, the kind of update by ``stage=``.

    A gradient that is not finite on any device changes nothing in a full or one-bit
    update. A local step has no message: the device leaves that gradient out, and at the
    synchronisation, told by all, the whole interval is dropped on all devices.

    Args:
      learning_rate: a number, a schedule of the step, or None where ``update`` gets it.
      var_freeze_step: of the schedule.
      var_update_scaler: of the schedule.
      local_step_scaler: of the schedule.
      local_step_clipper: of the schedule.
      b1: decay of the mean of gradients.
      b2: decay of the mean of squared gradients, by update of the variance.
      eps: added to the root in the denominator.
      weight_decay: strength of the decay, not part of the momentum.
      mask: tree of bool, or ``params -> tree of bool``: True where weights decay.
      axis_name: the mesh axis, or (axis of nodes, axis inside a node); None means one
        device and no compression.
      compression: what is compressed and how; None for the defaults. What is excluded
        is averaged exactly when the rest is.
      bias_correction: ``"frozen"``, the variance's bias is corrected by the number of
        its updates; ``"none"``.
      zero_variance: as of :func:`onebit_adam`.
      momentum_mask: as of :func:`onebit_adam`; holds in all stages but ``"full"``.
      max_grad_norm: as of :func:`onebit_adam`; a local step is clipped by the norm
        agreed at the last synchronisation.
      stage: ``"dynamic"``, chosen on the device by the count; or the kind of update
        that the program is compiled for, by name or as the number of updates done.
      parity: ``"deepspeed"``, its conventions: one scale a tensor, padding that counts,
        nothing excluded, no mask, no bias correction, decay that leaks into the
        momentum.
      force_compress: compress on one device too, for tests.

    Returns:
      The optimizer. State: 16 + 4 (1 + 1/N) bytes a parameter and device, 4 of which
      keep the momentum of the last synchronisation, typed as equal on all devices, to
      return to when an interval is dropped.

    Raises:
      ValueError: if a value is out of its range.

    Example:
      >>> tx = zero_one_adam(0.1, var_freeze_step=5, local_step_clipper=2)
      >>> params, loss = jnp.array([1.0, -2.0]), lambda w: jnp.sum(w**2)
      >>> state = tx.init(params)
      >>> for _ in range(10):
      ...     grads = jax.grad(loss)(local_params(params, state))
      ...     updates, state = tx.update(grads, state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> round(float(loss(params)), 2)
      1.14

    References:
      Lu et al., "Maximizing communication efficiency for large-scale training via 0/1
      Adam", https://arxiv.org/abs/2202.06009, 2022
    """
    _compressed_mean.check_ranges(
        b1=_compressed_mean.fraction(b1),
        b2=_compressed_mean.fraction(b2),
        eps=_compressed_mean.not_negative(eps),
        max_grad_norm=_compressed_mean.not_negative(max_grad_norm),
        bias_correction=_compressed_mean.one_of(bias_correction, "frozen", "none"),
        zero_variance=_compressed_mean.one_of(zero_variance, "mask", "keep"),
        parity=_compressed_mean.one_of(parity, "deepspeed"),
    )
    schedule = _zero_one_schedule.ZeroOneSchedule(
        var_freeze_step=var_freeze_step,
        var_update_scaler=var_update_scaler,
        local_step_scaler=local_step_scaler,
        local_step_clipper=local_step_clipper,
        parity=parity,
    )
    original = parity is not None
    if original:
        compression = _compressed_mean.DEEPSPEED
        bias_correction, zero_variance = "none", "keep"
    compression = compression or collectives.Compression()
    corrects, clipped = bias_correction == "frozen", max_grad_norm is not None
    f32 = jnp.float32

    def init_fn(params):
        return ZeroOneAdamState(
            count=jnp.zeros([], jnp.int32),
            nu_count=jnp.zeros([], jnp.int32),
            mu=_compressed_mean.zeros_for(params),
            nu=_compressed_mean.zeros_for(params),
            local_mu=_compressed_mean.per_device_zeros(params, axis_name),
            drift=_compressed_mean.per_device_zeros(params, axis_name),
            rate_sum=jax.tree.map(lambda _: jnp.zeros([], f32), params),
            decay=jax.tree.map(lambda _: jnp.ones([], f32), params),
            unusable=_compressed_mean.per_device_zeros(
                jnp.zeros([]), axis_name, jnp.bool
            ),
            went_local=jnp.array(False),
            nu_scale=jnp.ones([], f32),
            eps=jnp.asarray(eps, f32),
            feedback=collectives.error_feedback(
                params, axis_name, compression=compression
            ),
            clip=_clipping.init_shared_norm() if clipped else optax.EmptyState(),
        )

    def denominator(state):
        return jax.tree.map(lambda v: jnp.sqrt(v * state.nu_scale) + eps, state.nu)

    def active_in(state):
        return _compressed_mean.active_coordinates(
            state.nu, momentum_mask, zero_variance == "mask"
        )

    def mean_of(tree, state, active):
        return _compressed_mean.compressed_mean(
            tree,
            axis_name,
            state.feedback,
            compression=compression,
            active=active,
            force_compress=force_compress,
        )

    def decays_of(params):
        decays = _compressed_mean.resolve_mask(mask, params)
        return jax.tree.map(lambda _: True, params) if decays is None else decays

    def step_from(state, params, rate):
        """Adam's update from mu, and the state after it; neither if not finite."""
        mu = state.mu
        if corrects:
            mu = optax.tree.bias_correction(mu, b1, state.count)
        return jax.tree.map(
            lambda m, d, p, decays: (
                -rate * (m / d + (weight_decay * p.astype(f32) if decays else 0))
            ),
            mu,
            denominator(state),
            params,
            decays_of(params),
        )

    def guarded(updates, new, old):
        finite = _compressed_mean.all_finite(updates)
        zeros = jax.tree.map(jnp.zeros_like, updates)
        updates = _compressed_mean.select(finite, updates, zeros)
        return updates, _compressed_mean.select(finite, new, old)

    def full(grads, state, params, rate):
        mean, clip = _compressed_mean.exact_mean(grads, axis_name), state.clip
        if clipped:
            mean, clip = _clipping.clip_mean(
                mean, grads, clip, max_norm=max_grad_norm, axis_name=axis_name
            )
        mu, nu = _compressed_mean.update_moments(mean, state.mu, state.nu, b1, b2)
        nu_count = jnp.asarray(optax.safe_increment(state.nu_count))
        scale = state.nu_scale
        if corrects:
            scale = 1 / (1 - b2 ** nu_count.astype(f32))
        new = state._replace(
            count=optax.safe_increment(state.count),
            nu_count=nu_count,
            mu=mu,
            nu=nu,
            nu_scale=scale,
            eps=jnp.asarray(eps, f32),
            clip=clip,
        )
        return guarded(step_from(new, params, rate), new, state)

    def onebit(grads, state, params, rate):
        clip = state.clip
        if clipped:
            grads, clip = _clipping.clip_local(
                grads, clip, max_norm=max_grad_norm, axis_name=axis_name
            )
        mean, feedback = mean_of(grads, state, active_in(state))
        new = state._replace(
            count=optax.safe_increment(state.count),
            mu=optax.tree.update_moment(mean, state.mu, b1, 1),
            eps=jnp.asarray(eps, f32),
            feedback=feedback,
            clip=clip,
        )
        return guarded(step_from(new, params, rate), new, state)

    def go_local(state):
        """Momentum of each device is the common one; errors were of gradients."""
        first = ~state.went_local
        local_mu = jax.tree.map(
            lambda mine, m: jnp.where(first, m[None], mine), state.local_mu, state.mu
        )
        feedback = jax.tree.map(
            lambda e: jnp.where(first, jnp.zeros_like(e), e), state.feedback
        )
        return state._replace(
            local_mu=local_mu, feedback=feedback, went_local=jnp.array(True)
        )

    def advance(grads, state, params, rate):
        """The device's own step, by which params do not move."""
        state = go_local(state)._replace(eps=jnp.asarray(eps, f32))
        usable = _compressed_mean.all_finite(grads)
        count = jnp.asarray(optax.safe_increment(state.count))
        if clipped:
            grads = _clipping.clip_as_agreed(grads, state.clip, max_norm=max_grad_norm)
        active = active_in(state)
        if active is not None:
            grads = jax.tree.map(lambda g, a: jnp.where(a, g, 0), grads, active)
        local_mu = jax.tree.map(
            lambda m, g: b1 * m + (1 - b1) * g.astype(f32)[None], state.local_mu, grads
        )
        step = rate / (1 - b1 ** count.astype(f32)) if corrects else rate
        kept = jax.tree.map(
            lambda decays: 1 - rate * weight_decay if decays and not original else 1.0,
            decays_of(params),
        )
        drift = jax.tree.map(
            lambda u, m, k: k * u + step * m, state.drift, local_mu, kept
        )
        if original:  # decay is summed up with the momentum
            drift = jax.tree.map(
                lambda u, p, d, decays: (
                    u + (rate * weight_decay * d * p.astype(f32))[None] * decays
                ),
                drift,
                state.local_params(params),
                denominator(state),
                decays_of(params),
            )
        local_mu, drift = _compressed_mean.select(
            usable, (local_mu, drift), (state.local_mu, state.drift)
        )
        return state._replace(
            count=count,
            local_mu=local_mu,
            drift=drift,
            rate_sum=jax.tree.map(lambda s, k: k * s + step, state.rate_sum, kept),
            decay=jax.tree.map(lambda c, k: c * k, state.decay, kept),
            unusable=state.unusable | ~usable,
        )

    def local(grads, state, params, rate):
        state = advance(grads, state, params, rate)
        return jax.tree.map(lambda p: jnp.zeros(p.shape, f32), params), state

    def sync(grads, state, params, rate):
        norms = state.clip
        if clipped:
            _, norms = _clipping.clip_local(
                grads, norms, max_norm=max_grad_norm, axis_name=axis_name
            )
            known = jnp.isfinite(norms.global_norm)
            norms = _compressed_mean.select(known, norms, state.clip)
        state = advance(grads, state, params, rate)
        sent = jax.tree.map(
            lambda u: jnp.where(state.unusable[0], jnp.nan, u[0]), state.drift
        )
        mean, feedback = mean_of(sent, state, active_in(state))
        # Rates of 0 move nothing: what errors hold stays pending, too.
        moved = [total > 0 for total in jax.tree.leaves(state.rate_sum)]
        kept = _compressed_mean.all_finite(mean) & jnp.array(moved[:1]).all()
        updates = jax.tree.map(
            lambda p, u, d, c: jnp.where(kept, (c - 1) * p.astype(f32) - u / d, 0),
            params,
            mean,
            denominator(state),
            state.decay,
        )
        mu = jax.tree.map(
            lambda m, u, s: jnp.where(kept, u / jnp.where(s > 0, s, 1), m),
            state.mu,
            mean,
            state.rate_sum,
        )
        return updates, state._replace(
            mu=mu,
            local_mu=jax.tree.map(
                lambda m, old: jnp.broadcast_to(m[None], old.shape), mu, state.local_mu
            ),
            drift=jax.tree.map(jnp.zeros_like, state.drift),
            rate_sum=jax.tree.map(jnp.zeros_like, state.rate_sum),
            decay=jax.tree.map(jnp.ones_like, state.decay),
            unusable=jnp.zeros_like(state.unusable),
            feedback=_compressed_mean.select(kept, feedback, state.feedback),
            clip=norms,
        )

    kinds = (full, onebit, local, sync)

    def typed(kind):
        """All kinds return the same types: what differs, differs in each."""

        def run(grads, state, params, rate):
            updates, new = kind(grads, state, params, rate)
            per_device = ("local_mu", "drift", "unusable")
            typed = {
                name: _compressed_mean.vary_like_devices(getattr(new, name), axis_name)
                for name in per_device
            }
            return updates, new._replace(**typed)

        return run

    def update_fn(
        updates, state, params=None, *, learning_rate=None, stage=None, **extra_args
    ):
        del extra_args
        if params is None:
            raise ValueError("0/1 Adam needs params: update(grads, state, params).")
        rate = _compressed_mean.rate_at(built_with, state.count, learning_rate)
        rate = jnp.asarray(rate, f32)
        chosen = built_for if stage is None else stage
        if isinstance(chosen, int) and not isinstance(chosen, bool):
            chosen = schedule.kind(chosen)
        updates = _compressed_mean.settle(updates, axis_name)
        arguments = (updates, state, params, rate)
        if chosen == "dynamic":
            index = schedule.kind_on_device(state.count)
            return jax.lax.switch(index, [typed(kind) for kind in kinds], *arguments)
        if chosen not in _zero_one_schedule.KINDS:
            raise ValueError(
                f"stage={chosen!r} must be 'dynamic', one of"
                f" {_zero_one_schedule.KINDS}, or the number of updates done."
            )
        return typed(kinds[_zero_one_schedule.KINDS.index(chosen)])(*arguments)

    built_with, built_for = learning_rate, stage
    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
