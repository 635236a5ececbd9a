"""Difficulty under a model: its values, its batches, and what it cannot do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dataeff_jax import curriculum, models

SIZE = 8
DRAW = np.random.default_rng(0)
TOKENS = DRAW.integers(0, 16, (37, SIZE + 1)).astype(np.int32)
ROWS = [
    {"tokens": row[:-1], "targets": row[1:], "sample_id": np.int64(i)}
    for i, row in enumerate(TOKENS)
]


@pytest.fixture(scope="module")
def model():
    return models.GPT(
        vocab_size=16,
        max_length=SIZE,
        num_layers=2,
        width=8,
        num_heads=2,
        rngs=nnx.Rngs(0),
    )


def loss_of(model, **kwargs):
    return curriculum.model_loss(models.GPT.row_losses, params=model, **kwargs)


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_the_loss_and_the_perplexity_are_those_of_the_model(model, tmp_path):
    perplexity = curriculum.model_perplexity(models.GPT.row_losses, params=model)
    index = curriculum.analyze(ROWS, [loss_of(model), perplexity], tmp_path / "index")
    for i, row in enumerate(ROWS):
        one = {k: jnp.asarray(row[k])[None] for k in ("tokens", "targets")}
        want = float(model.loss(one)[0]) / SIZE
        # One float32 sum of 8 numbers beside another.
        np.testing.assert_allclose(index.values("loss")[i], want, rtol=1e-6)
        np.testing.assert_allclose(
            index.values("perplexity")[i], np.exp(want), rtol=1e-5
        )
    assert index.values("loss").dtype == np.float32
    np.testing.assert_array_equal(index.order("loss"), index.order("perplexity"))


@pytest.mark.parametrize("shard_size", [1, 5, 6, 1000])
def test_the_bytes_do_not_depend_on_the_shards(model, shard_size, tmp_path):
    metrics = [loss_of(model, batch_size=4), curriculum.sequence_length()]
    curriculum.analyze(ROWS, metrics, tmp_path / "whole", shard_size=37)
    curriculum.analyze(ROWS, metrics, tmp_path / "cut", shard_size=shard_size)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


@pytest.mark.parametrize("batch_size", [1, 4, 37, 64])
def test_every_batch_has_one_shape_and_compiles_once(batch_size, tmp_path):
    traced = []

    def loss(params, batch):
        traced.append({name: array.shape for name, array in batch.items()})
        return params * batch["tokens"].sum(axis=1)

    metric = curriculum.model_loss(loss, params=jnp.float32(2), batch_size=batch_size)
    index = curriculum.analyze(ROWS, [metric], tmp_path / "index", shard_size=10)
    shape = (batch_size, SIZE)
    assert traced == [{"tokens": shape, "targets": shape}]
    np.testing.assert_array_equal(
        index.values("loss"), 2 * TOKENS[:, :-1].sum(axis=1, dtype=np.float32)
    )


def test_other_parameters_are_another_metric(model):
    other = jax.tree.map(lambda x: x, model)
    assert loss_of(other).fingerprint == loss_of(model).fingerprint
    changed = jax.tree.map(lambda x: x.at[(0,) * x.ndim].add(1e-3), model)
    settings = [{}, {"version": "2"}, {"batch_size": 7}, {"name": "surprise"}]
    found = {loss_of(model, **kwargs).fingerprint for kwargs in settings}
    found.add(loss_of(changed).fingerprint)
    assert len(found) == 5


def test_processes_cannot_carry_it(model, tmp_path):
    with pytest.raises(ValueError, match=r"loss cannot be sent.*\(num_workers=0\)"):
        curriculum.analyze(ROWS, [loss_of(model)], tmp_path / "index", num_workers=2)


ODD = {
    "a row that is longer": (
        [*ROWS, {"tokens": np.zeros(9), "targets": np.zeros(9)}],
        r"Sample 37 has fields of shapes .*\(9,\).* pack the documents",
    ),
    "a row without a field": ([*ROWS, {"tokens": TOKENS[0]}], "Sample 37 has fields"),
    "records that are arrays": (list(TOKENS), "Sample 0 is ndarray; loss needs"),
    "no weight": (
        [
            row | {"weights": np.full(SIZE, i != 3, np.float32)}
            for i, row in enumerate(ROWS)
        ],
        "loss of sample 3 is nan",
    ),
}


@pytest.mark.parametrize("case", ODD)
def test_samples_that_do_not_serve_are_named(model, case, tmp_path):
    rows, message = ODD[case]
    with pytest.raises(ValueError, match=message):
        curriculum.analyze(rows, [loss_of(model)], tmp_path / "index")
    assert not list(tmp_path.iterdir())


def test_a_function_must_give_one_number_a_row(tmp_path):
    metric = curriculum.model_loss(
        lambda params, batch: batch["tokens"].mean(), params=()
    )
    with pytest.raises(ValueError, match=r"gave shape \(\) for a batch of 32 rows"):
        curriculum.analyze(ROWS, [metric], tmp_path / "index")


def test_a_perplexity_that_float32_does_not_hold_is_told(tmp_path):
    metric = curriculum.model_perplexity(
        lambda params, batch: 0 * batch["tokens"][:, 0] + 100.0, params=()
    )
    with pytest.raises(ValueError, match="which its dtype float32 does not hold"):
        curriculum.analyze(ROWS, [metric], tmp_path / "index")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"name": "my loss"}, "must be a word"),
    ],
)
def test_bad_arguments_are_told(kwargs, message):
    with pytest.raises(ValueError, match=message):
        curriculum.model_loss(lambda params, batch: 0, params=(), **kwargs)
    with pytest.raises(ValueError, match="must be callable"):
        curriculum.model_perplexity(None, params=())
