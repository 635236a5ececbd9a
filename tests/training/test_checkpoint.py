import json
import logging
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dataeff_jax import distributed, models, optimizers, testing, training


def chain():
    return optax.chain(
        optimizers.pmean_grads("data"),
        optimizers.clip_by_global_norm(1.0),
        optimizers.with_learning_rate(optax.adamw, mu_dtype=jnp.bfloat16),
    )


def run(state, first, count, *, devices):
    """Trains some steps on some devices; the batch depends on the step alone."""
    step = training.data_parallel_step(testing.mlp_loss, chain())
    with jax.set_mesh(distributed.data_mesh(devices)):
        for i in range(first, first + count):
            batch = distributed.shard_batch(testing.mlp_batch(i))
            state, _ = step(state, batch, jax.random.key(0), learning_rate=1e-2)
    return state


def new_state(devices, params=None):
    with jax.set_mesh(distributed.data_mesh(devices)):
        return training.TrainState.create(params or testing.mlp_params(), chain())


def assert_same_bits(one, two):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("devices", [1, 8])
def test_a_resumed_run_equals_the_unbroken_one_bit_for_bit(tmp_path, devices):
    state = run(new_state(devices), 0, 5, devices=devices)
    with training.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, state, {"next_sample": 80})
        unbroken = run(state, 5, 2, devices=devices)  # donates what is being written
    with training.Checkpoints(tmp_path) as checkpoints:
        like = new_state(devices)
        restored, loop = checkpoints.restore_latest(like)
    assert loop == {"step": 5, "next_sample": 80}
    assert jax.tree.map(jax.typeof, restored) == jax.tree.map(jax.typeof, like)
    assert_same_bits(run(restored, 5, 2, devices=devices), unbroken)


def test_low_precision_moments_keep_their_bits(tmp_path):
    state = run(new_state(2), 0, 5, devices=2)
    mu = optax.tree.get(state.opt_state, "mu")
    assert {x.dtype for x in jax.tree.leaves(mu)} == {jnp.bfloat16.dtype}
    with training.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, state, {})
        checkpoints.wait()
        assert_same_bits(checkpoints.restore_latest(new_state(2))[0], state)


@pytest.mark.parametrize(("saved", "restored"), [(1, 8), (8, 1), (2, 8), (8, 2)])
def test_a_checkpoint_of_some_devices_restores_on_others(tmp_path, saved, restored):
    state = run(new_state(saved), 0, 2, devices=saved)
    with training.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state, {})
        got, _ = checkpoints.restore_latest(new_state(restored))
        assert_same_bits(got, state)
        assert {len(x.sharding.device_set) for x in jax.tree.leaves(got)} == {restored}
        run(got, 2, 1, devices=restored)


def test_only_the_newest_are_kept_and_a_stored_step_is_not_written_twice(tmp_path):
    state = new_state(1)
    with training.Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.restore_latest(state) is None
        assert [checkpoints.save(s, state, {}) for s in (1, 2, 7)] == [True] * 3
        assert not checkpoints.save(7, state, {})
        assert checkpoints.steps() == [2, 7]


def test_integers_of_any_size_come_back_exact(tmp_path):
    loop = {
        "ledger": training.Ledger(flops=2**70).to_json(),
        "config": {"a": [1, None]},
    }
    with training.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, new_state(1), loop)
        assert checkpoints.loop() == {"step": 3, **loop}


def test_a_state_of_another_dtype_or_shape_is_refused(tmp_path):
    with training.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, new_state(1), {})
        other = testing.mlp_params(dtype=jnp.bfloat16)
        with pytest.raises(ValueError, match=r"kernel: stored float32.*bfloat16"):
            checkpoints.restore_latest(new_state(1, other))
        other = testing.mlp_params()
        other["hidden"]["bias"] = np.zeros(9, np.float32)
        with pytest.raises(ValueError, match=r"hidden\.bias: stored float32\[8\]"):
            checkpoints.restore_latest(new_state(1, other))


def test_missing_leaves_are_named_with_those_present(tmp_path):
    with training.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, new_state(1), {})
        other = testing.mlp_params() | {"extra": np.zeros(2, np.float32)}
        with pytest.raises(ValueError) as info:
            checkpoints.restore_latest(new_state(1, other))
    assert "missing ['extra']" in str(info.value)
    assert "'hidden.kernel'" in str(info.value)


def test_a_step_that_is_not_stored_is_told_with_those_that_are(tmp_path):
    state = new_state(1)
    with training.Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match="no checkpoint in"):
            checkpoints.restore(state)
        checkpoints.save(4, state, {})
        with pytest.raises(ValueError, match=r"step 3 in .* \[4\]"):
            checkpoints.restore(state, step=3)


def _cut_in_half(folder):
    for file in (p for p in folder.rglob("*") if p.is_file()):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("item", ["params", "optimizer", "loop"])
@pytest.mark.parametrize("damage", [shutil.rmtree, _cut_in_half])
def test_a_damaged_checkpoint_is_named(tmp_path, item, damage):
    with training.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, new_state(1), {})
    damage(tmp_path / "1" / item)
    with (
        training.Checkpoints(tmp_path) as checkpoints,
        pytest.raises(ValueError, match=r"the checkpoint .*/1 (is damaged|has no)"),
    ):
        checkpoints.restore_latest(new_state(1))


def test_keep_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="keep=0"):
        training.Checkpoints(tmp_path, keep=0)


# A process that saves steps 20 and 30, and is killed in the second save.
_SAVING = textwrap.dedent(
    """
    import sys, jax, optax, jax.numpy as jnp
    from dataeff_jax import training
    state = training.TrainState.create({"w": jnp.arange(2**22.0)}, optax.adam(1e-3))
    with training.Checkpoints(sys.argv[1]) as checkpoints:
        checkpoints.save(20, state, {"next_sample": 20})
        checkpoints.wait()
        for _ in range(int(sys.argv[2])):
            print("saving", flush=True)
            checkpoints.save(30, state, {"next_sample": 30})
        sys.stdin.read()
    """
)


@pytest.mark.parametrize("moment", ["first file", "later"])
def test_a_checkpoint_cut_off_by_sigkill_is_told_and_written_anew(
    tmp_path, moment, caplog
):
    process = subprocess.Popen(
        [sys.executable, "-c", _SAVING, str(tmp_path), "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=pathlib.Path(__file__).parents[2],
    )
    with process:
        process.stdout.readline()
        while not list(tmp_path.glob("30.*")) and not (tmp_path / "30").exists():
            assert process.poll() is None
            time.sleep(0.0005)
        if moment == "later":
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    cut_off = not (tmp_path / "30").exists()
    like = training.TrainState.create({"w": jnp.zeros(2**22)}, optax.adam(1e-3))
    with caplog.at_level(logging.WARNING, "dataeff_jax"):
        checkpoints = training.Checkpoints(tmp_path)
    with checkpoints:
        state, loop = checkpoints.restore_latest(like)
        np.testing.assert_array_equal(state.params["w"], np.arange(2**22))
        if cut_off:
            assert loop == {"step": 20, "next_sample": 20}
            assert "checkpoint of step 30 is incomplete" in caplog.text
            assert checkpoints.save(30, state, {"next_sample": 30})
        assert checkpoints.steps() == [20, 30]
        assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["20", "30"]


def test_a_reader_leaves_unfinished_checkpoints_alone(tmp_path, caplog):
    with training.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, new_state(1), {})
    unfinished = tmp_path / "2.orbax-checkpoint-tmp-0"
    unfinished.mkdir()
    with training.Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.steps() == [1]
    assert unfinished.exists()
    assert not [r for r in caplog.records if r.name.startswith("dataeff_jax")]


class Perceptron(nnx.Module):
    """Stands in for a model of the library."""

    def __init__(self, width, *, rngs):
        self.blocks = nnx.List([nnx.Linear(4, width, rngs=rngs)])
        self.output = nnx.Linear(width, 3, rngs=rngs)

    def __call__(self, x):
        return self.output(jnp.tanh(self.blocks[0](x)))


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """A work directory with the checkpoint of a small model."""
    monkeypatch.setattr(models, "Perceptron", Perceptron, raising=False)
    params = nnx.state(Perceptron(8, rngs=nnx.Rngs(1)), nnx.Param)
    with jax.set_mesh(distributed.data_mesh(8)):
        state = training.TrainState.create(params, optax.sgd(0.1))
        with training.Checkpoints(tmp_path / "checkpoints") as checkpoints:
            checkpoints.save(3, state, {})
    write_model(tmp_path, "Perceptron", width=8)
    return tmp_path


def write_model(workdir, name, **kwargs):
    config = {"model": {"name": name, "kwargs": kwargs}}
    (workdir / "config.json").write_text(json.dumps(config))


def test_restore_gives_the_trained_model(workdir):
    x = jnp.ones((2, 4))
    want = Perceptron(8, rngs=nnx.Rngs(1))(x)
    np.testing.assert_array_equal(training.restore(workdir)(x), want)
    np.testing.assert_array_equal(training.restore(workdir, step=3)(x), want)


def test_names_do_not_depend_on_how_parameters_are_held(tmp_path, workdir):
    model = Perceptron(8, rngs=nnx.Rngs(2))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    with training.Checkpoints(workdir / "checkpoints", read_only=True) as checkpoints:
        checkpoints.restore_params(jax.tree.map(jnp.asarray, params))


def test_a_model_of_other_shapes_is_refused(workdir):
    write_model(workdir, "Perceptron", width=9)
    with pytest.raises(ValueError, match=r"output\.kernel: stored float32\[8, 3\]"):
        training.restore(workdir)


def test_a_model_that_does_not_exist_is_named(workdir):
    write_model(workdir, "Perceptrom")
    with pytest.raises(ValueError, match=r"no model 'Perceptrom'.*Perceptron"):
        training.restore(workdir)


def test_a_config_without_a_model_names_the_keys_present(workdir):
    (workdir / "config.json").write_text('{"seed": 0, "modell": {}}')
    with pytest.raises(ValueError, match=r"'model'.*\['modell', 'seed'\]"):
        training.restore(workdir)


def test_a_work_directory_without_anything_is_an_error(tmp_path, workdir):
    with pytest.raises(ValueError, match=r"no config\.json"):
        training.restore(tmp_path / "nowhere")
    (tmp_path / "new").mkdir()
    write_model(tmp_path / "new", "Perceptron", width=8)
    with pytest.raises(ValueError, match="no checkpoint in"):
        training.restore(tmp_path / "new")
