"""The law of the kept tokens, and what it must not depend on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dataeff_jax import token_dropping


def row_keys(count, seed=3, step=5):
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(count))


@functools.partial(
    jax.jit, static_argnames=("size", "num_kept", "always_keep", "group")
)
def sample(keys, **kwargs):
    size = kwargs.pop("size")
    return token_dropping.sample_token_indices(keys, size, **kwargs)


def in_numpy(keys, size, num_kept):
    """Largest bits, of equals the first, in ascending order."""
    draw = jax.vmap(lambda key: jax.random.bits(key, (size,), jnp.uint32))
    bits = np.asarray(draw(keys)).astype(np.int64)
    order = np.argsort(-bits, axis=1, kind="stable")
    return np.sort(order[:, :num_kept], axis=1)


@pytest.mark.parametrize(("size", "num_kept"), [(8, 3), (197, 32), (5, 5), (7, 1)])
def test_the_draw_is_the_largest_bits_in_order(size, num_kept):
    keys = row_keys(16)
    kept = sample(keys, size=size, num_kept=num_kept)
    assert kept.dtype == jnp.int32
    np.testing.assert_array_equal(kept, in_numpy(keys, size, num_kept))


def test_indices_increase_strictly_and_stay_in_range():
    kept = np.asarray(sample(row_keys(500), size=33, num_kept=20))
    assert kept.shape == (500, 20)
    assert (np.diff(kept, axis=1) > 0).all()
    assert kept.min() >= 0
    assert kept.max() < 33


def test_every_position_is_kept_equally_often():
    draws, size, num_kept = 40_000, 16, 5
    kept = np.asarray(sample(row_keys(draws), size=size, num_kept=num_kept))
    share = num_kept / size
    counts = np.bincount(kept.ravel(), minlength=size)
    sigma = np.sqrt(draws * share * (1 - share))
    assert np.abs(counts - draws * share).max() < 5 * sigma


def test_layers_rows_and_steps_draw_independently():
    rows, size, num_kept, layers = 20_000, 8, 4, 3
    fold = jax.vmap(jax.random.fold_in, in_axes=(0, None))

    def held(keys):
        kept = sample(keys, size=size, num_kept=num_kept)
        return np.asarray(jax.nn.one_hot(kept, size, dtype=jnp.int32).sum(1))

    keys = row_keys(rows)
    of_layers = [held(fold(keys, layer)) for layer in range(layers)]
    pairs = [
        (of_layers[0], of_layers[1]),  # layers
        (of_layers[0][:-1], of_layers[0][1:]),  # rows
        (held(keys), held(row_keys(rows, step=6))),  # steps
    ]
    share = num_kept / size
    for first, second in pairs:
        # Each cell of the joint table is a count of a draw with share^2.
        joint = first.T @ second
        sigma = np.sqrt(len(first) * share**2 * (1 - share**2))
        assert np.abs(joint - len(first) * share**2).max() < 5 * sigma
    # Tokens of a row are not independent of each other: rows are the sample.
    everywhere = np.logical_and.reduce(of_layers).mean(1)
    sigma = everywhere.std() / np.sqrt(rows)
    assert abs(everywhere.mean() - share**layers) < 5 * sigma


def test_what_is_always_kept_leaves_the_others_equal_chances():
    kept = np.asarray(sample(row_keys(20_000), size=9, num_kept=4, always_keep=(0, 5)))
    assert (np.diff(kept, axis=1) > 0).all()
    counts = np.bincount(kept.ravel(), minlength=9)
    assert counts[0] == counts[5] == 20_000
    share = 2 / 7
    others = np.delete(counts, [0, 5])
    sigma = np.sqrt(20_000 * share * (1 - share))
    assert np.abs(others - 20_000 * share).max() < 5 * sigma


def test_groups_stay_together_beside_a_class_token():
    kept = np.asarray(
        sample(row_keys(50), size=13, num_kept=9, always_keep=(0,), group=4)
    )
    blocks = kept[:, 1:].reshape(50, 2, 4)
    assert (kept[:, 0] == 0).all()
    assert (blocks - blocks[..., :1] == np.arange(4)).all()
    assert set((blocks[..., 0] % 4).ravel()) == {1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kept": 0}, "num_kept=0 must be at least 1"),
        ({"num_kept": 9}, "max_difficulty=8"),
        ({"always_keep": (8,)}, "do not fit into 8"),
        ({"always_keep": (-1,)}, "positions from 0"),
        ({"always_keep": (0, 1, 2, 3, 4)}, "not more than num_kept=4"),
        ({"group": 3}, "group=3 does not divide the 4 tokens to draw"),
        ({"group": 0}, "group=0"),
        ({"num_kept": 3, "group": 3}, "does not divide the 8 tokens"),
    ],
)
def test_what_cannot_be_drawn_is_refused(change, message):
    arguments = {"num_kept": 4, **change}
    with pytest.raises(ValueError, match=message):
        token_dropping.sample_token_indices(row_keys(1), 8, **arguments)


@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_kept_tokens_do_not_depend_on_devices_or_compilation(num_devices):
    rows, size, num_kept = 8, 64, 16
    expected = in_numpy(row_keys(rows), size, num_kept)
    assert len({tuple(row) for row in expected}) == rows
    mesh = jax.make_mesh((num_devices,), ("data",), devices=jax.devices()[:num_devices])
    draw = functools.partial(
        token_dropping.sample_token_indices, size=size, num_kept=num_kept
    )

    def body(key):
        first = jax.lax.axis_index("data") * (rows // num_devices)
        slots = first + jnp.arange(rows // num_devices)
        return draw(jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, slots))

    key = jax.random.fold_in(jax.random.key(3), 5)
    with jax.set_mesh(mesh):
        sharded = jax.jit(
            jax.shard_map(body, in_specs=jax.P(), out_specs=jax.P("data"))
        )
        np.testing.assert_array_equal(sharded(key), expected)
    auto = jax.sharding.Mesh(jax.devices()[:num_devices], ("data",))
    out = jax.sharding.NamedSharding(auto, jax.P("data"))
    jitted = jax.jit(lambda: draw(row_keys(rows)), out_shardings=out)
    np.testing.assert_array_equal(jitted(), expected)
    np.testing.assert_array_equal(draw(row_keys(rows)), expected)
