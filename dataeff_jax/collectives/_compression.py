"""Numbers as one, four or eight bits with a scale: the mathematics on arrays.

Hanlin Tang et al., "1-bit Adam: communication efficient large-scale training with
Adam's convergence speed", https://arxiv.org/abs/2102.02888, section 4.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

_LEVELS = {"int8": 127, "int4": 7}
_LONGEST_EXCLUDED = 2**14
_PER_BYTE = {"sign": 8, "int4": 2, "int8": 1}


def exclude_vectors(path: Any, shape: tuple[int, ...]) -> bool:
    """Says whether a leaf is a scalar or a short vector: biases, scales of norms.

    The default of :class:`Compression`: such leaves are small and matter much, so they
    travel uncompressed. A vector of more than 16,384 values, such as a bias for every
    word, is compressed as its matrix is. For a stack of layers the shape is that of one
    layer.

    Args:
      path: keys of the leaf, as ``jax.tree_util`` gives them; not used.
      shape: of the leaf.

    Returns:
      True for at most one axis of at most 16,384 values.

    Example:
      >>> [exclude_vectors((), shape) for shape in [(768,), (768, 768), (30522,)]]
      [True, False, False]
    """
    del path
    return len(shape) <= 1 and math.prod(shape) <= _LONGEST_EXCLUDED


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compression:
    """How the leaves of a tree travel.

    A *segment* is what shares one float32 scale: by default the part of a leaf (of a
    layer, in a stack) that goes to one device.

    Args:
      format: ``"sign"``, one bit a value; ``"int8"`` or ``"int4"``, the nearest of 255
        or 15 levels.
      norm: the scale of a sign. ``"l2"``: root of the mean square, which keeps the
        norm; ``"l1"``: mean magnitude, which is nearest to the values.
      segment: ``"chunk"``; ``"tensor"``, one scale for a whole leaf; or a number of
        values, at most which share a scale (a multiple of 8).
      exclude: ``(path, shape) -> bool``, leaves that travel as floats; None for none.
      min_size: leaves with fewer values a device travel as floats too.
      excluded_dtype: of those on their way; a narrower one halves their bytes.
      is_stacked: ``path -> bool``, whether a leaf stacks layers on its first axis.
      padding: ``"masked"``, padding takes part in nothing; ``"counted"``, it counts in
        the scale and has an error, as in DeepSpeed.
      bucket_bytes: leaves are sent in messages of about so many bytes each, so that
        sending and computing overlap; None for one message.
      error_dtype: of the error buffers.

    Raises:
      ValueError: if a value is not allowed.

    Example:
      >>> Compression(norm="l1").format
      'sign'
    """

    format: Literal["sign", "int8", "int4"] = "sign"
    norm: Literal["l2", "l1"] = "l2"
    segment: Literal["chunk", "tensor"] | int = "chunk"
    exclude: Callable[[Any, tuple[int, ...]], bool] | None = exclude_vectors
    min_size: int = 256
    excluded_dtype: Any = "float32"
    is_stacked: Callable[[Any], bool] | None = None
    padding: Literal["masked", "counted"] = "masked"
    bucket_bytes: int | None = None
    error_dtype: Any = "float32"

    def __post_init__(self):
        allowed = {
            "format": ("sign", "int8", "int4"),
            "norm": ("l2", "l1"),
            "padding": ("masked", "counted"),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name}={getattr(self, name)!r} is none of {values}.")
        block = self.segment
        if block not in ("chunk", "tensor") and not (
            isinstance(block, int) and block > 0 and block % 8 == 0
        ):
            raise ValueError(
                f"segment={block!r} must be 'chunk', 'tensor', or a multiple of 8."
            )
        if self.bucket_bytes is not None and self.bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes={self.bucket_bytes} must be positive.")

    @property
    def values_per_byte(self) -> int:
        """How many values a byte of the message holds."""
        return _PER_BYTE[self.format]


def pack_bits(bits: jax.Array) -> jax.Array:
    """Packs booleans into bytes, eight planes of W each.

    Bit j of byte w is value ``j * W + w``, so that packing reads and writes contiguous
    memory.

    Args:
      bits: bool[..., 8 W].

    Returns:
      uint8[..., W].

    Example:
      >>> pack_bits(jnp.arange(16) % 2 == 1).tolist()
      [0, 255]
    """
    width = bits.shape[-1] // 8
    planes = [bits[..., j * width : (j + 1) * width] for j in range(8)]
    packed = planes[0].astype(jnp.uint8)
    for j, plane in enumerate(planes[1:], start=1):
        packed |= plane.astype(jnp.uint8) << jnp.uint8(j)
    return packed


def unpack_bits(packed: jax.Array) -> jax.Array:
    """Unpacks what :func:`pack_bits` made.

    Args:
      packed: uint8[..., W].

    Returns:
      bool[..., 8 W].

    Example:
      >>> unpack_bits(jnp.uint8([5])).tolist()
      [True, False, True, False, False, False, False, False]
    """
    shifts = jnp.arange(8, dtype=jnp.uint8).reshape(8, 1)
    shifts = jnp.broadcast_to(shifts, (*packed.shape[:-1], 8, packed.shape[-1]))
    bits = (jnp.expand_dims(packed, -2) >> shifts) & jnp.uint8(1)
    return bits.astype(bool).reshape(*packed.shape[:-1], 8 * packed.shape[-1])


def scales_of(
    x: jax.Array,
    inside: jax.Array | None,
    counts: jax.Array,
    compression: Compression,
    *,
    axes: tuple[int, ...],
) -> jax.Array:
    """Takes the scale of each segment.

    The largest magnitude is divided out before squaring, so that values of 1e30 and
    1e-30 have a scale in float32. A NaN or infinity, also where values do not count,
    makes its segment's scale NaN.

    Args:
      x: float32[..., b].
      inside: bool[..., b], which values count; None for all.
      counts: number of values that count, float32 of x's shape with 1 at ``axes``.
      compression: format and norm.
      axes: the axes that share a scale.

    Returns:
      float32, of the shape of counts; 0 where all values are 0.

    Example:
      >>> x, count = jnp.array([3.0, 4.0]), jnp.array([2.0])
      >>> scales_of(x, None, count, Compression(norm="l1"), axes=(0,)).item()
      3.5
    """
    top = jnp.max(jnp.abs(x), axis=axes, keepdims=True)
    if compression.format != "sign":
        most = top
        if inside is not None:
            most = jnp.max(jnp.where(inside, jnp.abs(x), 0), axis=axes, keepdims=True)
        most = jnp.where(jnp.isfinite(top), most, jnp.nan)
        return most * (1 / _LEVELS[compression.format])
    unit = x / jnp.where(top == 0, 1, top)  # an infinity becomes NaN, and so the scale
    if inside is not None:
        unit = jnp.where(inside | ~jnp.isfinite(top), unit, 0)
    counts = jnp.maximum(counts, 1)
    if compression.norm == "l1":
        return top * (jnp.sum(jnp.abs(unit), axis=axes, keepdims=True) / counts)
    square = jnp.sum(jnp.square(unit), axis=axes, keepdims=True)
    return top * jnp.sqrt(square / counts)


def encode(
    x: jax.Array, scale: jax.Array, compression: Compression
) -> tuple[jax.Array, jax.Array]:
    """Rounds values to what can be sent, and packs them.

    A zero, of either sign, is sent as plus.

    Args:
      x: float32[..., b], b a multiple of 8.
      scale: float32, broadcastable to x.
      compression: the format.

    Returns:
      uint8[..., b / values_per_byte] and what it stands for, float32[..., b].

    Example:
      >>> packed, sent = encode(jnp.arange(-4.0, 4.0), jnp.float32([2]), Compression())
      >>> packed.tolist(), sent.tolist()
      ([240], [-2.0, -2.0, -2.0, -2.0, 2.0, 2.0, 2.0, 2.0])
    """
    scale = jnp.broadcast_to(scale, x.shape)
    if compression.format == "sign":
        positive = x >= 0  # once, for the message and the error alike
        return pack_bits(positive), jnp.where(positive, scale, -scale)
    top = _LEVELS[compression.format]
    levels = jnp.clip(jnp.round(x / jnp.where(scale == 0, 1, scale)), -top, top)
    codes = (levels + (top + 1)).astype(jnp.uint8)
    if compression.format == "int4":
        half = codes.shape[-1] // 2
        codes = codes[..., :half] | codes[..., half:] << jnp.uint8(4)
    return codes, levels * scale


def decode(packed: jax.Array, scale: jax.Array, compression: Compression) -> jax.Array:
    """Makes numbers of a message.

    Args:
      packed: uint8[..., b / values_per_byte].
      scale: float32[..., 1].
      compression: the format.

    Returns:
      float32[..., b].

    Example:
      >>> decode(jnp.uint8([129]), jnp.float32([0.5]), Compression(format="int8"))
      Array([0.5], dtype=float32)
    """
    if compression.format == "sign":
        bits = unpack_bits(packed)
        scale = jnp.broadcast_to(scale, bits.shape)
        return jnp.where(bits, scale, -scale)
    if compression.format == "int4":
        low, high = packed & jnp.uint8(15), packed >> jnp.uint8(4)
        packed = jnp.concatenate([low, high], axis=-1)
    levels = packed.astype(jnp.float32) - (_LEVELS[compression.format] + 1)
    return levels * jnp.broadcast_to(scale, levels.shape)
