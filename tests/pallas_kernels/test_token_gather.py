"""Kernels against NumPy and against their references: values, gradients, refusals."""

import functools
import importlib.util
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import pallas_kernels as pk
from dataeff_jax import aot

HAS_EXTRA = importlib.util.find_spec("jax_cuda13_plugin") and aot.find_ptxas()
BATCH = 2
# (S, K, D): rows of one token, primes, odd widths.
SIZES = [(1, 1, 33), (7, 3, 33), (50, 49, 7), (100, 13, 128), (130, 1, 130)]
DTYPES = [jnp.float32, jnp.bfloat16]


def inputs(size, kept, width, dtype):
    draw = np.random.default_rng(size)
    x = jnp.asarray(draw.standard_normal((BATCH, size, width)), dtype)
    y = jnp.asarray(draw.standard_normal((BATCH, kept, width)), dtype)
    rows = [np.sort(draw.permutation(size)[:kept]) for _ in range(BATCH)]
    affine = [jnp.asarray(draw.standard_normal(width), jnp.float32) for _ in range(2)]
    return x, jnp.asarray(np.stack(rows), jnp.int32), y, affine


def norm_in_numpy(rows, scale, bias, epsilon):
    y = rows - rows.mean(-1, keepdims=True)
    y = y / np.sqrt((y**2).mean(-1, keepdims=True) + epsilon)
    return y * np.asarray(scale) + np.asarray(bias)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "kept", "width"), SIZES)
def test_values_equal_numpy(size, kept, width, dtype, implementation):
    x, indices, y, (scale, bias) = inputs(size, kept, width, dtype)

    def run(function, **static):
        static["implementation"] = implementation
        return jax.jit(functools.partial(function, **static))

    host = np.asarray(x)
    rows = np.take_along_axis(host, np.asarray(indices)[..., None], 1)
    np.testing.assert_array_equal(run(pk.token_gather)(x, indices), rows)
    put = host.copy()
    np.put_along_axis(put, np.asarray(indices)[..., None], np.asarray(y), 1)
    np.testing.assert_array_equal(run(pk.token_scatter)(x, indices, y), put)
    # The kernel has not written into what the caller still holds.
    np.testing.assert_array_equal(x, host)
    raw, normed = run(pk.token_gather_norm, epsilon=1e-5)(x, indices, scale, bias)
    np.testing.assert_array_equal(raw, rows)
    want = norm_in_numpy(rows.astype(np.float64), scale, bias, 1e-5)
    # float32 sums of up to 130 terms; bfloat16 has 8 bits.
    tolerance = 1e-4 if dtype == jnp.float32 else 4e-2
    np.testing.assert_allclose(normed.astype(jnp.float32), want, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "kept", "width"), SIZES[1:4])
def test_gradients_are_those_of_the_references(size, kept, width, dtype):
    x, indices, y, affine = inputs(size, kept, width, dtype)
    kernel = {"implementation": "interpret"}
    pairs = [
        (
            lambda x: pk.token_gather(x, indices, **kernel),
            lambda x: pk.token_gather_reference(x, indices),
            (x,),
        ),
        (
            lambda x, y: pk.token_scatter(x, indices, y, **kernel),
            lambda x, y: pk.token_scatter_reference(x, indices, y),
            (x, y),
        ),
        (
            lambda x, *p: pk.token_gather_norm(x, indices, *p, epsilon=1e-5, **kernel),
            lambda x, *p: pk.token_gather_norm_reference(x, indices, *p, epsilon=1e-5),
            (x, *affine),
        ),
    ]

    def weigh(out):
        leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(out)]
        return sum(jnp.sum(leaf * jnp.cos(leaf)) for leaf in leaves)

    for ours, reference, arrays in pairs:
        places = tuple(range(len(arrays)))
        got = jax.jit(jax.grad(lambda *a, f=ours: weigh(f(*a)), places))(*arrays)
        want = jax.jit(jax.grad(lambda *a, f=reference: weigh(f(*a)), places))(*arrays)
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype
            a, b = a.astype(jnp.float32), b.astype(jnp.float32)
            # Cotangents are computed from outputs that were rounded.
            tolerance = 1e-4 if dtype == jnp.float32 else 6e-2
            np.testing.assert_allclose(a, b, atol=tolerance * max(1, abs(b).max()))


def test_a_repeated_index_adds_up_in_the_gradient_of_a_gather():
    x, indices = jnp.ones((1, 3, 2)), jnp.array([[1, 1, 2]])
    gradient = jax.grad(lambda x: pk.token_gather(x, indices).sum())(x)
    assert gradient[0, :, 0].tolist() == [0, 2, 1]


@pytest.mark.parametrize("bad", [-1, 5])
def test_an_index_out_of_range_is_rejected_when_checks_are_on(bad):
    x, indices = jnp.ones((1, 5, 2)), jnp.array([[0, bad]])
    checked = checkify.checkify(jax.jit(pk.token_gather))
    error, _ = checked(x, indices)
    with pytest.raises(checkify.JaxRuntimeError, match="within the 5 tokens"):
        error.throw()
    error, _ = checked(x, jnp.array([[0, 4]]))
    error.throw()


def test_references_work_over_devices():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    x, indices, y, _ = inputs(7, 3, 33, jnp.float32)

    def body(x, indices, y):
        return pk.token_scatter(x, indices, jnp.sin(pk.token_gather(x, indices)) + y)

    with jax.set_mesh(mesh):
        sharded = jax.shard_map(body, in_specs=jax.P("data"), out_specs=jax.P("data"))
        by_row = [jax.device_put(a, jax.P("data")) for a in (x, indices, y)]
        got = jax.jit(jax.grad(lambda *a: sharded(*a).sum()))(*by_row)
    want = jax.grad(lambda x: body(x, indices, y).sum())(x)
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda x, i: pk.token_gather(x, i, implementation="mosaic_gpu"),
            NotImplementedError,
            "width of 33.*implementation='xla'",
        ),
        (
            lambda x, i: pk.token_gather(x, i, implementation="triton"),
            ValueError,
            "'triton' is unknown",
        ),
        (lambda x, i: pk.token_gather(x, i[0]), ValueError, r"\[B, K\]"),
        (lambda x, i: pk.token_scatter(x, i, x), ValueError, r"\[B, K, D\]"),
        (
            lambda x, i: pk.token_gather_norm(x, i, i[0], i[0], epsilon=0.0),
            ValueError,
            r"\[D\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, error, message):
    x, indices, *_ = inputs(7, 3, 33, jnp.float32)
    with pytest.raises(error, match=message):
        call(x, indices)


SCRIPT = """
import functools, jax, jax.numpy as jnp
import pallas_kernels as pk
from dataeff_jax import aot
jax.config.update("jax_platforms", "cpu")
mesh = jax.make_mesh((8,), ("data",), devices=aot.h200_devices())
by_row, whole = jax.NamedSharding(mesh, jax.P("data")), jax.NamedSharding(mesh, jax.P())
gpu = {"implementation": "mosaic_gpu"}
for dtype in (jnp.float32, jnp.bfloat16):
    for width in (384, 1024, 2048):
        array = lambda *s: jax.ShapeDtypeStruct(s, dtype, sharding=by_row)
        x, y = array(16, 512, width), array(16, 128, width)
        i = jax.ShapeDtypeStruct((16, 128), jnp.int32, sharding=by_row)
        p = jax.ShapeDtypeStruct((width,), jnp.float32, sharding=whole)
        for f, args, donated in (
            (pk.token_gather, (x, i), ()),
            (pk.token_scatter, (x, i, y), (0,)),
            (functools.partial(pk.token_gather_norm, epsilon=1e-5), (x, i, p, p), ()),
        ):
            f = functools.partial(f, **gpu)
            f = jax.shard_map(f, mesh=mesh, out_specs=jax.P("data"),
                              in_specs=tuple(a.sharding.spec for a in args))
            plan = aot.compile_for(jax.jit(f, donate_argnums=donated), *args)
            [kernel] = plan.kernels
            print(bool(donated), kernel.registers, kernel.spill_bytes,
                  plan.memory.temporaries, plan.memory.outputs)
"""


@pytest.mark.slow
@pytest.mark.skipif(not HAS_EXTRA, reason="needs the extra: .[plan]")
def test_they_compile_for_described_gpus_without_spills():
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    lines = [line.split() for line in result.stdout.splitlines()]
    assert len(lines) == 18
    for donated, registers, spilled, temporaries, outputs in lines:
        assert int(registers) < 128
        assert int(spilled) == int(temporaries) == 0
        # A donated stream is overwritten in place.
        assert (int(outputs) == 0) == (donated == "True")
