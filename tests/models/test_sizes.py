"""Named sizes have the papers' parameter counts, and FLOPs agree with XLA's count."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from dataeff_jax import models

# Millions of parameters: as released (GPT-2, BERT with its masked-language head),
# table 2.1 of GPT-3's paper plus positions, table 1 of ViT's and DeiT's papers.
PARAMETERS = {
    "gpt2": 124.4,
    "gpt2_medium": 354.8,
    "gpt2_large": 774.0,
    "gpt2_xl": 1557.6,
    "gpt3_125m": 125.2,
    "gpt3_350m": 355.9,
    "gpt3_760m": 760.3,
    "gpt3_1_3b": 1315.6,
    "bert_base": 109.5,
    "bert_large": 335.2,
    "vit_small_16": 22.05,
    "vit_base_16": 86.6,
}


def build(name):
    family = {"g": models.GPT, "b": models.BERT, "v": models.ViT}[name[0]]
    return nnx.eval_shape(lambda: family(**models.sizes[name], rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("name", list(models.sizes))
def test_named_sizes_have_the_papers_parameters(name):
    leaves = jax.tree.leaves(nnx.state(build(name), nnx.Param))
    count = sum(math.prod(leaf.shape) for leaf in leaves)
    assert count / 1e6 == pytest.approx(PARAMETERS[name], rel=2e-3)


def xla_flops(model, *inputs):
    graphdef, params = nnx.split(model)

    def run(params, *inputs):
        return nnx.merge(graphdef, params)(*inputs)

    return jax.jit(run).lower(params, *inputs).compile().cost_analysis()["flops"]


@pytest.mark.parametrize("family", ["gpt", "bert", "vit"])
def test_the_formula_is_within_three_percent_of_xla(family):
    # Wide enough that norms and activations, which the formula leaves out, are small.
    sizes = {"num_layers": 2, "width": 512, "num_heads": 4, "layers": "unroll"}
    text = {"vocab_size": 512, "max_length": 256}
    if family == "vit":
        image = {"image_size": 32, "patch_size": 4, "num_classes": 10}
        build, length = (lambda: models.ViT(**sizes, **image, rngs=nnx.Rngs(0))), None
        inputs = jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.float32)
    else:
        kind = models.GPT if family == "gpt" else models.BERT
        build, length = (lambda: kind(**sizes, **text, rngs=nnx.Rngs(0))), 256
        inputs = jax.ShapeDtypeStruct((1, 256), jnp.int32)
    model = nnx.eval_shape(build)
    ratio = xla_flops(model, inputs) / model.forward_flops(length)
    assert ratio == pytest.approx(1, abs=0.03)


def gpt_of(sizes, **kwargs):
    build = functools.partial(models.GPT, num_heads=2, **sizes, **kwargs)
    return nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0)))


def test_flops_by_hand():
    sizes = {"vocab_size": 16, "max_length": 8, "num_layers": 4, "width": 8}
    model = gpt_of(sizes)

    def block(s):
        return 24 * s * 8**2 + 2 * s**2 * 8

    head = 2 * 8 * 8 * 16
    assert model.forward_flops(8) == 4 * block(8) + head
    assert model.forward_flops(8, num_kept=4) == 2 * block(8) + 2 * block(4) + head
    assert model.forward_flops(8, num_kept=9) == model.forward_flops(8)
    one = model.forward_flops(8, num_kept=4, num_dropping=1)
    assert one == 3 * block(8) + block(4) + head
    assert model.train_flops(8) == 3 * model.forward_flops(8)
    saving = gpt_of(sizes, remat="block")
    assert saving.train_flops(8) == 4 * model.forward_flops(8)
    with pytest.raises(ValueError, match="num_dropping=5"):
        model.forward_flops(8, num_dropping=5)
