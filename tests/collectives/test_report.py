"""The report finds every collective of a compiled program and counts its bytes."""

import jax
import jax.numpy as jnp
import pytest

from dataeff_jax import collectives

FLOAT = 4 * 8 * 16  # bytes a device holds: float32[8, 16]


def report(body, *, axes=(8,), names=("data",), flag=False, check_vma=True):
    mesh = jax.make_mesh(axes, names)
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    rows = 8 * mesh.shape["data"]
    arguments = [jax.ShapeDtypeStruct((rows, 16), jnp.float32, sharding=sharding)]
    specs = (jax.P("data"),)
    if flag:
        arguments.append(jax.ShapeDtypeStruct((), jnp.int32))
        specs = (jax.P("data"), jax.P())
    run = jax.shard_map(
        body, mesh=mesh, in_specs=specs, out_specs=jax.P("data"), check_vma=check_vma
    )
    return collectives.collective_report(jax.jit(run).lower(*arguments).compile())


def add(x):
    return jax.lax.pcast(jax.lax.psum(x, "data"), "data", to="varying")


BODIES = {
    "all-reduce": (add, 2 * FLOAT * 7 // 8),
    "all-gather": (lambda x: jax.lax.all_gather(x, "data"), 7 * FLOAT),
    "reduce-scatter": (
        lambda x: jax.lax.psum_scatter(x, "data", tiled=True),
        FLOAT * 7 // 8,
    ),
    "all-to-all": (
        lambda x: jax.lax.all_to_all(x, "data", 0, 0, tiled=True),
        FLOAT * 7 // 8,
    ),
    "collective-permute": (
        lambda x: jax.lax.ppermute(x, "data", [(i, (i + 1) % 8) for i in range(8)]),
        FLOAT,
    ),
}


@pytest.mark.parametrize("op", BODIES)
def test_bytes_on_the_wire(op):
    body, wire_bytes = BODIES[op]
    [found] = report(body)
    assert (found.op, found.dtype, found.group_size) == (op, "f32", 8)
    assert found.wire_bytes == wire_bytes
    assert (found.times, found.conditional) == (1, False)


def test_a_group_is_one_axis_of_the_mesh():
    [found] = report(add, axes=(2, 4), names=("model", "data"))
    assert found.group_size == 4


def test_narrow_integers_are_counted_as_they_travel():
    [found] = report(
        lambda x: jax.lax.all_to_all(x.astype(jnp.uint8), "data", 0, 0, tiled=True)
    )
    assert (found.dtype, found.payload_bytes) == ("u8", FLOAT // 4)


def test_a_scan_multiplies_and_its_sum_counts_all_runs():
    found = report(
        lambda x: jax.lax.scan(lambda c, _: (c + add(c), None), x, length=5)[0]
    )
    assert [item.times for item in found] == [5]
    assert collectives.collective_bytes(found) == 5 * found[0].wire_bytes


def test_a_while_loop_of_unknown_length_is_marked():
    found = report(
        lambda x, n: jax.lax.fori_loop(0, n, lambda i, c: add(c), x), flag=True
    )
    assert [item.times for item in found] == [None]


def test_a_branch_is_marked():
    found = report(lambda x, n: jax.lax.cond(n > 0, add, lambda v: 2 * v, x), flag=True)
    assert [item.conditional for item in found] == [True]


def test_no_collective_no_entry():
    assert report(lambda x: 2 * x) == []


HLO = """HloModule toy, num_partitions=16

%async (p: bf16[32]) -> bf16[2] {
  %p = bf16[32]{0} parameter(0)
  ROOT %rs = bf16[2]{0} reduce-scatter(%p), replica_groups=[1,16]<=[16], to_apply=%add
}

ENTRY %main (a: f32[10], b: bf16[32]) -> f32[10] {
  %a = f32[10]{0} parameter(0)
  %b = bf16[32]{0} parameter(1)
  %start = ((bf16[32]{0}), bf16[2]{0}) async-start(%b), calls=%async
  %done = bf16[2]{0} async-done(%start)
  %ar = (f32[10]{0}, bf16[32]{0}) all-reduce-start(%a, %b), replica_groups={}
  ROOT %out = f32[10]{0} all-reduce-done(%ar)
}
"""


def test_asynchronous_and_combined_forms_of_gpus():
    scatter, reduce = collectives.collective_report(HLO)
    assert (scatter.op, scatter.group_size, scatter.wire_bytes) == (
        "reduce-scatter",
        16,
        60,
    )
    assert (reduce.op, reduce.dtype, reduce.payload_bytes) == (
        "all-reduce",
        "bf16+f32",
        104,
    )
