import pytest

from dataeff_jax import training

OLD = {
    "seed": 0,
    "train": {"num_steps": 1000, "log_every": 10},
    "optimizer": {"name": "adamw", "kwargs": {"b2": 0.95}},
}


def changed(**train):
    return OLD | {"train": OLD["train"] | train}


def test_the_same_config_passes_in_any_order_and_container():
    new = {k: OLD[k] for k in reversed(OLD)}
    training.check_same_config(OLD | {"b": [1, 2]}, new | {"b": (1, 2)})


def test_another_total_is_told_with_both_values():
    # A cosine made from the new total would jump from 0.50 to 0.85 of its peak.
    with pytest.raises(ValueError, match=r"train\.num_steps: 1000 -> 2000"):
        training.check_same_config(OLD, changed(num_steps=2000))


def test_all_differences_are_told_at_once():
    new = changed(num_steps=2000) | {"seed": 1, "extra": None}
    with pytest.raises(ValueError) as info:
        training.check_same_config(OLD, new)
    text = str(info.value)
    assert "seed: 0 -> 1" in text
    assert "train.num_steps" in text
    assert "extra: '(absent)' -> None" in text


@pytest.mark.parametrize("free", ["train.log_every", "train"])
def test_free_keys_may_differ(free):
    training.check_same_config(OLD, changed(log_every=5), free=(free,))
    assert training.config_hash(OLD, free=(free,)) == training.config_hash(
        changed(log_every=5), free=(free,)
    )


def test_a_free_key_frees_no_other_with_the_same_beginning():
    with pytest.raises(ValueError, match="num_steps"):
        training.check_same_config(OLD, changed(num_steps=1), free=("train.num",))


def test_the_hash_sees_every_value():
    assert training.config_hash(OLD) != training.config_hash(OLD | {"seed": 1})


def test_an_empty_block_differs_from_none():
    with pytest.raises(ValueError, match=r"eval: \{\} -> None"):
        training.check_same_config({"eval": {}}, {"eval": None})


@pytest.mark.parametrize("content", [b"", b'{"train": {"num', b"[1]", b"\xff\xfe"])
def test_a_damaged_file_is_named(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json is damaged \(\d+ bytes"):
        training.read_config(path)
