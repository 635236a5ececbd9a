"""Models in Flax NNX: a GPT, dense or with experts, a BERT and a ViT."""

from dataeff_jax.models._attention import attention
from dataeff_jax.models._block import Block
from dataeff_jax.models._loss import classification_loss, cross_entropy, num_correct
from dataeff_jax.models._moe import MoEBlock
from dataeff_jax.models._params import decay_mask, is_stacked
from dataeff_jax.models._pretrained import load_safetensors, save_safetensors
from dataeff_jax.models._sizes import sizes
from dataeff_jax.models._stack import make_blocks, run_blocks
from dataeff_jax.models._transformer import BERT, GPT
from dataeff_jax.models._vit import ViT

__all__ = [
    "BERT",
    "GPT",
    "Block",
    "MoEBlock",
    "ViT",
    "attention",
    "classification_loss",
    "cross_entropy",
    "decay_mask",
    "is_stacked",
    "load_safetensors",
    "make_blocks",
    "num_correct",
    "run_blocks",
    "save_safetensors",
    "sizes",
]
