"""Named sizes with the papers' shapes, as keyword arguments of the models."""

import types
from collections.abc import Mapping
from typing import Any


def _gpt2(num_layers, width, num_heads):
    return _frozen(
        vocab_size=50257,
        max_length=1024,
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
    )


def _gpt3(num_layers, width, num_heads):
    return _frozen(
        vocab_size=50257,
        max_length=2048,
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
    )


def _bert(num_layers, width, num_heads):
    return _frozen(
        vocab_size=30522,
        max_length=512,
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
    )


def _vit(num_layers, width, num_heads):
    return _frozen(
        image_size=224,
        patch_size=16,
        num_classes=1000,
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
    )


def _frozen(**kwargs) -> Mapping[str, Any]:
    return types.MappingProxyType(kwargs)


# GPT-2: Radford et al. 2019, table 2; heads of 64 as in the released models.
# GPT-3: https://arxiv.org/abs/2005.14165, table 2.1. That table gives the 1.3B model 24
# heads of 128, which is not its width of 2048; 16 heads of 128 are, and are what later
# work (DeepSpeed's data-efficiency recipes among it) trains.
# BERT: https://arxiv.org/abs/1810.04805, section 3.
# ViT: https://arxiv.org/abs/2010.11929, table 1; S from https://arxiv.org/abs/2012.12877.
sizes: Mapping[str, Mapping[str, Any]] = types.MappingProxyType(
    {
        "gpt2": _gpt2(12, 768, 12),
        "gpt2_medium": _gpt2(24, 1024, 16),
        "gpt2_large": _gpt2(36, 1280, 20),
        "gpt2_xl": _gpt2(48, 1600, 25),
        "gpt3_125m": _gpt3(12, 768, 12),
        "gpt3_350m": _gpt3(24, 1024, 16),
        "gpt3_760m": _gpt3(24, 1536, 16),
        "gpt3_1_3b": _gpt3(24, 2048, 16),
        "bert_base": _bert(12, 768, 12),
        "bert_large": _bert(24, 1024, 16),
        "vit_small_16": _vit(12, 384, 6),
        "vit_base_16": _vit(12, 768, 12),
    }
)
