"""The transformer block that GPT, BERT and ViT share; `_stack` runs many of it."""

from typing import Literal

import jax.numpy as jnp
from flax import nnx

from dataeff_jax import typing
from dataeff_jax.models import _attention, _layers

Layers = Literal["scan", "unroll"]
Norm = Literal["pre", "post"]
Activation = Literal["gelu", "gelu_tanh"]
Positions = Literal["learned", "rope"]


class Block(nnx.Module):
    """Attention and a feed-forward network, each with a norm and a residual.

    Pre-norm (GPT-2, ViT): x + f(norm(x)). Post-norm (BERT): norm(x + f(x)). Dropout
    follows both f; probabilities inside attention are not dropped.

    Args:
        width: D.
        num_heads: H, divides D.
        ffw_width: F.
        causal: Whether tokens see only tokens before them.
        norm: "pre" or "post".
        activation: "gelu_tanh" (GPT-2) or "gelu" (exact: BERT, ViT).
        epsilon: Of the layer norms.
        rope: Whether queries and keys are rotated by their positions.
        dropout_rate: Of both residual branches.
        implementation: Of `attention`; None chooses by backend.
        stddev: Of the initialiser of kernels.
        residual_stddev: Of the two kernels that write to the residual stream.
        rngs: Source of keys, nnx.Rngs.

    Example:
        >>> block = Block(width=8, num_heads=2, ffw_width=16, rngs=nnx.Rngs(0))
        >>> block(jnp.ones((1, 4, 8))).shape
        (1, 4, 8)

    References:
        Vaswani et al., Attention is all you need, https://arxiv.org/abs/1706.03762
    """

    implementation: _attention.Implementation | None

    def __init__(
        self,
        *,
        width: int,
        num_heads: int,
        ffw_width: int,
        causal: bool = True,
        norm: Norm = "pre",
        activation: Activation = "gelu_tanh",
        epsilon: float = 1e-5,
        rope: bool = False,
        dropout_rate: float = 0.0,
        implementation: _attention.Implementation | None = None,
        stddev: float = 0.02,
        residual_stddev: float | None = None,
        rngs: nnx.Rngs,
    ):
        out_stddev = stddev if residual_stddev is None else residual_stddev
        self.norm1 = _layers.LayerNorm(width, epsilon=epsilon)
        self.qkv = _layers.Linear(width, 3 * width, stddev=stddev, rngs=rngs)
        self.out = _layers.Linear(width, width, stddev=out_stddev, rngs=rngs)
        self.norm2 = _layers.LayerNorm(width, epsilon=epsilon)
        self.up = _layers.Linear(width, ffw_width, stddev=stddev, rngs=rngs)
        self.down = _layers.Linear(ffw_width, width, stddev=out_stddev, rngs=rngs)
        self.num_heads = num_heads
        self.causal = causal
        self.norm = norm
        self.activation = activation
        self.rope = rope
        self.dropout_rate = dropout_rate
        self.implementation = implementation

    def __call__(
        self,
        x: typing.Array,
        *,
        positions: typing.Array | None = None,
        segment_ids: typing.Array | None = None,
        lengths: typing.Array | None = None,
        keys: typing.KeyArray | None = None,
    ) -> typing.Array:
        """Runs the block.

        Args:
            x: [B, S, D].
            positions: int32[B, S] for rotary positions; None means 0 to S - 1.
            segment_ids: int32[B, S], documents of a packed row, 0 for padding.
            lengths: int32[B], tokens of a row that are not padding.
            keys: One key a row, [B], already folded with the layer; None: no dropout.

        Returns:
            [B, S, D].
        """
        masks = {"segment_ids": segment_ids, "lengths": lengths}

        def attend(x):
            return self._drop(self._attend(x, positions, masks), keys, 0)

        def feed(x):
            return self._drop(self._feed(x), keys, 1)

        if self.norm == "pre":
            x = x + attend(self.norm1(x))
            return x + feed(self.norm2(x))
        x = self.norm1(x + attend(x))
        return self.norm2(x + feed(x))

    def layer_runs(
        self, num_layers: int, *, size: int, training: bool
    ) -> list[tuple["Block", int]]:
        """Runs of consecutive layers of a stack that compute alike.

        A subclass may tell layers apart by what is static in a block, such as the
        number of tokens that it sees; parameters play no part.

        Args:
            num_layers: L of the stack that this block stands for.
            size: S, tokens of a row.
            training: Whether there are keys.

        Returns:
            (block, number of layers) from the first layer to the last.
        """
        del size, training
        return [(self, num_layers)]

    def _drop(self, x, keys, place):
        if self.dropout_rate == 0.0:
            return x
        keys = _layers.fold_rows(keys, place)
        return _layers.dropout(x, rate=self.dropout_rate, keys=keys)

    def _attend(self, x, positions, masks):
        batch, size, width = x.shape
        qkv = self.qkv(x).reshape(batch, size, 3, self.num_heads, -1)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]  # [B, S, H, D/H]
        if self.rope:
            if positions is None:
                positions = jnp.arange(size)[None]
            q, k = _layers.rotate(q, positions), _layers.rotate(k, positions)
        out = _attention.attention(
            q, k, v, causal=self.causal, implementation=self.implementation, **masks
        )
        return self.out(out.reshape(batch, size, width))

    def _feed(self, x):
        approximate = self.activation == "gelu_tanh"
        x = self.up.product(x)  # [B, S, F]
        x = _layers.biased_gelu(x, self.up.bias[...], approximate=approximate)
        return self.down(x)


def check_sizes(
    *, width: int, num_heads: int, num_layers: int, dropout_rate, layers, remat, **sizes
):
    """Raises a ValueError that says which size or choice of a model is not possible.

    Args:
        width: D.
        num_heads: H.
        num_layers: L.
        dropout_rate: A probability.
        layers: How the stack runs.
        remat: What is recomputed.
        **sizes: Further integers that must be at least 1.

    Raises:
        ValueError: As said.

    Example:
        >>> check_sizes(width=8, num_heads=2, num_layers=1, dropout_rate=0.0,
        ...             layers="scan", remat=None)
    """
    positive = dict(sizes, width=width, num_heads=num_heads, num_layers=num_layers)
    for name, value in positive.items():
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
    if width % num_heads:
        raise ValueError(
            f"num_heads={num_heads} does not divide width={width}; every head needs "
            "width / num_heads channels."
        )
    if not 0 <= dropout_rate < 1:
        raise ValueError(f"dropout_rate={dropout_rate} must be at least 0 and below 1.")
    if layers not in ("scan", "unroll"):
        raise ValueError(f"layers={layers!r} is unknown; use 'scan' or 'unroll'.")
    if remat not in (None, "block"):
        raise ValueError(f"remat={remat!r} is unknown; use None or 'block'.")
