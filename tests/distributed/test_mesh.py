import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dataeff_jax import distributed


@pytest.mark.parametrize("count", [1, 2, 8])
def test_the_mesh_is_explicit_and_has_the_devices_asked_for(count):
    mesh = distributed.data_mesh(count)
    assert dict(mesh.shape) == {"data": count}
    assert mesh.axis_types == (jax.sharding.AxisType.Explicit,)
    assert list(mesh.devices) == jax.devices()[:count]


@pytest.mark.parametrize("count", [0, 9])
def test_too_many_devices_is_an_error_with_both_numbers(count):
    with pytest.raises(ValueError, match=rf"num_devices={count} .* 1 and 8"):
        distributed.data_mesh(count)


@pytest.mark.parametrize(
    ("batch_size", "devices", "accumulation", "nearest"),
    [
        (12, 8, 1, "sizes that do are 8 and 16"),
        (4, 8, 1, "size that does is 8"),
        (0, 8, 1, "size that does is 8"),
        (-8, 8, 1, "size that does is 8"),
        (12, 4, 2, "4 devices x 2 accumulation steps = 8; .* 8 and 16"),
    ],
)
def test_a_batch_that_does_not_divide_says_what_would(
    batch_size, devices, accumulation, nearest
):
    with pytest.raises(ValueError, match=f"batch_size={batch_size} .*{nearest}"):
        distributed.check_batch_size(
            batch_size, num_devices=devices, accumulation_steps=accumulation
        )


def test_batches_that_divide_pass():
    distributed.check_batch_size(8, num_devices=8)
    distributed.check_batch_size(8, num_devices=4, accumulation_steps=2)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_each_device_holds_a_contiguous_part_of_the_rows(count):
    mesh = distributed.data_mesh(count)
    rows = np.arange(16, dtype=np.int32).reshape(8, 2)
    tokens = distributed.shard_batch({"tokens": rows}, mesh)["tokens"]
    assert tokens.sharding.spec == jax.P("data")
    parts = [np.asarray(s.data) for s in tokens.addressable_shards]
    np.testing.assert_array_equal(np.concatenate(parts), rows)


def test_host_keys_stay_on_the_host():
    batch = {"tokens": np.zeros((8, 2), np.int32), "sample_id": np.arange(8)}
    assert set(distributed.shard_batch(batch, distributed.data_mesh())) == {"tokens"}


def test_64_bit_arrays_are_refused_instead_of_wrapped():
    batch = {"ids": np.array([2**31 + 5])}
    with pytest.raises(ValueError, match=r"'ids'.*int64.*narrow"):
        distributed.shard_batch(batch, distributed.data_mesh(1))


def test_shard_batch_checks_the_size_and_needs_a_mesh():
    batch = {"x": np.zeros(12, np.float32)}
    with pytest.raises(ValueError, match=r"12 .* 8 devices"):
        distributed.shard_batch(batch, distributed.data_mesh(8))
    with pytest.raises(ValueError, match="mesh"):
        distributed.shard_batch(batch)


@pytest.mark.parametrize("count", [None, 1, 8])
def test_replicas_share_no_memory_with_the_original(count):
    x = jnp.arange(4.0)
    mesh = None if count is None else distributed.data_mesh(count)
    copy = distributed.replicate({"x": x}, mesh)["x"]
    jax.jit(lambda y: y + 1, donate_argnums=0)(copy)
    np.testing.assert_array_equal(x, np.arange(4.0))


def test_to_host_fetches_whole_arrays():
    mesh = distributed.data_mesh(8)
    rows = np.arange(8, dtype=np.float32)
    x = distributed.shard_batch({"x": rows}, mesh)
    np.testing.assert_array_equal(distributed.to_host(x)["x"], rows)
