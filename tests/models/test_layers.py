"""Norm and GELU, whose gradients are written by hand, against autodiff."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dataeff_jax.models import _layers


def arrays(width=24, seed=0):
    draw = np.random.default_rng(seed).standard_normal
    return tuple(
        jnp.asarray(draw(shape), jnp.float32)
        for shape in ((2, 5, width), (2, 5, width), (width,), (width,))
    )


def check(ours, reference, dout, *primals):
    @functools.partial(jax.jit, static_argnums=0)
    def run(f, dout, *primals):
        value, pull = jax.vjp(f, *primals)
        return value, *pull(dout)

    results = (run(f, dout, *primals) for f in (ours, reference))
    for x, y in zip(*results, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_layer_norm_and_its_gradients():
    x, dout, scale, bias = arrays()

    def reference(x, scale, bias):
        y = x - x.mean(-1, keepdims=True)
        y = y / jnp.sqrt((y * y).mean(-1, keepdims=True) + 1e-5)
        return y * scale[None, None] + bias[None, None]

    def ours(x, scale, bias):
        return _layers._layer_norm(1e-5, x, scale, bias)

    check(ours, reference, dout, 3 * x + 1, scale, bias)


@pytest.mark.parametrize("approximate", [True, False], ids=["tanh", "exact"])
def test_gelu_and_its_gradients(approximate):
    x, dout, bias, _ = arrays()

    def reference(x, bias):
        return jax.nn.gelu(x + bias[None, None], approximate=approximate)

    def ours(x, bias):
        return _layers.biased_gelu(x, bias, approximate=approximate)

    check(ours, reference, dout, 2 * x, bias)


@pytest.mark.parametrize("approximate", [True, False], ids=["tanh", "exact"])
def test_gelu_is_finite_far_out(approximate):
    x = jnp.array([[-1e4, -50.0, 50.0, 1e4]])
    value, slope = jax.value_and_grad(
        lambda x: _layers.biased_gelu(x, jnp.zeros(4), approximate=approximate).sum()
    )(x)
    np.testing.assert_allclose(value, 10050.0)
    np.testing.assert_allclose(slope, [[0, 0, 1, 1]], atol=1e-6)
