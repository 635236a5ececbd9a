import jax
import numpy as np
import pytest

from dataeff_jax import distributed, testing, training


def padded_batches():
    """37 rows in batches of 8; the last is filled with rows of weight 0."""
    batch = testing.mlp_batch(rows=40)
    batch["weights"] = (np.arange(40) < 37).astype(np.float32)
    return [{k: v[i : i + 8] for k, v in batch.items()} for i in range(0, 40, 8)]


@pytest.mark.parametrize("devices", [None, 1, 2, 8])
def test_every_row_counts_once_whatever_the_devices(devices):
    params = testing.mlp_params()
    whole = testing.mlp_batch(rows=40)
    whole = {k: v[:37] for k, v in whole.items() if k != "sample_id"}
    want = float(testing.mlp_loss(params, whole, None)[0]) / 37
    axis = "data" if devices else None
    with jax.set_mesh(distributed.data_mesh(devices or 1)):
        got = training.evaluate(
            testing.mlp_loss, params, padded_batches(), axis_name=axis
        )
    assert got["tokens"] == 37
    np.testing.assert_allclose(got["loss"], want, rtol=1e-6)
    np.testing.assert_allclose(got["perplexity"], np.exp(want), rtol=1e-5)


def test_a_second_evaluation_does_not_compile(caplog):
    params = testing.mlp_params()
    with jax.set_mesh(distributed.data_mesh(2)):
        first = training.evaluate(testing.mlp_loss, params, padded_batches())
        with jax.log_compiles():
            second = training.evaluate(testing.mlp_loss, params, padded_batches())
    assert first == second
    assert "Compiling" not in caplog.text


@pytest.mark.parametrize("batches", [[], "zero"], ids=["none", "weightless"])
def test_nothing_to_evaluate_on_is_an_error(batches):
    if batches == "zero":
        batches = padded_batches()[:1]
        batches[0]["weights"] = np.zeros(8, np.float32)
    with pytest.raises(ValueError, match="batch"):
        training.evaluate(
            testing.mlp_loss, testing.mlp_params(), batches, axis_name=None
        )


def test_a_perplexity_beyond_float_is_infinite():
    batch = {"x": np.ones(2, np.float32)}
    got = training.evaluate(
        lambda p, b, k: (p * b["x"].sum(), 2), np.float32(800), [batch], axis_name=None
    )
    assert got == {"loss": 800.0, "perplexity": float("inf"), "tokens": 2}
