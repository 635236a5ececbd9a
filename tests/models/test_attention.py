"""Attention against a dense NumPy reference, and what the blocked form promises."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from dataeff_jax import models
from dataeff_jax.models import _attention

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}  # of a float32 sum; of a bf16 result


def reference(q, k, v, dout, *, causal, segment_ids=None, lengths=None):
    """Dense attention and its gradients, float64, straight from the definition."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    batch, size, _, depth = q.shape
    allowed = np.ones((batch, size, size), bool)
    if causal:
        allowed &= np.tri(size, dtype=bool)
    if segment_ids is not None:
        ids = np.asarray(segment_ids)
        allowed &= (ids[:, :, None] == ids[:, None]) & (ids[:, :, None] != 0)
    if lengths is not None:
        real = np.arange(size) < np.asarray(lengths)[:, None]
        allowed &= real[:, None] & real[:, :, None]
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(depth)
    scores = np.where(allowed[:, None], scores, -np.inf)
    top = np.maximum(scores.max(-1, keepdims=True), -1e300)
    p = np.exp(scores - top)
    total = p.sum(-1, keepdims=True)
    p = np.divide(p, total, out=np.zeros_like(p), where=total > 0)
    dp = np.einsum("bqhd,bkhd->bhqk", dout, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(depth)
    return (
        np.einsum("bhqk,bkhd->bqhd", p, v),
        np.einsum("bhqk,bkhd->bqhd", ds, k),
        np.einsum("bhqk,bqhd->bkhd", ds, q),
        np.einsum("bhqk,bqhd->bkhd", p, dout),
    )


def inputs(size, dtype="float32", batch=2, heads=2, depth=8, seed=0):
    draw = np.random.default_rng(seed).standard_normal
    arrays = (draw((batch, size, heads, depth)) for _ in range(4))
    return tuple(jnp.asarray(x, dtype) for x in arrays)


def documents(size, batch=2, seed=1):
    """Segment ids of rows with a few documents and padding at the end."""
    ids = np.sort(np.random.default_rng(seed).integers(1, 4, (batch, size)), axis=1)
    ids[0, size - size // 4 :] = 0
    return jnp.asarray(ids, jnp.int32)


@functools.partial(jax.jit, static_argnames=("causal", "implementation"))
def value_and_gradients(q, k, v, dout, *, causal, implementation=None, **masks):
    def run(q, k, v):
        return models.attention(
            q, k, v, causal=causal, implementation=implementation, **masks
        )

    out, pull = jax.vjp(run, q, k, v)
    return out, *pull(dout)


def masks_of(kind, size):
    if kind == "segments":
        return {"segment_ids": documents(size)}
    if kind == "lengths":
        return {"lengths": jnp.array([size - size // 3, 0], jnp.int32)}
    return {}


def assert_equal(ours, expected, tolerance):
    for name, a, b in zip(("out", "dq", "dk", "dv"), ours, expected, strict=True):
        a = np.asarray(a, np.float64)
        scale = max(1.0, np.abs(b).max())
        np.testing.assert_allclose(a / scale, b / scale, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("size", [1, 7, 257, 600])  # 600 is scanned
@pytest.mark.parametrize("kind", ["plain", "segments", "lengths"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_blocked_attention_equals_the_dense_reference(size, kind, causal):
    arrays, masks = inputs(size), masks_of(kind, size)
    ours = value_and_gradients(*arrays, causal=causal, **masks)
    expected = reference(*arrays, causal=causal, **masks)
    assert_equal(ours, expected, TOLERANCE["float32"])


@pytest.mark.parametrize("kind", ["plain", "segments", "lengths"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_scanned_pairs_equal_the_dense_reference(kind, causal, monkeypatch):
    # Tiny blocks: the form of long sequences, at a size that a dense reference takes.
    monkeypatch.setattr(_attention, "_MAX_UNROLLED", 0)
    monkeypatch.setattr(_attention, "_PAIR_BLOCK", 8)
    arrays, masks = inputs(27), masks_of(kind, 27)
    # A function of its own: what is compiled with other blocks must not be reused.
    run = jax.jit(
        functools.partial(value_and_gradients.__wrapped__, causal=causal, **masks)
    )
    ours = run(*arrays)
    expected = reference(*arrays, causal=causal, **masks)
    assert_equal(ours, expected, TOLERANCE["float32"])


@pytest.mark.parametrize("kind", ["plain", "segments"])
def test_bfloat16_inputs_accumulate_in_float32(kind):
    arrays, masks = inputs(130, "bfloat16"), masks_of(kind, 130)
    ours = value_and_gradients(*arrays, causal=True, **masks)
    assert {x.dtype for x in ours} == {jnp.dtype("bfloat16")}
    expected = reference(*arrays, causal=True, **masks)
    assert_equal(ours, expected, TOLERANCE["bfloat16"])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("kind", ["plain", "lengths"])
def test_the_library_form_equals_the_blocked_form(kind, causal):
    arrays, masks = inputs(7), masks_of(kind, 7)
    dense = value_and_gradients(*arrays, causal=causal, implementation="xla", **masks)
    expected = reference(*arrays, causal=causal, **masks)
    assert_equal(dense, expected, TOLERANCE["float32"])


def test_large_scores_do_not_overflow():
    q, k, v, dout = inputs(7)
    ours = value_and_gradients(200 * q, 200 * k, v, dout, causal=True)
    assert all(bool(jnp.isfinite(x).all()) for x in ours)


def test_later_tokens_do_not_change_earlier_outputs():
    q, k, v, _ = inputs(130)
    run = jax.jit(functools.partial(models.attention, causal=True))
    other_k, other_v = k.at[:, 100:].add(1.0), v.at[:, 100:].add(1.0)
    plain, changed = (np.asarray(run(q, *kv)) for kv in ((k, v), (other_k, other_v)))
    np.testing.assert_array_equal(plain[:, :100], changed[:, :100])


def test_a_packed_row_equals_its_documents_alone():
    q, k, v, _ = inputs(40, batch=1)
    ids = jnp.array([[1] * 25 + [2] * 15], jnp.int32)
    attend = jax.jit(functools.partial(models.attention, causal=False))
    packed = np.asarray(attend(q, k, v, segment_ids=ids))
    q, k, v = (np.asarray(x) for x in (q, k, v))
    for part in (slice(0, 25), slice(25, 40)):
        alone = attend(q[:, part], k[:, part], v[:, part])
        np.testing.assert_allclose(packed[:, part], alone, atol=1e-6)


def largest_square(function, size, *args):
    """Largest product of two axes of at least `size` in any array of the program."""

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            yield from (v.aval for v in equation.outvars)
            for sub in core.jaxprs_in_params(equation.params):
                yield from walk(sub)

    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    shapes = [aval.shape for aval in walk(jaxpr) if hasattr(aval, "shape")]
    return [shape for shape in shapes if sum(n >= size for n in shape) > 1]


@pytest.mark.parametrize("size", [512, 1024, 2048])
@pytest.mark.parametrize("kind", ["plain", "segments", "lengths"])
def test_no_array_of_the_program_is_quadratic_in_the_sequence(size, kind):
    arrays = inputs(size, batch=1, heads=1)
    masks = {
        "plain": {},
        "segments": {"segment_ids": jnp.ones((1, size), jnp.int32)},
        "lengths": {"lengths": jnp.array([size], jnp.int32)},
    }[kind]
    run = functools.partial(value_and_gradients.__wrapped__, causal=True, **masks)
    assert largest_square(run, size, *arrays) == []


def test_the_program_does_not_grow_with_long_sequences():
    def equations(size):
        arrays = inputs(size, batch=1, heads=1)
        run = functools.partial(value_and_gradients.__wrapped__, causal=True)
        return len(str(jax.make_jaxpr(run)(*arrays)).splitlines())

    assert equations(8192) == equations(2048) == equations(1024)


def test_segment_ids_need_the_blocked_form():
    q, k, v, _ = inputs(4)
    ids = jnp.ones((2, 4), jnp.int32)
    with pytest.raises(ValueError, match="'blocked' or None"):
        models.attention(q, k, v, causal=True, segment_ids=ids, implementation="xla")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segment_ids": jnp.ones((2, 5), jnp.int32)}, r"segment_ids has shape \(2, 5"),
        ({"lengths": jnp.ones((3,), jnp.int32)}, r"lengths has shape \(3,\)"),
        ({"implementation": "flash"}, "'flash' is unknown"),
        ({"v": jnp.ones((2, 4, 2, 9))}, "all three must be"),
    ],
    ids=["segments", "lengths", "implementation", "shapes"],
)
def test_what_does_not_fit_is_said(change, message):
    q, k, v, _ = inputs(4)
    arguments = {"q": q, "k": k, "v": v, "causal": True} | change
    with pytest.raises(ValueError, match=message):
        models.attention(**arguments)
