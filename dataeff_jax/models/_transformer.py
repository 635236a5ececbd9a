"""GPT, a decoder, and BERT, an encoder, both a stack of one block.

GPT: Radford et al., Language models are unsupervised multitask learners, 2019; Brown et
al., https://arxiv.org/abs/2005.14165. BERT: Devlin et al.,
https://arxiv.org/abs/1810.04805.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from dataeff_jax import typing
from dataeff_jax.models import (
    _arrays,
    _attention,
    _block,
    _flops,
    _layers,
    _loss,
    _moe,
    _stack,
)

Remat = Literal["block"]

# Fields of a batch that `hidden_states` takes beside the tokens.
_ROW_INPUTS = ("token_types", "segment_ids", "positions", "lengths")


class _LanguageModel(nnx.Module):
    """What GPT and BERT share: sizes, the stack, and the count of their operations."""

    blocks: _block.Block
    token_embedding: _layers.Embedding
    hidden_states: Callable[..., typing.Array]
    causal: bool
    vocab_size: int
    max_length: int
    num_layers: int
    width: int
    num_heads: int
    ffw_width: int
    dropout_rate: float
    remat: Remat | None
    layers: _block.Layers

    def _set_sizes(self, **sizes):
        _block.check_sizes(**sizes)
        for name, value in sizes.items():
            setattr(self, name, value)

    def _check_length(self, size: int):
        if size > self.max_length:
            raise ValueError(
                f"a sequence of {size} tokens exceeds the model's "
                f"max_length={self.max_length}; shorten the sequence or build the "
                f"model with max_length={size}."
            )

    def _run(self, x, *, keys, segment_ids, lengths, **kwargs):
        return _stack.run_blocks(
            self.blocks,
            x,
            keys=keys,
            layers=self.layers,
            remat=self.remat,
            segment_ids=segment_ids,
            lengths=lengths,
            **kwargs,
        )

    def _drop(self, x, keys):
        # Layers fold in 0 to L - 1; the embeddings come behind them.
        if self.dropout_rate == 0.0:
            return x
        keys = _layers.fold_rows(keys, self.num_layers)
        return _layers.dropout(x, rate=self.dropout_rate, keys=keys)

    def _head(self, hidden) -> tuple[typing.Array, typing.Array | None]:
        """What the embedding multiplies, and the bias of words."""
        return hidden, None

    def row_losses(self, batch: typing.Batch) -> typing.Array:
        """Mean cross entropy of each row, a measure of its difficulty; no dropout.

        Args:
            batch: As of `loss`.

        Returns:
            float32[B]; NaN for a row whose weights are all 0.

        Example:
            >>> model = GPT(vocab_size=16, max_length=8, num_layers=1, width=8,
            ...             num_heads=2, rngs=nnx.Rngs(0))
            >>> tokens = jnp.zeros((3, 8), jnp.int32)
            >>> model.row_losses({"tokens": tokens, "targets": tokens}).shape
            (3,)
        """
        kwargs = {k: v for k, v in batch.items() if k in _ROW_INPUTS}
        hidden, bias = self._head(self.hidden_states(batch["tokens"], **kwargs))
        table = self.token_embedding.embedding[...]
        losses = _loss.token_losses(hidden, table, batch["targets"], bias=bias)
        weights = batch.get("weights")
        if weights is None:
            return losses.mean(axis=1)
        return (losses * weights).sum(axis=1) / weights.sum(axis=1)

    def _experts(self):
        blocks = self.blocks
        return blocks.routing() if isinstance(blocks, _moe.MoEBlock) else None

    def _head_flops(self, length: int) -> int:
        return 2 * length * self.width * self.vocab_size

    def forward_flops(
        self,
        length: int,
        *,
        num_kept: int | None = None,
        num_dropping: int | None = None,
    ) -> int:
        """Operations of one row's forward pass, by formula.

        sum over layers of (8 + 4 m) s h^2 + a s^2 h, plus the head; a = 2 if causal,
        else 4; see `_flops`.

        Args:
            length: Tokens of the row.
            num_kept: Tokens that dropping layers see; None means all.
            num_dropping: Layers that drop; None means all but the first and the last.

        Returns:
            A Python integer.
        """
        stack = _flops.stack_flops(
            length,
            num_layers=self.num_layers,
            num_kept=num_kept,
            num_dropping=num_dropping,
            width=self.width,
            ffw_width=self.ffw_width,
            causal=self.causal,
            experts=self._experts(),
        )
        return stack + self._head_flops(length)

    def train_flops(
        self,
        length: int,
        *,
        num_kept: int | None = None,
        num_dropping: int | None = None,
    ) -> int:
        """Operations of one row in a training step: 3 forward passes, 4 with remat.

        Args:
            length: Tokens of the row.
            num_kept: Tokens that dropping layers see; None means all.
            num_dropping: Layers that drop; None means all but the first and the last.

        Returns:
            A Python integer.
        """
        forward = self.forward_flops(
            length, num_kept=num_kept, num_dropping=num_dropping
        )
        return _flops.train_factor(self.remat) * forward


def _check_positions(positions, width, num_heads):
    if positions not in ("learned", "rope"):
        raise ValueError(
            f"positions={positions!r} is unknown; use 'learned' or 'rope'."
        )
    if positions == "rope" and (width // num_heads) % 2:
        raise ValueError(
            f"positions='rope' turns pairs of channels, but a head has "
            f"{width // num_heads}; choose num_heads={num_heads} so that "
            f"width / num_heads is even (width={width})."
        )


class GPT(_LanguageModel):
    """A decoder: causal, pre-norm, the output embedding tied to the input's.

    Args:
        vocab_size: V.
        max_length: Longest sequence.
        num_layers: L.
        width: D.
        num_heads: H, divides D.
        ffw_width: F; None means 4 D.
        positions: "learned" (GPT-2) or "rope".
        dropout_rate: Of embeddings and residual branches.
        dtype: Compute dtype or its name; parameters are float32.
        remat: "block" recomputes every block in the backward pass; None saves all.
        layers: "scan" compiles one block for any depth; "unroll" is faster on CPUs.
        implementation: Of `attention`; None chooses by backend.
        num_experts: E, experts in the feed-forward network of every layer; None means
            none. See `MoEBlock`.
        expert_options: Further arguments of `MoEBlock`: num_selected, capacity_factor,
            balance_weight, router_z_weight.
        rngs: Source of keys, nnx.Rngs.

    Raises:
        ValueError: If a size or a choice is not possible.

    Example:
        >>> model = GPT(vocab_size=16, max_length=8, num_layers=2, width=8,
        ...             num_heads=2, rngs=nnx.Rngs(0))
        >>> model(jnp.zeros((1, 8), jnp.int32)).shape
        (1, 8, 16)

    References:
        Brown et al., Language models are few-shot learners, 2020,
        https://arxiv.org/abs/2005.14165
    """

    causal = True

    def __init__(
        self,
        *,
        vocab_size: int,
        max_length: int,
        num_layers: int,
        width: int,
        num_heads: int,
        ffw_width: int | None = None,
        positions: _block.Positions = "learned",
        dropout_rate: float = 0.0,
        dtype: Any = jnp.float32,
        remat: Remat | None = None,
        layers: _block.Layers = "scan",
        implementation: _attention.Implementation | None = None,
        num_experts: int | None = None,
        expert_options: Mapping[str, Any] | None = None,
        rngs: nnx.Rngs,
    ):
        _check_positions(positions, width, num_heads)
        self._set_sizes(
            vocab_size=vocab_size,
            max_length=max_length,
            num_layers=num_layers,
            width=width,
            num_heads=num_heads,
            ffw_width=4 * width if ffw_width is None else ffw_width,
            dropout_rate=dropout_rate,
            remat=remat,
            layers=layers,
        )
        self.dtype = _arrays.canonical_dtype(dtype)
        self.positions = positions
        self.token_embedding = _layers.Embedding(
            vocab_size, width, stddev=0.02, rngs=rngs
        )
        if positions == "learned":
            self.position_embedding = _layers.Embedding(
                max_length, width, stddev=0.02, rngs=rngs
            )
        experts: dict[str, Any] = {}
        if num_experts is not None:
            options = {"num_experts": num_experts, **(expert_options or {})}
            experts = {"block": _moe.MoEBlock, **options}
        self.blocks = _stack.make_blocks(
            num_layers,
            width=width,
            num_heads=num_heads,
            ffw_width=self.ffw_width,
            rope=positions == "rope",
            dropout_rate=dropout_rate,
            implementation=implementation,
            # GPT-2: branches that add to the residual stream start smaller.
            residual_stddev=0.02 / (2 * num_layers) ** 0.5,
            rngs=rngs,
            **experts,
        )
        self.final_norm = _layers.LayerNorm(width, epsilon=1e-5)

    def hidden_states(
        self,
        tokens: typing.Array,
        *,
        segment_ids: typing.Array | None = None,
        positions: typing.Array | None = None,
        lengths: typing.Array | None = None,
        keys: typing.KeyArray | None = None,
    ) -> typing.Array:
        """Final hidden states, after the last norm.

        Args:
            tokens: int32[B, S].
            segment_ids: int32[B, S], documents of a packed row, 0 for padding.
            positions: int32[B, S], place in the document; None means 0 to S - 1.
            lengths: int32[B], tokens of a row that are not padding.
            keys: One key a row, [B]; None means no dropout.

        Returns:
            [B, S, D] in the compute dtype.

        Raises:
            ValueError: If S exceeds the model's `max_length`.
        """
        return self._hidden_states(
            tokens,
            segment_ids=segment_ids,
            positions=positions,
            lengths=lengths,
            keys=keys,
        )[0]

    def _hidden_states(
        self, tokens, *, segment_ids=None, positions=None, lengths=None, keys=None
    ):
        """Final hidden states, and the auxiliary losses [B] of experts, or None."""
        self._check_length(tokens.shape[1])
        x = self.token_embedding(tokens)
        if self.positions == "learned":
            x = x + _look_up_positions(self.position_embedding, positions, x.shape[1])
        x = self._drop(x.astype(self.dtype), keys)
        x = self._run(
            x, keys=keys, segment_ids=segment_ids, lengths=lengths, positions=positions
        )
        x, auxiliary_loss = x if isinstance(x, tuple) else (x, None)
        return self.final_norm(x), auxiliary_loss

    def __call__(self, tokens: typing.Array, **kwargs) -> typing.Array:
        """Logits float32[B, S, V]; arguments as of `hidden_states`."""
        hidden = self.hidden_states(tokens, **kwargs)
        return _logits(hidden, self.token_embedding.embedding[...])

    def loss(
        self, batch: typing.Batch, *, keys: typing.KeyArray | None = None
    ) -> tuple[typing.Array, typing.Array | float]:
        """Summed cross entropy of the next tokens, and what to divide it by.

        With experts and keys, so in training, their auxiliary losses are in the sum, by
        the weight of each row; without keys it is the cross entropy alone.

        Args:
            batch: tokens and targets int32[B, S]; optionally segment_ids, positions,
                lengths, and weights float32[B, S].
            keys: One key a row, [B]; None means no dropout.

        Returns:
            (loss_sum float32[], weight_sum float32[] or a Python float).
        """
        hidden, auxiliary_loss = self._hidden_states(
            batch["tokens"], keys=keys, **_masks(batch)
        )
        loss_sum = _loss.cross_entropy(
            hidden,
            self.token_embedding.embedding[...],
            batch["targets"],
            weights=batch.get("weights"),
        )
        if auxiliary_loss is not None and keys is not None:
            loss_sum = loss_sum + jnp.sum(auxiliary_loss * _row_weights(batch))
        return loss_sum, _loss.weight_sum(batch, batch["targets"].size)


class BERT(_LanguageModel):
    """An encoder: bidirectional, post-norm, with the masked-language-model head.

    The head is dense, exact GELU and norm, then the tied embedding plus a bias per
    word. Arguments are those of `GPT`, with learned positions, and:

    Args:
        vocab_size: V.
        max_length: Longest sequence.
        num_layers: L.
        width: D.
        num_heads: H, divides D.
        ffw_width: F; None means 4 D.
        type_vocab_size: Number of token types (sentence A, sentence B).
        dropout_rate: Of embeddings and residual branches.
        dtype: Compute dtype or its name; parameters are float32.
        remat: "block" recomputes every block in the backward pass; None saves all.
        layers: "scan" compiles one block for any depth; "unroll" is faster on CPUs.
        implementation: Of `attention`; None chooses by backend.
        epsilon: Of the layer norms.
        rngs: Source of keys, nnx.Rngs.

    Raises:
        ValueError: If a size or a choice is not possible.

    Example:
        >>> model = BERT(vocab_size=16, max_length=8, num_layers=2, width=8,
        ...              num_heads=2, rngs=nnx.Rngs(0))
        >>> model(jnp.zeros((1, 8), jnp.int32)).shape
        (1, 8, 16)

    References:
        Devlin et al., BERT, 2018, https://arxiv.org/abs/1810.04805
    """

    causal = False
    type_vocab_size: int

    def __init__(
        self,
        *,
        vocab_size: int,
        max_length: int,
        num_layers: int,
        width: int,
        num_heads: int,
        ffw_width: int | None = None,
        type_vocab_size: int = 2,
        dropout_rate: float = 0.0,
        dtype: Any = jnp.float32,
        remat: Remat | None = None,
        layers: _block.Layers = "scan",
        implementation: _attention.Implementation | None = None,
        epsilon: float = 1e-12,
        rngs: nnx.Rngs,
    ):
        self._set_sizes(
            vocab_size=vocab_size,
            max_length=max_length,
            num_layers=num_layers,
            width=width,
            num_heads=num_heads,
            ffw_width=4 * width if ffw_width is None else ffw_width,
            type_vocab_size=type_vocab_size,
            dropout_rate=dropout_rate,
            remat=remat,
            layers=layers,
        )
        self.dtype = _arrays.canonical_dtype(dtype)
        self.epsilon = epsilon

        def embedding(size):
            return _layers.Embedding(size, width, stddev=0.02, rngs=rngs)

        self.token_embedding = embedding(vocab_size)
        self.position_embedding = embedding(max_length)
        self.type_embedding = embedding(type_vocab_size)
        self.embedding_norm = _layers.LayerNorm(width, epsilon=epsilon)
        self.blocks = _stack.make_blocks(
            num_layers,
            width=width,
            num_heads=num_heads,
            ffw_width=self.ffw_width,
            causal=False,
            norm="post",
            activation="gelu",
            epsilon=epsilon,
            dropout_rate=dropout_rate,
            implementation=implementation,
            rngs=rngs,
        )
        self.head = _layers.Linear(width, width, stddev=0.02, rngs=rngs)
        self.head_norm = _layers.LayerNorm(width, epsilon=epsilon)
        self.head_bias = nnx.Param(jnp.zeros(vocab_size, jnp.float32))

    def hidden_states(
        self,
        tokens: typing.Array,
        *,
        token_types: typing.Array | None = None,
        segment_ids: typing.Array | None = None,
        positions: typing.Array | None = None,
        lengths: typing.Array | None = None,
        keys: typing.KeyArray | None = None,
    ) -> typing.Array:
        """Final hidden states, the token embeddings that users of BERT take.

        Args:
            tokens: int32[B, S].
            token_types: int32[B, S]; None means 0.
            segment_ids: int32[B, S], documents of a packed row, 0 for padding.
            positions: int32[B, S], place in the document; None means 0 to S - 1.
            lengths: int32[B], tokens of a row that are not padding.
            keys: One key a row, [B]; None means no dropout.

        Returns:
            [B, S, D] in the compute dtype.

        Raises:
            ValueError: If S exceeds the model's `max_length`.
        """
        self._check_length(tokens.shape[1])
        x = self.token_embedding(tokens)
        x = x + _look_up_positions(self.position_embedding, positions, x.shape[1])
        if token_types is None:
            x = x + self.type_embedding.embedding[...][None, :1]
        else:
            x = x + self.type_embedding(token_types)
        x = self.embedding_norm(x).astype(self.dtype)
        x = self._drop(x, keys)
        return self._run(x, keys=keys, segment_ids=segment_ids, lengths=lengths)

    def _transform(self, hidden):
        return self.head_norm(jax.nn.gelu(self.head(hidden), approximate=False))

    def _head(self, hidden):
        return self._transform(hidden), self.head_bias[...]

    def __call__(self, tokens: typing.Array, **kwargs) -> typing.Array:
        """Logits float32[B, S, V]; arguments as of `hidden_states`."""
        hidden = self._transform(self.hidden_states(tokens, **kwargs))
        logits = _logits(hidden, self.token_embedding.embedding[...])
        return logits + self.head_bias[...][None, None]

    def loss(
        self, batch: typing.Batch, *, keys: typing.KeyArray | None = None
    ) -> tuple[typing.Array, typing.Array | float]:
        """Summed cross entropy of the masked tokens, and what to divide it by.

        Args:
            batch: tokens (with masks) and targets int32[B, S]; weights float32[B, S],
                1 where a token was masked; optionally token_types, segment_ids,
                positions, lengths. Without weights every token counts.
            keys: One key a row, [B]; None means no dropout.

        Returns:
            (loss_sum float32[], weight_sum float32[] or a Python float).
        """
        hidden = self.hidden_states(
            batch["tokens"],
            token_types=batch.get("token_types"),
            keys=keys,
            **_masks(batch),
        )
        loss_sum = _loss.cross_entropy(
            self._transform(hidden),
            self.token_embedding.embedding[...],
            batch["targets"],
            bias=self.head_bias[...],
            weights=batch.get("weights"),
        )
        return loss_sum, _loss.weight_sum(batch, batch["targets"].size)

    def _head_flops(self, length: int) -> int:
        return super()._head_flops(length) + 2 * length * self.width**2


def _masks(batch):
    return {name: batch.get(name) for name in ("segment_ids", "positions", "lengths")}


def _row_weights(batch):
    """What the tokens of each row weigh together: [B], or a number."""
    weights = batch.get("weights")
    return batch["targets"].shape[1] if weights is None else jnp.sum(weights, axis=1)


def _look_up_positions(table, positions, size):
    """Position embeddings [B or 1, S, D]; a slice where all rows count from 0."""
    if positions is None:
        return table.embedding[...][None, :size]
    return table(positions)


def _logits(hidden, table):
    table = table.astype(hidden.dtype)
    return jnp.einsum("bsd,vd->bsv", hidden, table, preferred_element_type=jnp.float32)
