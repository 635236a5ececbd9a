"""ViT: an image as a sequence of patches.

Dosovitskiy et al., An image is worth 16x16 words, https://arxiv.org/abs/2010.11929.
"""

from typing import Any, Literal

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
    _stack,
)


class ViT(nnx.Module):
    """A pre-norm encoder over patches and a class token, with a linear classifier.

    Args:
        image_size: Height and width of the images.
        patch_size: Height and width of a patch; divides `image_size`.
        num_classes: C.
        num_layers: L.
        width: D.
        num_heads: H, divides D.
        num_channels: Channels of the images.
        ffw_width: F; None means 4 D.
        dropout_rate: Of embeddings and residual branches.
        dtype: Compute dtype or its name; parameters are float32.
        remat: "block" recomputes every block in the backward pass; None saves all.
        layers: "scan" compiles one block for any depth; "unroll" is faster on CPUs.
        implementation: Of `attention`; None chooses by backend.
        rngs: Source of keys, nnx.Rngs.

    Raises:
        ValueError: If a size or a choice is not possible.

    Example:
        >>> model = ViT(image_size=8, patch_size=4, num_classes=3, num_layers=2,
        ...             width=8, num_heads=2, rngs=nnx.Rngs(0))
        >>> model(jnp.zeros((1, 8, 8, 3))).shape
        (1, 3)

    References:
        Dosovitskiy et al., 2020, https://arxiv.org/abs/2010.11929
    """

    causal = False
    image_size: int
    patch_size: int
    num_classes: int
    num_layers: int
    width: int
    num_heads: int
    num_channels: int
    ffw_width: int
    dropout_rate: float
    remat: Literal["block"] | None
    layers: _block.Layers

    def __init__(
        self,
        *,
        image_size: int,
        patch_size: int,
        num_classes: int,
        num_layers: int,
        width: int,
        num_heads: int,
        num_channels: int = 3,
        ffw_width: int | None = None,
        dropout_rate: float = 0.0,
        dtype: Any = jnp.float32,
        remat: Literal["block"] | None = None,
        layers: _block.Layers = "scan",
        implementation: _attention.Implementation | None = None,
        rngs: nnx.Rngs,
    ):
        if image_size % patch_size:
            raise ValueError(
                f"patch_size={patch_size} does not divide image_size={image_size}; "
                "resize the images or choose another patch."
            )
        sizes = {
            "image_size": image_size,
            "patch_size": patch_size,
            "num_classes": num_classes,
            "num_layers": num_layers,
            "width": width,
            "num_heads": num_heads,
            "num_channels": num_channels,
            "ffw_width": 4 * width if ffw_width is None else ffw_width,
            "dropout_rate": dropout_rate,
            "remat": remat,
            "layers": layers,
        }
        _block.check_sizes(**sizes)
        for name, value in sizes.items():
            setattr(self, name, value)
        self.dtype = _arrays.canonical_dtype(dtype)
        self.num_patches = (image_size // patch_size) ** 2
        inputs = patch_size**2 * num_channels
        # LeCun's deviation for the patches, 0.02 for positions, as in the paper's code.
        self.patch_embedding = _layers.Linear(
            inputs, width, stddev=inputs**-0.5, rngs=rngs
        )
        self.class_token = nnx.Param(jnp.zeros((1, 1, width), jnp.float32))
        self.position_embedding = _layers.Embedding(
            self.num_patches + 1, width, stddev=0.02, rngs=rngs
        )
        self.blocks = _stack.make_blocks(
            num_layers,
            width=width,
            num_heads=num_heads,
            ffw_width=self.ffw_width,
            causal=False,
            activation="gelu",
            epsilon=1e-6,
            dropout_rate=dropout_rate,
            implementation=implementation,
            rngs=rngs,
        )
        self.final_norm = _layers.LayerNorm(width, epsilon=1e-6)
        self.head = _layers.Linear(width, num_classes, stddev=0.0, rngs=rngs)

    def hidden_states(
        self, images: typing.Array, *, keys: typing.KeyArray | None = None
    ) -> typing.Array:
        """Final hidden states of the class token (first) and the patches.

        Args:
            images: float[B, H, W, C].
            keys: One key a row, [B]; None means no dropout.

        Returns:
            [B, 1 + patches, D] in the compute dtype.

        Raises:
            ValueError: If the images do not have the model's size.
        """
        expected = (self.image_size, self.image_size, self.num_channels)
        if images.shape[1:] != expected:
            raise ValueError(
                f"images have shape {images.shape[1:]}; the model was built for "
                f"{expected}."
            )
        x = self.patch_embedding(_patches(images, self.patch_size).astype(self.dtype))
        token = self.class_token[...].astype(x.dtype)
        token = jnp.broadcast_to(token, (x.shape[0], 1, x.shape[2]))
        x = jnp.concatenate([token, x], axis=1)
        x = x + self.position_embedding.embedding[...].astype(x.dtype)[None]
        if self.dropout_rate > 0.0:
            row_keys = _layers.fold_rows(keys, self.num_layers)
            x = _layers.dropout(x, rate=self.dropout_rate, keys=row_keys)
        x = _stack.run_blocks(
            self.blocks, x, keys=keys, layers=self.layers, remat=self.remat
        )
        return self.final_norm(x)

    def __call__(self, images: typing.Array, **kwargs) -> typing.Array:
        """Logits float32[B, C]; arguments as of `hidden_states`."""
        hidden = self.hidden_states(images, **kwargs)
        return self.head(hidden[:, 0].astype(jnp.float32))

    def loss(
        self, batch: typing.Batch, *, keys: typing.KeyArray | None = None
    ) -> tuple[typing.Array, typing.Array | float]:
        """Summed cross entropy of the labels, and what to divide it by.

        Args:
            batch: images float[B, H, W, C], labels int32[B], optional weights [B].
            keys: One key a row, [B]; None means no dropout.

        Returns:
            (loss_sum float32[], weight_sum float32[] or a Python float).
        """
        logits = self(batch["images"], keys=keys)
        loss_sum = _loss.classification_loss(
            logits, batch["labels"], weights=batch.get("weights")
        )
        return loss_sum, _loss.weight_sum(batch, batch["labels"].size)

    def forward_flops(
        self,
        length: int | None = None,
        *,
        num_kept: int | None = None,
        num_dropping: int | None = None,
    ) -> int:
        """Operations of one image's forward pass, by formula; see `_flops`.

        Args:
            length: Tokens, patches and class token; None means the model's own.
            num_kept: Tokens that dropping layers see; None means all.
            num_dropping: Layers that drop; None means all but the first and the last.

        Returns:
            A Python integer.
        """
        length = self.num_patches + 1 if length is None else length
        stack = _flops.stack_flops(
            length,
            num_layers=self.num_layers,
            num_kept=num_kept,
            num_dropping=num_dropping,
            width=self.width,
            ffw_width=self.ffw_width,
            causal=False,
        )
        patch = self.patch_size**2 * self.num_channels
        patches = 2 * (length - 1) * patch * self.width
        return stack + patches + 2 * self.width * self.num_classes

    def train_flops(self, length: int | None = None, **kwargs) -> int:
        """Operations of one image in a training step: 3 forward passes, 4 with remat.

        Args:
            length: Tokens, patches and class token; None means the model's own.
            **kwargs: As of `forward_flops`.

        Returns:
            A Python integer.
        """
        return _flops.train_factor(self.remat) * self.forward_flops(length, **kwargs)


def _patches(images, size):
    """[B, H, W, C] -> [B, patches, size * size * C], row by row."""
    batch, height, width, channels = images.shape
    x = images.reshape(batch, height // size, size, width // size, size, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, -1, size * size * channels)
