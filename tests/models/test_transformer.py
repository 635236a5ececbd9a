"""GPT, BERT and ViT: what must not change a result, and what must be refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dataeff_jax import models
from dataeff_jax.models import _layers, _loss, _stack

SIZES = {
    "vocab_size": 48,
    "max_length": 16,
    "num_layers": 2,
    "width": 16,
    "num_heads": 2,
}
CLASSES = {"gpt": models.GPT, "bert": models.BERT}


@functools.cache
def build(name="gpt", **kwargs):
    # Compiled as one program, not operation by operation.
    return nnx.jit(lambda: CLASSES[name](**SIZES, **kwargs, rngs=nnx.Rngs(0)))()


@functools.partial(jax.jit, static_argnums=(0, 1))
def _call(method, graphdef, params, tokens, masks):
    return getattr(nnx.merge(graphdef, params), method)(tokens, **masks)


def logits(model, tokens, **masks):
    return _call("__call__", *nnx.split(model), tokens, masks)


def hidden_states(model, tokens, **masks):
    return _call("hidden_states", *nnx.split(model), tokens, masks)


def tokens_of(batch=4, size=16, seed=0):
    draw = np.random.default_rng(seed).integers
    return jnp.asarray(draw(0, 48, (batch, size)), jnp.int32)


def batch_of(batch=4, size=16):
    weights = np.random.default_rng(2).integers(0, 2, (batch, size))
    return {
        "tokens": tokens_of(batch, size),
        "targets": tokens_of(batch, size, seed=1),
        "weights": jnp.asarray(weights, jnp.float32),
    }


def row_keys(batch=4):
    key = jax.random.key(7)
    return jax.vmap(lambda slot: jax.random.fold_in(key, slot))(jnp.arange(batch))


@functools.partial(jax.jit, static_argnums=0)
def _loss_and_grads(graphdef, params, batch, keys):
    def loss(params):
        total, weight = nnx.merge(graphdef, params).loss(batch, keys=keys)
        return total / weight

    return jax.value_and_grad(loss)(params)


def loss_and_grads(model, batch, keys=None):
    return _loss_and_grads(*nnx.split(model), batch, keys)


def assert_trees_close(a, b, atol):
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, atol=atol)


@pytest.mark.parametrize("name", ["gpt", "bert"])
@pytest.mark.parametrize(
    "change",
    [{"layers": "unroll"}, {"remat": "block"}, {"layers": "unroll", "remat": "block"}],
    ids=["unroll", "remat", "unroll-remat"],
)
def test_how_the_stack_runs_changes_nothing(name, change):
    expected = loss_and_grads(build(name), batch_of())
    assert_trees_close(
        loss_and_grads(build(name, **change), batch_of()), expected, 1e-6
    )


@pytest.mark.parametrize("layers", ["scan", "unroll"])
def test_parameters_of_all_blocks_are_one_stack(layers):
    params = nnx.to_pure_dict(nnx.state(build(layers=layers), nnx.Param))
    assert {leaf.shape[0] for leaf in jax.tree.leaves(params["blocks"])} == {2}
    assert params["blocks"]["up"]["kernel"].shape == (2, 16, 64)


def test_unstack_gives_slices_and_one_stack_back():
    tree = {"w": jnp.arange(6.0).reshape(3, 2)}

    def weigh(tree):
        parts = _stack.unstack(tree, 3)
        return sum((i + 1) * part["w"].sum() for i, part in enumerate(parts))

    gradient = jax.grad(weigh)(tree)["w"]
    np.testing.assert_array_equal(gradient, [[1, 1], [2, 2], [3, 3]])


@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_a_gpt_does_not_look_ahead(positions):
    model, tokens = build(positions=positions), tokens_of()
    plain = np.asarray(logits(model, tokens))
    changed = np.asarray(logits(model, tokens.at[:, 10:].add(1) % 48))
    np.testing.assert_allclose(plain[:, :10], changed[:, :10], atol=1e-6)
    assert not np.allclose(plain[:, 10:], changed[:, 10:])


@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_a_packed_row_equals_its_documents_alone(positions):
    model, tokens = build(positions=positions), tokens_of(batch=1)
    ids = jnp.array([[1] * 9 + [2] * 5 + [0] * 2], jnp.int32)
    places = jnp.array([[*range(9), *range(5), 0, 0]], jnp.int32)
    packed = np.asarray(logits(model, tokens, segment_ids=ids, positions=places))
    for part in (slice(0, 9), slice(9, 14)):
        alone = logits(model, tokens[:, part])
        np.testing.assert_allclose(packed[:, part], alone, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_padding_changes_no_real_token(name):
    model, tokens = build(name), tokens_of(batch=2)
    lengths = jnp.array([16, 11], jnp.int32)
    noise = tokens.at[1, 11:].set(3)
    a = np.asarray(logits(model, tokens, lengths=lengths))
    b = np.asarray(logits(model, noise, lengths=lengths))
    np.testing.assert_array_equal(a[1, :11], b[1, :11])
    alone = np.asarray(logits(model, tokens[1:, :11]))
    np.testing.assert_allclose(a[1, :11], alone[0], atol=1e-5)


def test_rotary_scores_depend_on_distance_only():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 6, 1, 8)), jnp.float32)

    @jax.jit
    def score(shift):
        y = _layers.rotate(x, shift + jnp.arange(6)[None])
        return jnp.einsum("bqhd,bkhd->bqk", y, y)

    scores = score(0), score(100)
    np.testing.assert_allclose(*scores, atol=1e-4)  # angles of 100 in float32


def test_loss_equals_cross_entropy_of_the_logits():
    for name in CLASSES:
        model, batch = build(name), batch_of()
        scores = np.asarray(logits(model, batch["tokens"]), np.float64)
        log_p = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
        targets = np.asarray(batch["targets"])
        right = np.take_along_axis(log_p, targets[..., None], -1)[..., 0]
        loss, weight = jax.jit(model.loss)(batch)
        np.testing.assert_allclose(loss, -np.sum(right * batch["weights"]), rtol=1e-5)
        assert float(weight) == float(batch["weights"].sum())


@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_row_losses_are_the_mean_loss_of_each_row_alone(name, monkeypatch):
    model, batch = build(name), batch_of()
    batch["segment_ids"] = jnp.asarray([[1] * 7 + [2] * 9] * 4)
    for limit in (2**26, 5 * model.vocab_size):  # in one chunk, in chunks of 5 tokens
        monkeypatch.setattr(_loss, "_LOGITS", limit)
        found = jax.jit(lambda model, batch: model.row_losses(batch))(model, batch)
        for row, value in enumerate(found):
            loss, weight = model.loss({k: v[row : row + 1] for k, v in batch.items()})
            # Sums of 16 float32 numbers in another order.
            np.testing.assert_allclose(value, loss / weight, rtol=1e-5)
    del batch["weights"]
    loss, weight = model.loss(batch)
    np.testing.assert_allclose(model.row_losses(batch).mean(), loss / weight, rtol=1e-5)


def test_without_weights_the_count_is_a_python_number():
    model, batch, seen = build(), batch_of(), []
    del batch["weights"]
    jax.eval_shape(lambda batch: seen.append(model.loss(batch)[1]), batch)
    assert seen == [64.0] and type(seen[0]) is float


@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_dropout_of_a_row_does_not_depend_on_the_batch(name):
    model, tokens, keys = build(name, dropout_rate=0.5), tokens_of(), row_keys()
    whole = np.asarray(hidden_states(model, tokens, keys=keys))
    half = hidden_states(model, tokens[2:], keys=keys[2:])
    np.testing.assert_allclose(whole[2:], half, atol=1e-5)
    assert not np.allclose(whole, hidden_states(model, tokens))
    turned = np.asarray(hidden_states(model, tokens, keys=keys[::-1]))
    assert not np.allclose(whole[0], turned[0])


def test_dropout_keeps_the_mean_and_the_rate():
    x = jnp.ones((4, 5000))
    y = np.asarray(_layers.dropout(x, rate=0.25, keys=row_keys()))
    np.testing.assert_allclose((y == 0).mean(), 0.25, atol=0.02)  # 6 sigma of 20,000
    np.testing.assert_allclose(y.mean(), 1.0, atol=0.03)


@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_bfloat16_computes_in_16_bits_and_keeps_float32_parameters(name):
    model = build(name, dtype="bfloat16")
    hidden = jax.eval_shape(model.hidden_states, tokens_of())
    assert hidden.dtype == jnp.bfloat16
    assert jax.eval_shape(model, tokens_of()).dtype == jnp.float32
    value, grads = loss_and_grads(model, batch_of())
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    expected, _ = loss_and_grads(build(name), batch_of())
    np.testing.assert_allclose(value, expected, rtol=1e-2)


@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_the_same_on_one_two_and_eight_devices(name):
    model = build(name, dropout_rate=0.1)
    batch, keys = batch_of(batch=8), row_keys(8)
    del batch["weights"]
    expected = loss_and_grads(model, batch, keys)
    graphdef, params = nnx.split(model)

    def body(params, batch, keys):
        params = jax.tree.map(lambda a: jax.lax.pcast(a, "data", to="varying"), params)

        def loss(params):
            total, weight = nnx.merge(graphdef, params).loss(batch, keys=keys)
            return total / weight

        return jax.lax.pmean(jax.value_and_grad(loss)(params), "data")

    for devices in (1, 2, 8):
        mesh = jax.make_mesh((devices,), ("data",))
        with jax.set_mesh(mesh):
            shards = jax.device_put((batch, keys), jax.P("data"))
            run = jax.jit(
                jax.shard_map(
                    body,
                    in_specs=(jax.P(), jax.P("data"), jax.P("data")),
                    out_specs=jax.P(),
                )
            )
            assert_trees_close(run(params, *shards), expected, 1e-6)


def test_replicated_parameters_get_their_gradient_summed():
    # Parameters that do not vary over devices: the custom rules must agree with that.
    graphdef, params = nnx.split(build())
    batch = batch_of(batch=2)
    _, expected = loss_and_grads(build(), batch)

    def body(params, batch):
        def loss(params):
            return nnx.merge(graphdef, params).loss(batch)[0]

        return jax.grad(loss)(params)

    with jax.set_mesh(jax.make_mesh((2,), ("data",))):
        shards = jax.device_put(batch, jax.P("data"))
        run = jax.jit(
            jax.shard_map(body, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P())
        )
        grads = run(params, shards)
    total = float(batch["weights"].sum())
    assert_trees_close(jax.tree.map(lambda g: g / total, grads), expected, 1e-6)


def test_gpt2_initialisation_scales_the_residual_branches():
    model = nnx.jit(lambda: models.GPT(**SIZES | {"width": 64}, rngs=nnx.Rngs(1)))()
    deviation = {
        name: np.asarray(getattr(model.blocks, name).kernel[...]).std()
        for name in ("qkv", "up", "out", "down")
    }
    expected = {"qkv": 0.02, "up": 0.02, "out": 0.02 / 4**0.5, "down": 0.02 / 4**0.5}
    for name, value in expected.items():
        np.testing.assert_allclose(deviation[name], value, rtol=0.05)
    assert not np.allclose(*np.asarray(model.blocks.up.kernel[...]))


def test_first_loss_is_that_of_a_uniform_guess():
    loss, _ = loss_and_grads(build(), batch_of())
    np.testing.assert_allclose(loss, np.log(48), rtol=0.02)


def test_decay_goes_to_kernels_and_embeddings_only():
    params = nnx.to_pure_dict(nnx.state(build("bert"), nnx.Param))
    mask = models.decay_mask(params)
    decayed = {
        ".".join(path)
        for path, value in nnx.traversals.flatten_mapping(mask).items()
        if value
    }
    assert decayed == {
        "token_embedding.embedding",
        "type_embedding.embedding",
        "blocks.qkv.kernel",
        "blocks.out.kernel",
        "blocks.up.kernel",
        "blocks.down.kernel",
        "head.kernel",
    }
    state = nnx.state(build("bert"), nnx.Param)
    assert jax.tree.leaves(models.decay_mask(state)) == jax.tree.leaves(mask)


def test_stacked_parameters_are_those_of_the_blocks():
    paths = jax.tree_util.tree_leaves_with_path(nnx.state(build(), nnx.Param))
    stacked = [leaf for path, leaf in paths if models.is_stacked(path)]
    assert len(stacked) == 12 and all(leaf.shape[0] == 2 for leaf in stacked)


def test_a_vit_learns_from_its_class_token():
    sizes = {"num_classes": 3, "num_layers": 2, "width": 16, "num_heads": 2}
    model = nnx.jit(
        lambda: models.ViT(image_size=8, patch_size=4, **sizes, rngs=nnx.Rngs(0))
    )()
    images = np.random.default_rng(0).standard_normal((2, 8, 8, 3), np.float32)
    assert jax.eval_shape(model.hidden_states, images).shape == (2, 5, 16)
    np.testing.assert_array_equal(logits(model, images), 0)  # classifier starts at zero
    batch = {"images": images, "labels": jnp.array([0, 2])}
    value, grads = loss_and_grads(model, batch)
    np.testing.assert_allclose(value, np.log(3), rtol=1e-6)
    assert float(jnp.abs(grads["head"]["kernel"][...]).max()) > 0


def test_patches_are_cut_row_by_row():
    from dataeff_jax.models import _vit

    image = jnp.arange(16).reshape(1, 4, 4, 1)
    patches = _vit._patches(image, 2)[0]
    np.testing.assert_array_equal(patches[1], [2, 3, 6, 7])


def test_a_sequence_longer_than_the_positions_is_refused():
    for name in CLASSES:
        with pytest.raises(ValueError, match=r"17 tokens exceeds .* max_length=16"):
            build(name)(tokens_of(size=17))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "num_heads=3 does not divide width=16"),
        ({"dropout_rate": 1.0}, "dropout_rate=1.0"),
        ({"layers": "loop"}, "layers='loop' is unknown"),
        ({"remat": "all"}, "remat='all' is unknown"),
        ({"positions": "alibi"}, "positions='alibi' is unknown"),
        ({"positions": "rope", "num_heads": 16}, "turns pairs of channels"),
        ({"dtype": "int8"}, "dtype='int8' is not a compute dtype"),
        ({"num_layers": 0}, "num_layers=0 must be at least 1"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_built_is_said(change, message):
    with pytest.raises(ValueError, match=message):
        models.GPT(**SIZES | change, rngs=nnx.Rngs(0))


def test_wrong_images_are_refused():
    sizes = {"num_classes": 3, "num_layers": 1, "width": 8, "num_heads": 2}
    with pytest.raises(ValueError, match="patch_size=3 does not divide"):
        models.ViT(image_size=8, patch_size=3, **sizes, rngs=nnx.Rngs(0))
    model = nnx.eval_shape(
        lambda: models.ViT(image_size=8, patch_size=4, **sizes, rngs=nnx.Rngs(0))
    )
    with pytest.raises(ValueError, match="the model was built for"):
        model(jnp.zeros((1, 9, 8, 3)))
