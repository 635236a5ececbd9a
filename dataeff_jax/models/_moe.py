"""A block whose feed-forward network is a mixture of experts.

Every token goes to the `num_selected` experts that a router likes best, as long as they
have room. Each row of the batch is routed by itself, so nothing depends on the mesh or
on accumulation. Lepikhin et al., GShard, https://arxiv.org/abs/2006.16668; Fedus et
al., Switch Transformer, https://arxiv.org/abs/2101.03961.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from dataeff_jax import typing
from dataeff_jax.models import _attention, _block, _flops, _layers


class Routing(NamedTuple):
    """Where the tokens of each row go."""

    slots: typing.Array  # int32[B, S, K], expert * capacity + place; E * capacity: none
    gates: typing.Array  # float32[B, S, K], the share of each expert's output
    balance: typing.Array  # float32[B], 1 where all experts are chosen alike
    router_z: typing.Array  # float32[B], mean of logsumexp(logits)^2


def route(
    logits: typing.Array,
    *,
    num_selected: int,
    capacity: int,
    real: typing.Array | None = None,
) -> Routing:
    """Gives each token its experts and a place in each, first come first served.

    First choices of all tokens come before second choices. Gates are the router's
    probabilities, normalised over the selected where there are several.

    balance = E sum_e f_e P_e, with f_e the share of the choices that fell on e, before
    capacity, and P_e the mean probability of e.

    Args:
        logits: float32[B, S, E].
        num_selected: K, experts a token.
        capacity: C, tokens an expert takes of each row.
        real: bool[B, S], False for padding, which is not routed; None means all True.

    Returns:
        A `Routing`.

    Example:
        >>> route(jnp.eye(2)[None], num_selected=1, capacity=1).slots.ravel().tolist()
        [0, 1]
    """
    batch, size, num_experts = logits.shape
    if real is None:
        real = jnp.ones((batch, size), bool)
    weights = real.astype(jnp.float32)[..., None]
    probabilities = jax.nn.softmax(logits, axis=-1)
    gates, experts = jax.lax.top_k(probabilities, num_selected)  # [B, S, K]
    if num_selected > 1:
        gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
    chosen = jax.nn.one_hot(experts, num_experts, dtype=jnp.int32)  # [B, S, K, E]
    chosen = chosen * real[..., None, None]
    in_turn = jnp.swapaxes(chosen, 1, 2).reshape(batch, -1, num_experts)
    places = jnp.cumsum(in_turn, axis=1).reshape(batch, num_selected, size, num_experts)
    places = jnp.sum(jnp.swapaxes(places, 1, 2) * chosen, axis=-1) - 1  # [B, S, K]
    fits = (places >= 0) & (places < capacity)
    slots = jnp.where(fits, experts * capacity + places, num_experts * capacity)
    count = jnp.maximum(jnp.sum(weights, axis=1), 1)  # [B, 1]
    share = jnp.sum(chosen, axis=(1, 2)) / (num_selected * count)
    mean = jnp.sum(probabilities * weights, axis=1) / count
    z = jnp.square(jax.nn.logsumexp(logits, axis=-1, keepdims=True)) * weights
    return Routing(
        slots,
        gates * fits,
        balance=num_experts * jnp.sum(share * mean, axis=-1),
        router_z=jnp.sum(z, axis=(1, 2)) / count[:, 0],
    )


class ExpertLinear(nnx.Module):
    """One linear layer for each expert, x_e kernel_e + bias_e.

    Args:
        num_experts: E.
        in_width: Last axis of the input.
        out_width: Last axis of the output.
        stddev: Standard deviation of the kernels' normal initialiser.
        rngs: Source of the key, nnx.Rngs.

    Example:
        >>> layer = ExpertLinear(2, 3, 4, stddev=0.02, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((1, 2, 5, 3))).shape
        (1, 2, 5, 4)
    """

    def __init__(
        self,
        num_experts: int,
        in_width: int,
        out_width: int,
        *,
        stddev: float,
        rngs: nnx.Rngs,
    ):
        shape = (num_experts, in_width, out_width)
        draw = _layers.normal(stddev)
        self.kernel = nnx.Param(draw(rngs.params(), shape, jnp.float32))
        self.bias = nnx.Param(jnp.zeros((num_experts, out_width), jnp.float32))

    def __call__(self, x: typing.Array) -> typing.Array:
        """Applies the layers to x [B, E, C, in_width]."""
        y = jnp.einsum("becd,edf->becf", x, self.kernel[...].astype(x.dtype))
        return y + self.bias[...].astype(x.dtype)[None, :, None]


class MoEBlock(_block.Block):
    """A pre-norm `Block` with experts in place of its feed-forward network.

    An expert takes at most C = ceil(capacity_factor K S / E) tokens of a row, S being
    the tokens that the block sees; a token that finds no room gets only the residual.
    Calling it returns the auxiliary loss of each row as well.

    Args:
        num_experts: E.
        num_selected: K, experts a token.
        capacity_factor: Room in the experts over what equal loads would take.
        balance_weight: Of the load-balancing loss.
        router_z_weight: Of the loss that keeps the router's logits small.
        width: D.
        ffw_width: F of each expert.
        stddev: As of `Block`.
        residual_stddev: As of `Block`.
        rngs: Source of keys, nnx.Rngs.
        **kwargs: Further arguments of `Block`.

    Raises:
        ValueError: If a number is not possible.

    Example:
        >>> block = MoEBlock(num_experts=4, width=8, num_heads=2, ffw_width=16,
        ...                  rngs=nnx.Rngs(0))
        >>> x, auxiliary_loss = block(jnp.ones((1, 4, 8)))
        >>> x.shape, auxiliary_loss.shape
        ((1, 4, 8), (1,))

    References:
        Zoph et al., ST-MoE (router z-loss), 2022, https://arxiv.org/abs/2202.08906
    """

    def __init__(
        self,
        *,
        num_experts: int,
        num_selected: int = 2,
        capacity_factor: float = 1.25,
        balance_weight: float = 1e-2,
        router_z_weight: float = 1e-3,
        width: int,
        ffw_width: int,
        stddev: float = 0.02,
        residual_stddev: float | None = None,
        rngs: nnx.Rngs,
        **kwargs,
    ):
        if not 1 <= num_selected <= num_experts:
            raise ValueError(
                f"num_selected={num_selected} must be between 1 and num_experts="
                f"{num_experts}."
            )
        if capacity_factor <= 0:
            raise ValueError(f"capacity_factor={capacity_factor} must be positive.")
        if kwargs.get("norm", "pre") != "pre":
            raise ValueError("a mixture of experts is built for norm='pre' only.")
        out_stddev = stddev if residual_stddev is None else residual_stddev
        super().__init__(
            width=width,
            ffw_width=ffw_width,
            stddev=stddev,
            residual_stddev=residual_stddev,
            rngs=rngs,
            **kwargs,
        )
        del self.up, self.down
        self.router = _layers.Linear(width, num_experts, stddev=stddev, rngs=rngs)
        self.experts_up = ExpertLinear(
            num_experts, width, ffw_width, stddev=stddev, rngs=rngs
        )
        self.experts_down = ExpertLinear(
            num_experts, ffw_width, width, stddev=out_stddev, rngs=rngs
        )
        self.num_experts = num_experts
        self.num_selected = num_selected
        self.capacity_factor = capacity_factor
        self.balance_weight = balance_weight
        self.router_z_weight = router_z_weight

    def __call__(
        self,
        x: typing.Array,
        *,
        positions: typing.Array | None = None,
        segment_ids: typing.Array | None = None,
        lengths: typing.Array | None = None,
        keys: typing.KeyArray | None = None,
    ) -> tuple[typing.Array, typing.Array]:
        """Runs the block; arguments as of `Block`.

        Returns:
            ([B, S, D], the weighted auxiliary losses float32[B]).
        """
        masks = {"segment_ids": segment_ids, "lengths": lengths}
        x = x + self._drop(self._attend(self.norm1(x), positions, masks), keys, 0)
        segments = _attention._segments(segment_ids, lengths, x.shape[1])
        real = None if segments is None else segments > 0
        y, auxiliary_loss = self._mix(self.norm2(x), real)
        return x + self._drop(y, keys, 1), auxiliary_loss

    def _mix(self, x, real):
        capacity = _flops.expert_capacity(x.shape[1], **self.routing())
        found = route(
            self.router(x.astype(jnp.float32)),
            num_selected=self.num_selected,
            capacity=capacity,
            real=real,
        )
        y = _dispatch(x, found.slots, self.num_experts, capacity)
        y = jax.nn.gelu(self.experts_up(y), approximate=self.activation == "gelu_tanh")
        y = _combine(self.experts_down(y), found.slots, found.gates)
        loss = self.balance_weight * found.balance
        return y, loss + self.router_z_weight * found.router_z

    def routing(self) -> dict:
        """The numbers that decide how many tokens an expert computes."""
        names = ("num_experts", "num_selected", "capacity_factor")
        return {name: getattr(self, name) for name in names}


def _with_zero(x):
    """x [B, N, D] with a row of zeros behind it, for slots and tokens without any."""
    return jnp.pad(x, ((0, 0), (0, 1), (0, 0)))


def _rows_at(x, indices):
    """x [B, N, D] at [B, M] -> [B, M, D]."""
    return jax.vmap(lambda x, i: x.at[i].get(mode="promise_in_bounds"))(x, indices)


def _dispatch(x, slots, num_experts, capacity):
    """Tokens [B, S, D] in the slots of the experts, [B, E, C, D]."""
    batch, size, width = x.shape
    tokens = jnp.broadcast_to(jnp.arange(size)[None, :, None], slots.shape)
    empty = jnp.full((batch, num_experts * capacity + 1), size, jnp.int32)
    # Only the last slot, which stands for none, is given more than once.
    fill = jax.vmap(lambda e, s, t: e.at[s.ravel()].set(t.ravel()))
    token_of = fill(empty, slots, tokens)[:, :-1]
    rows = _rows_at(_with_zero(x), token_of)
    return rows.reshape(batch, num_experts, capacity, width)


def _combine(y, slots, gates):
    """Outputs [B, E, C, D] back at their tokens, weighted: [B, S, D]."""
    batch, size, selected = slots.shape
    y = _with_zero(y.reshape(batch, -1, y.shape[-1]))
    rows = _rows_at(y, slots.reshape(batch, -1)).reshape(batch, size, selected, -1)
    return jnp.einsum("bskd,bsk->bsd", rows, gates.astype(y.dtype))
