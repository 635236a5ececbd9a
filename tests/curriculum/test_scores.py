import math

import numpy as np
import pytest

from dataeff_jax import curriculum


@pytest.mark.parametrize("temperature", [1e-3, 0, 1e-300, 1, 1e300])
@pytest.mark.parametrize(
    "scores",
    [
        [0, 1e4, -5, 1e308],
        [-1e308, 1e308],
        [1e308, 1e308, 1e308],
        [-1e308, -1e308],
        [3],
    ],
)
def test_weights_are_finite_whatever_the_scores(scores, temperature):
    weights = curriculum.sampling_weights(scores, temperature=temperature)
    assert np.isfinite(weights).all()
    assert weights.min() >= 0
    assert abs(weights.sum() - 1) < 1e-6
    top = np.array(scores) == max(scores)
    assert weights[top].min() == weights.max() > 0


def test_weights_are_the_exponentials_over_their_sum():
    scores = np.random.default_rng(0).normal(size=(4, 5))
    weights = curriculum.sampling_weights(scores, temperature=0.7)
    want = np.exp(scores / 0.7) / np.exp(scores / 0.7).sum()
    np.testing.assert_allclose(weights, want, rtol=1e-13)


def test_temperature_0_is_the_largest_alone_or_those_that_share_it():
    weights = curriculum.sampling_weights([1, 3, 2, 3], temperature=0)
    assert weights.tolist() == [0, 0.5, 0, 0.5]


@pytest.mark.parametrize(
    ("scores", "temperature", "message"),
    [
        (
            [1, math.nan, 2],
            1,
            "1 of 3 scores are no finite numbers, the first: nan of 1",
        ),
        ({"a": 1, "b": math.inf}, 1, "inf of 'b'"),
        ([], 1, "no scores"),
        ([1], -1, "temperature=-1"),
        ([1], math.nan, "temperature=nan"),
        ([1], math.inf, "temperature=inf"),
    ],
)
def test_what_is_no_number_is_told(scores, temperature, message):
    with pytest.raises(ValueError, match=message):
        curriculum.sampling_weights(scores, temperature=temperature)


def test_scores_of_quarters_of_a_metric_become_a_mixture(tmp_path):
    rows = [{"loss": np.float64(i % 7)} for i in range(100)]
    metric = curriculum.function_metric(
        lambda record: float(record["loss"]), name="loss", dtype="float64"
    )
    index = curriculum.analyze(rows, [metric], tmp_path / "index")
    buckets = curriculum.percentile_buckets(index, "loss", borders=(25, 50, 75))
    losses = index.values("loss")
    assert sorted(np.concatenate(list(buckets.values())).tolist()) == list(range(100))
    means = {name: losses[samples].mean() for name, samples in buckets.items()}
    assert list(means) == ["loss_0_25", "loss_25_50", "loss_50_75", "loss_75_100"]
    assert list(means.values()) == sorted(means.values())
    mixture = curriculum.Mixture(
        {name: len(samples) for name, samples in buckets.items()},
        weights=curriculum.sampling_weights(means, temperature=2.0),
        batch_size=20,
        seed=0,
    )
    parts = {n: curriculum.PickedRows(rows, samples) for n, samples in buckets.items()}
    steps = curriculum.batches(mixture.rows(parts), mixture)
    batch = steps[3]
    for loss, sample, corpus in zip(
        batch["loss"], batch["sample_id"], batch["corpus"], strict=True
    ):
        assert loss == sample % 7
        assert sample in buckets[mixture.names[corpus]]
    drawn = mixture.counts(50)
    assert drawn[3] > drawn[2] > drawn[1] > drawn[0] > 0


def test_buckets_are_those_of_the_percentiles_and_ties_are_split(tmp_path):
    metric = curriculum.function_metric(lambda r: r, name="m", dtype="int64")
    index = curriculum.analyze([5, 5, 5, 1, 1, 9, 5], [metric], tmp_path / "index")
    buckets = curriculum.percentile_buckets(index, "m", borders=(50,))
    assert {n: s.tolist() for n, s in buckets.items()} == {
        "m_0_50": [3, 4, 0, 1],
        "m_50_100": [2, 6, 5],
    }
    for borders in ((0,), (100,), (50, 50), (60, 40), (1, 2)):
        with pytest.raises(ValueError, match="borders="):
            curriculum.percentile_buckets(index, "m", borders=borders)
    with pytest.raises(ValueError, match="no metric"):
        curriculum.percentile_buckets(index, "x", borders=(50,))


def test_picked_rows_tell_their_number_in_the_whole():
    picked = curriculum.PickedRows([{"x": i} for i in range(5)], [4, 2])
    assert [dict(picked[i]) for i in range(len(picked))] == [
        {"sample_id": 4, "x": 4},
        {"sample_id": 2, "x": 2},
    ]
    with pytest.raises(IndexError):
        picked[-1]
    for samples in ([5], [-1], [], [[1]], [0.5]):
        with pytest.raises(ValueError, match="samples must"):
            curriculum.PickedRows([0] * 5, samples)
