"""Models that drop tokens: same parameters, same plain model where nothing drops."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dataeff_jax import distributed, models, optimizers, token_dropping, training

SIZES = {"num_layers": 4, "width": 16, "num_heads": 2}
TEXT = {"vocab_size": 48, "max_length": 16}
IMAGE = {"image_size": 12, "patch_size": 3, "num_classes": 5, "num_channels": 1}
BUILD = {
    "gpt": lambda **kw: models.GPT(**TEXT, **SIZES, **kw, rngs=nnx.Rngs(0)),
    "bert": lambda **kw: models.BERT(**TEXT, **SIZES, **kw, rngs=nnx.Rngs(0)),
    "vit": lambda **kw: models.ViT(**IMAGE, **SIZES, **kw, rngs=nnx.Rngs(0)),
}
LENGTH = {"gpt": 16, "bert": 16, "vit": 17}


@functools.cache
def build(name="gpt", **kwargs):
    return nnx.jit(lambda: BUILD[name](**kwargs))()


def batch_of(name="gpt", rows=4, packed=False):
    draw = np.random.default_rng(0)
    if name == "vit":
        images = draw.standard_normal((rows, 12, 12, 1)).astype(np.float32)
        return {"images": images, "labels": draw.integers(0, 5, rows).astype(np.int32)}
    tokens = draw.integers(0, 48, (rows, 17)).astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    if packed:
        ids = np.array([[1] * 9 + [2] * 5 + [0] * 2], np.int32)
        places = np.array([[*range(9), *range(5), 0, 0]], np.int32)
        batch["segment_ids"] = np.repeat(ids, rows, axis=0)
        batch["positions"] = np.repeat(places, rows, axis=0)
        batch["weights"] = (batch["segment_ids"] > 0).astype(np.float32)
    return batch


def row_keys(rows=4):
    key = jax.random.key(7)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(rows))


@functools.partial(jax.jit, static_argnums=0)
def _loss_and_grads(graphdef, params, batch, keys):
    def loss(params):
        total, weight = nnx.merge(graphdef, params).loss(batch, keys=keys)
        return total / weight

    return jax.value_and_grad(loss)(params)


def loss_and_grads(model, batch, keys=None):
    return _loss_and_grads(*nnx.split(model), batch, keys)


def assert_trees_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_trees_close(a, b, atol):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol), a, b)


def paths_of(model):
    state = nnx.state(model)
    return [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(state)]


def variables_of(model):
    nodes = nnx.iter_graph(model)
    return {path: node for path, node in nodes if isinstance(node, nnx.Variable)}


@pytest.mark.parametrize("name", BUILD)
def test_the_arrays_are_shared_and_stay_where_they_are(name):
    model = build(name)
    dropping = token_dropping.with_random_ltd(model, num_kept=4)
    assert type(dropping) is type(model)
    assert paths_of(dropping) == paths_of(model)
    before, after = variables_of(model), variables_of(dropping)
    assert before.keys() == after.keys()
    assert all(before[path] is after[path] for path in before)
    assert not hasattr(model.blocks, "random_ltd")
    again = token_dropping.with_random_ltd(dropping, num_kept=np.int64(4))
    assert nnx.graphdef(again) == nnx.graphdef(dropping)
    assert hash(nnx.graphdef(again)) == hash(nnx.graphdef(dropping))


def test_checkpoints_go_both_ways(tmp_path):
    plain = build()
    dropping = token_dropping.with_random_ltd(build(), num_kept=4)
    batch = batch_of()
    for trained, restored in ((plain, dropping), (dropping, plain)):
        _, params = nnx.split(trained)
        changed = jax.tree.map(lambda p: p + 1, params)
        directory = tmp_path / type(trained.blocks).__name__
        state = training.TrainState.create(changed, optax.sgd(1.0))
        with training.Checkpoints(directory) as checkpoints:
            checkpoints.save(1, state, {})
        graphdef, params = nnx.split(restored)
        with training.Checkpoints(directory) as checkpoints:
            start = training.TrainState.create(params, optax.sgd(1.0))
            state, _ = checkpoints.restore_latest(start)
        assert_trees_equal(state.params, changed)
        nnx.merge(graphdef, state.params).loss(batch)


@pytest.mark.parametrize("name", BUILD)
@pytest.mark.parametrize("layers", ["scan", "unroll"])
@pytest.mark.parametrize("case", ["evaluation", "all kept", "eval()"])
def test_where_nothing_drops_it_is_the_plain_model_bit_for_bit(name, layers, case):
    model = build(name, layers=layers)
    kept = 4 if case != "all kept" else LENGTH[name]
    keys = None if case == "evaluation" else row_keys()
    dropping = token_dropping.with_random_ltd(model, num_kept=kept)
    if case == "eval()":
        dropping.eval()
    batch = batch_of(name)
    assert_trees_equal(
        loss_and_grads(dropping, batch, keys), loss_and_grads(model, batch, keys)
    )


def optimized_hlo(model, batch, keys):
    lowered = _loss_and_grads.lower(*nnx.split(model), batch, keys)
    # Where in the source an operation was written is no part of the program.
    text = re.sub(r", metadata=\{[^}]*\}", "", lowered.compile().as_text())
    return [line for line in text.splitlines() if " = " in line or "HloModule" in line]


@pytest.mark.parametrize("options", [{}, {"remat": "block"}, {"dropout_rate": 0.1}])
def test_at_keep_one_the_optimized_program_is_the_plain_one(options):
    model, keys = build(**options), row_keys()
    dropping = token_dropping.with_random_ltd(model, num_kept=16)
    plain = optimized_hlo(model, batch_of(), keys)
    assert len(plain) > 100
    assert optimized_hlo(dropping, batch_of(), keys) == plain


def test_twenty_steps_at_keep_one_end_in_the_same_bits():
    ends = []
    for model in (build(), token_dropping.with_random_ltd(build(), num_kept=16)):
        step_fn, state = step_of(model)
        for _ in range(20):
            state, metrics = step_fn(state, batch_of(), jax.random.key(0))
        ends.append((state.params, metrics))
    assert_trees_equal(*ends)


@pytest.mark.parametrize(
    ("name", "kept"),
    [("gpt", 6), ("gpt", (None, 9, 5, 5)), ("bert", 6), ("vit", (3, None, 7, None))],
)
def test_how_the_stack_runs_changes_nothing(name, kept):
    batch, keys = batch_of(name), row_keys()
    found = [
        loss_and_grads(
            token_dropping.with_random_ltd(build(name, **options), num_kept=kept),
            batch,
            keys,
        )
        for options in (
            {},
            {"remat": "block"},
            {"layers": "unroll", "remat": "block"},
        )
    ]
    plain = jax.tree.leaves(loss_and_grads(build(name), batch))
    some = zip(jax.tree.leaves(found[0]), plain, strict=True)
    assert not all(np.array_equal(a, b) for a, b in some)
    for other in found[1:]:
        # The same sums in another order.
        assert_trees_close(other, found[0], atol=2e-6)


def kept_sets(keys, layer, num_kept, size=16, name="blocks"):
    """What a layer of the stack keeps, drawn by hand from the rows' keys."""
    place = token_dropping._module._place((name,))
    fold = jax.vmap(jax.random.fold_in, in_axes=(0, None))
    keys = fold(fold(keys, layer), place)
    return token_dropping.sample_token_indices(keys, size, num_kept=num_kept)


@pytest.mark.parametrize("positions", ["learned", "rope"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_dropping_gpt_is_its_layers_on_hand_drawn_tokens(positions, packed):
    model, keys = build(positions=positions), row_keys()
    batch, counts = batch_of(packed=packed), (None, 9, 5, None)
    dropping = token_dropping.with_random_ltd(model, num_kept=counts)
    masks = {k: jnp.asarray(batch[k]) for k in ("segment_ids", "positions") if packed}
    x = model.token_embedding(jnp.asarray(batch["tokens"]))
    if positions == "learned":
        places = masks.get("positions", jnp.arange(16)[None])
        x = x + model.position_embedding(places)
    graphdef, state = nnx.split(model.blocks)
    for layer, count in enumerate(counts):
        block = nnx.merge(graphdef, jax.tree.map(lambda p, i=layer: p[i], state))
        arguments = {"positions": jnp.arange(16)[None].repeat(4, 0), **masks}
        rows = jnp.arange(4)[:, None]
        kept = jnp.arange(16)[None].repeat(4, 0)
        if count is not None:
            kept = kept_sets(keys, layer, count)
        arguments = {k: v[rows, kept] for k, v in arguments.items()}
        x = x.at[rows, kept].set(block(x[rows, kept], **arguments))
    want = model.final_norm(x)
    call = jax.jit(lambda: dropping.hidden_states(batch["tokens"], keys=keys, **masks))
    np.testing.assert_allclose(call(), want, atol=1e-5)


def test_the_class_token_can_be_kept_always():
    model = token_dropping.with_random_ltd(build("vit"), num_kept=1, always_keep=(0,))
    images = jnp.asarray(batch_of("vit")["images"])
    hidden = jax.jit(lambda m, x, k: m.hidden_states(x, keys=k))
    # Only the class token passes through the middle layers, so nothing is random.
    first = hidden(model, images, row_keys())
    second = hidden(model, images, jax.random.split(jax.random.key(1), 4))
    np.testing.assert_array_equal(first, second)


def step_of(model, axis_name=None, accumulation_steps=1):
    graphdef, params = nnx.split(model, nnx.Param)
    links = [optimizers.pmean_grads(axis_name)] if axis_name else []
    tx = optax.chain(*links, optax.sgd(0.5))
    step_fn = training.data_parallel_step(
        lambda params, batch, keys: nnx.merge(graphdef, params).loss(batch, keys=keys),
        tx,
        axis_name=axis_name,
        accumulation_steps=accumulation_steps,
    )
    params = jax.tree.map(jnp.copy, params)  # the step donates its state
    return step_fn, training.TrainState.create(params, tx)


@pytest.mark.parametrize(
    ("num_devices", "accumulation_steps"), [(1, 1), (1, 4), (2, 2), (8, 1)]
)
def test_what_is_kept_does_not_depend_on_devices_or_accumulation(
    num_devices, accumulation_steps
):
    model = token_dropping.with_random_ltd(build(remat="block"), num_kept=5)
    batch = batch_of(rows=8)
    expected, _ = one_device_step()
    with jax.set_mesh(distributed.data_mesh(num_devices)):
        step_fn, state = step_of(model, "data", accumulation_steps)
        state, metrics = step_fn(
            state, distributed.shard_batch(batch), jax.random.key(0)
        )
    # Another kept token anywhere would change gradients in the second digit.
    assert_trees_close(jax.device_get(state.params), expected, atol=1e-6)
    assert metrics["loss_sum"].shape == (num_devices,)


@functools.cache
def one_device_step():
    model = token_dropping.with_random_ltd(build(), num_kept=5)
    step_fn, state = step_of(model)
    state, metrics = step_fn(state, batch_of(rows=8), jax.random.key(0))
    return jax.device_get((state.params, metrics))


class Layer(nnx.Module):
    """A block that somebody else wrote: it takes a mask, and no keys."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.up = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x, mask=None):
        x = x + self.attend(self.norm(x), mask=mask)
        return x + nnx.gelu(self.up(x))


class Listed(nnx.Module):
    def __init__(self, rngs, num_layers=4):
        self.layers = nnx.List([Layer(rngs) for _ in range(num_layers)])
        self.head = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x, mask=None, **randomness):
        for layer in self.layers:
            x = layer(x, mask, **randomness) if randomness else layer(x, mask)
        return self.head(x)


@pytest.fixture
def free_ranks():
    with jax.numpy_rank_promotion("allow"):  # flax's own layers promote ranks
        yield


def listed_inputs():
    x = np.random.default_rng(0).standard_normal((2, 8, 16)).astype(np.float32)
    return jnp.asarray(x), jnp.tril(jnp.ones((1, 1, 8, 8), bool))


@pytest.mark.usefixtures("free_ranks")
def test_a_model_with_a_list_of_blocks_drops_by_a_stream_of_its_own():
    model = Listed(nnx.Rngs(0))
    x, mask = listed_inputs()
    dropping = token_dropping.with_random_ltd(
        model, num_kept=4, rngs=nnx.Rngs(token_drop=1)
    )
    assert [type(layer).__name__ for layer in dropping.layers] == [
        "Layer",
        "RandomLTDLayer",
        "RandomLTDLayer",
        "Layer",
    ]
    plain = model(x, mask)
    first, second = dropping(x, mask), dropping(x, mask)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, plain)
    params = nnx.state(dropping, nnx.Param)
    assert jax.tree.structure(params) == jax.tree.structure(nnx.state(model))
    dropping.eval()
    np.testing.assert_array_equal(dropping(x, mask), plain)


@pytest.mark.usefixtures("free_ranks")
def test_a_model_that_hands_keys_on_drops_by_them():
    model, (x, mask) = Listed(nnx.Rngs(0)), listed_inputs()
    dropping = token_dropping.with_random_ltd(
        model, num_kept=4, where=lambda path, index: path == ("layers", 2)
    )
    keys = row_keys(2)
    place = token_dropping._module._place(("layers", 2))
    folded = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, place)
    kept = token_dropping.sample_token_indices(folded, 8, num_kept=4)
    want = x
    for index, layer in enumerate(model.layers):
        if index == 2:
            want = token_dropping.drop_tokens(layer, want, kept, mask=mask)
        else:
            want = layer(want, mask)
    # Only the dropping layer takes keys, so it is called alone.
    got = x
    for index, layer in enumerate(dropping.layers):
        got = layer(got, mask, keys=keys) if index == 2 else layer(got, mask)
    np.testing.assert_allclose(got, want, atol=1e-6)
    np.testing.assert_array_equal(dropping(x, mask), model(x, mask))


@pytest.mark.usefixtures("free_ranks")
def test_streams_work_with_vmap_and_scan_of_nnx():
    @nnx.split_rngs(splits=4)
    @nnx.vmap
    def make(rngs):
        return token_dropping.dropping_block(Layer(rngs), num_kept=3, rngs=rngs)

    stack, (x, _) = make(nnx.Rngs(0)), listed_inputs()

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def run(x, layer):
        y = layer(x)
        return y, (y != x).any(axis=-1)  # [B, S], tokens that did not pass by

    _, computed = run(x, stack)
    assert (computed.sum(-1) == 3).all()
    assert len({np.asarray(c).tobytes() for c in computed}) == 4
    _, again = run(x, stack)
    assert not np.array_equal(computed, again)

    @nnx.jit
    def step(stack):
        value, grads = nnx.value_and_grad(lambda s: jnp.mean(run(x, s)[0] ** 2))(stack)
        params = nnx.state(stack, nnx.Param)
        nnx.update(stack, jax.tree.map(lambda p, g: p - 0.03 * g, params, grads))
        return value

    losses = [float(step(stack)) for _ in range(20)]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])


def test_keep_zero_is_refused_and_keep_one_trains():
    with pytest.raises(ValueError, match="num_kept=0 must be at least 1"):
        token_dropping.with_random_ltd(build(), num_kept=0)
    dropping = token_dropping.with_random_ltd(build(), num_kept=1)
    for leaf in jax.tree.leaves(loss_and_grads(dropping, batch_of(), row_keys())):
        assert np.isfinite(leaf).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"where": lambda path, index: False}, "no layer was selected"),
        ({"num_kept": (4, 4)}, "2 entries"),
        ({"num_kept": 4, "group": 3}, "group=3 does not divide"),
    ],
)
def test_what_cannot_be_built_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        token_dropping.with_random_ltd(build(), **{"num_kept": 4, **change})


def test_two_lists_of_layers_need_a_choice():
    class Two(nnx.Module):
        def __init__(self, rngs):
            self.encoder, self.decoder = Listed(rngs, 3), Listed(rngs, 3)

    model = Two(nnx.Rngs(0))
    with pytest.raises(ValueError, match="2 stacks or lists"):
        token_dropping.with_random_ltd(model, num_kept=4)
    chosen = token_dropping.with_random_ltd(
        model, num_kept=4, where=lambda path, index: path[0] == "decoder" and index == 1
    )
    assert type(chosen.decoder.layers[1]).__name__ == "RandomLTDLayer"
    assert type(chosen.encoder.layers[1]) is Layer


def test_keys_of_the_wrong_number_are_refused():
    dropping = token_dropping.with_random_ltd(build(), num_kept=4)
    with pytest.raises(ValueError, match="one key a row"):
        dropping.blocks(jnp.ones((4, 16, 16)), keys=row_keys(3))
    with pytest.raises(ValueError, match="run_blocks"):
        dropping.blocks(jnp.ones((4, 16, 16)), keys=row_keys(4))


@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_the_compiler_counts_the_operations_of_the_formula(name):
    sizes = {"vocab_size": 64, "max_length": 512, "num_layers": 3, "width": 512}
    make = {"gpt": models.GPT, "bert": models.BERT}[name]
    model = nnx.eval_shape(
        lambda: make(**sizes, num_heads=4, layers="unroll", rngs=nnx.Rngs(0))
    )
    params = nnx.state(model)
    tokens = jax.ShapeDtypeStruct((1, 512), jnp.int32)
    keys = jax.eval_shape(lambda: row_keys(1))
    for kept in (512, 256, 128, 64):
        graphdef = nnx.graphdef(token_dropping.with_random_ltd(model, num_kept=kept))
        call = jax.jit(lambda p, t, k, g=graphdef: nnx.merge(g, p)(t, keys=k))
        compiled = call.lower(params, tokens, keys).compile()
        counted = compiled.cost_analysis()["flops"]
        formula = model.forward_flops(512, num_kept=kept)
        print(kept, counted / formula)
        # The formula leaves out norms, softmax and GELU, and of causal scores those
        # that blocks on the diagonal compute for nothing.
        assert abs(counted / formula - 1) < 0.03
