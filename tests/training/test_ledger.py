import dataclasses
import json

import numpy as np
import pytest

from dataeff_jax import training


def test_counts_beyond_32_bits_stay_exact():
    ledger = training.Ledger(tokens=2_147_483_000)
    for _ in range(3):
        ledger = ledger.add(samples=512, tokens=512 * 4096, flops=2**70)
    assert ledger.tokens == 2_153_774_456
    assert ledger.samples == 1536
    assert ledger.flops == 3 * 2**70


def test_numpy_integers_become_python_integers():
    ledger = training.Ledger().add(samples=np.int32(3), tokens=np.int64(2**40))
    assert {type(v) for v in dataclasses.asdict(ledger).values()} == {int}


@pytest.mark.parametrize("value", [1.0, "3", np.float32(2), None])
def test_what_is_no_integer_is_refused(value):
    with pytest.raises(ValueError, match=r"tokens=.*integer"):
        training.Ledger().add(tokens=value)


@pytest.mark.parametrize("value", [-1, True])
def test_what_is_no_count_is_refused(value):
    with pytest.raises(ValueError, match=r"samples=.*count"):
        training.Ledger(samples=value)


def test_json_keeps_every_count():
    ledger = training.Ledger(1, 2, 3, 2**80)
    text = json.dumps(ledger.to_json())
    assert training.Ledger.from_json(json.loads(text)) == ledger


def test_json_with_a_missing_count_names_it():
    with pytest.raises(ValueError, match=r"'flops'.*but got \['samples'\]"):
        training.Ledger.from_json({"samples": 1})


def test_layer_tokens_are_counted_apart_from_the_clock():
    # 4 of 6 layers keep 64 of 128 tokens.
    ledger = training.Ledger().add(samples=1, tokens=128, layer_tokens=2 * 128 + 4 * 64)
    assert (ledger.tokens, ledger.layer_tokens) == (128, 512)
