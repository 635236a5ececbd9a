"""The whole run: it learns, resumes exactly, stops at nonsense, and says why."""

import gc
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx

from benchmarks import interruptions
from dataeff_jax import distributed, training
from experiments import command_line, compare, generate, train_lm

CONFIG = "--config=configs/gpt_baseline.py:tiny"
CACHE = str(pathlib.Path(__file__).resolve().parents[2] / ".cache" / "data")


def config_of(*overrides: str):
    parser = command_line.parser("test")
    overrides = (f"--config.data.cache_dir={CACHE}", *overrides)
    return command_line.parse(parser, [CONFIG, *overrides]).config


def train(workdir, *overrides: str, devices: int = 1, **kwargs):
    config = config_of(f"--config.mesh.axes.data={devices}", *overrides)
    return train_lm.train_and_evaluate(config, workdir, **kwargs)


def lines(workdir):
    return [training.without_wall_clock(r) for r in training.read_log(workdir)]


def refusal(capsys, workdir, *overrides: str) -> str:
    """What the command says when it ends with status 2 before the first step."""
    overrides = (f"--config.data.cache_dir={CACHE}", *overrides)
    if not any("mesh" in text for text in overrides):
        overrides = (*overrides, "--config.mesh.axes.data=1")
    with pytest.raises(SystemExit) as stop:
        train_lm.main([CONFIG, f"--workdir={workdir}", *overrides])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return message


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A work directory of 20 steps on one device; copy it before changing it."""
    workdir = tmp_path_factory.mktemp("my runs") / "run 1"
    train(workdir)
    return workdir


def test_the_loss_starts_near_the_uniform_one_and_falls(finished):
    records = training.read_log(finished)
    assert records[0]["validation_loss"] == pytest.approx(np.log(512), abs=0.1)
    assert records[-1]["validation_loss"] < records[0]["validation_loss"] - 0.2


def test_a_line_holds_the_ledger_and_every_step_is_there(finished):
    records = training.read_log(finished)
    assert [r["step"] for r in records] == list(range(21))
    for record in records:
        step = record["step"]
        assert record["samples"] == step * 8
        assert record["tokens"] == step * 8 * 32
        assert record["layer_tokens"] == step * 8 * 32 * 2
    # F = 24 s h^2 + 2 s^2 h in each of 2 layers, the head 2 s h V, three times.
    s, h, v = 32, 32, 512
    forward = 2 * (24 * s * h * h + 2 * s * s * h) + 2 * s * h * v
    assert records[-1]["flops"] == 20 * 8 * 3 * forward


def test_the_rate_of_a_line_is_that_of_the_steps_since_the_last_one(finished):
    records = training.read_log(finished)
    for before, line in itertools.pairwise(records):
        seconds = line["seconds"] - before["seconds"]
        # The differences of logged sums lose digits: seconds are far below 1e3.
        assert line["steps_per_second"] * seconds == pytest.approx(1, rel=1e-6)
        assert line["tokens_per_second"] == line["steps_per_second"] * 8 * 32


def test_a_run_holds_its_parameters_once(tmp_path):
    def tables():
        gc.collect()
        return sum(x.shape == (512, 32) for x in jax.live_arrays())

    before, config = tables(), config_of("--config.mesh.axes.data=1")
    with jax.set_mesh(distributed.data_mesh(1)):
        run = train_lm.set_up(config, tmp_path)
        with run.checkpoints:
            # The embedding, and Adam's two means of its gradients.
            assert tables() - before == 3


def test_no_step_draws_from_a_key_of_the_initial_parameters(tmp_path):
    config = config_of("--config.mesh.axes.data=1")
    with jax.set_mesh(distributed.data_mesh(1)):
        run = train_lm.set_up(config, tmp_path)
        run.checkpoints.close()
        steps = [jax.random.fold_in(run.key, step) for step in range(8)]
    rngs = nnx.Rngs(config.seed)
    initial = [rngs.params() for _ in range(8)]
    keys = {tuple(jax.random.key_data(key).tolist()) for key in steps + initial}
    assert len(keys) == 16


def test_the_work_directory_tells_how_it_was_made(finished):
    config = json.loads((finished / "config.json").read_text())
    assert config["model"]["kwargs"]["vocab_size"] == 512
    assert json.loads((finished / "versions.json").read_text())["jax"]
    assert (finished / "loss.png").stat().st_size > 10_000
    assert "Kneser-Ney" in (finished / "summary.txt").read_text()
    assert list((finished / "tensorboard").iterdir())


def test_a_start_killed_while_it_writes_its_config_can_be_repeated(
    finished, tmp_path, monkeypatch
):
    workdir = shutil.copytree(finished, tmp_path / "copy")

    def write_half(path, text):
        with path.open("w") as file:
            file.write(text[: len(text) // 2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "write_text", write_half)
        with pytest.raises(KeyboardInterrupt):
            train(workdir)
    train(workdir)
    assert lines(workdir) == lines(finished)


def test_a_finished_run_started_again_changes_nothing(finished, tmp_path):
    workdir = shutil.copytree(finished, tmp_path / "copy")
    train(workdir)
    assert lines(workdir) == lines(finished)


def test_logging_more_rarely_changes_no_step(finished, tmp_path):
    train(
        tmp_path,
        "--config.train.log_every_steps=5",
        "--config.checkpoint.every_steps=7",
    )
    assert lines(tmp_path) == [r for r in lines(finished) if r["step"] % 5 == 0]


def test_a_run_stopped_by_a_signal_goes_on_exactly(finished, tmp_path, monkeypatch):
    asked = iter(range(1000))
    with monkeypatch.context() as patch:
        patch.setattr(distributed.Watch, "stop_requested", lambda *_: next(asked) == 13)
        train(tmp_path)
    assert training.read_log(tmp_path)[-1]["step"] == 13
    train(tmp_path)
    assert lines(tmp_path) == lines(finished)


@pytest.mark.slow
def test_runs_killed_at_any_moment_equal_the_unbroken_one():
    record = interruptions.run(2)
    assert record["equal"] == record["kills"] == 2
    assert all(case["was_running"] for case in record["cases"])


@pytest.mark.parametrize("devices", [2, 8])
def test_the_number_of_devices_does_not_matter(finished, tmp_path, devices):
    train(tmp_path, devices=devices)
    for ours, one in zip(lines(tmp_path), lines(finished), strict=True):
        for name in ("loss", "validation_loss"):
            if name in one:
                # Float32 sums in another order, over 20 steps.
                assert ours[name] == pytest.approx(one[name], abs=1e-5)


@pytest.mark.parametrize("devices", [1, 8])
def test_a_checkpoint_of_one_number_of_devices_restores_on_another(
    finished, tmp_path, devices
):
    source = finished
    if devices == 8:  # made on 8, goes on with 1
        source = tmp_path / "on 8"
        train(source, "--config.train.num_steps=10", devices=8)
    workdir = shutil.copytree(source, tmp_path / "goes on")
    train(
        workdir,
        "--config.train.num_steps=22",
        devices=9 - devices,
        accept_config_changes=True,
    )
    assert training.read_log(workdir)[-1]["step"] == 22


def test_accumulation_gives_the_same_losses(finished, tmp_path):
    train(tmp_path, "--config.optimizer.accumulation_steps=4")
    ours = [r["loss"] for r in lines(tmp_path)[1:]]
    np.testing.assert_allclose(ours, [r["loss"] for r in lines(finished)[1:]], 1e-5)


def test_a_finished_run_whose_log_was_removed_starts_and_ends(finished, tmp_path):
    workdir = shutil.copytree(finished, tmp_path / "copy")
    (workdir / "metrics.jsonl").unlink()
    assert train(workdir) == {}


@pytest.mark.parametrize("file", ["config.json", "metrics.jsonl"])
def test_a_damaged_work_directory_stops_before_the_first_step(
    finished, tmp_path, file, capsys
):
    workdir = shutil.copytree(finished, tmp_path / "copy")
    (workdir / file).write_text("{\n")
    assert file in refusal(capsys, workdir)


def test_another_config_is_refused_by_name(finished, tmp_path):
    workdir = shutil.copytree(finished, tmp_path / "copy")
    with pytest.raises(ValueError, match=r"train\.num_steps: 20 -> 40"):
        train(workdir, "--config.train.num_steps=40")
    assert lines(workdir) == lines(finished)


def test_another_config_than_the_checkpoint_has_is_refused(finished, tmp_path):
    workdir = shutil.copytree(finished, tmp_path / "copy")
    (workdir / "config.json").unlink()
    with pytest.raises(ValueError, match=r"train\.num_steps: 20 -> 40"):
        train(workdir, "--config.train.num_steps=40")


def test_a_text_that_changed_since_the_run_began_is_refused(tmp_path):
    text = tmp_path / "text.jsonl"
    documents = [json.dumps({"text": f"{i} and {i + 1}. " * 40}) for i in range(200)]
    text.write_text("\n".join(documents))
    overrides = (
        "--config.data.name=jsonl",
        f"--config.data.path={text}",
        "--config.data.tokenizer.name=bytes",
        "--config.data.validation_fraction=0.2",
    )
    config = config_of("--config.mesh.axes.data=1", *overrides)
    with jax.set_mesh(distributed.data_mesh(1)):
        train_lm.set_up(config, tmp_path / "run").checkpoints.close()
        text.write_text("\n".join(documents[1:]))
        with pytest.raises(ValueError, match=r"data\.fingerprint: "):
            train_lm.set_up(config, tmp_path / "run")


@pytest.mark.slow
def test_the_command_goes_on_with_workers_and_blanks_in_all_paths(
    tmp_path, monkeypatch
):
    folder = tmp_path / "my data"
    folder.mkdir()
    records = [json.dumps({"text": f"document {i} of words"}) for i in range(99)]
    (folder / "corpus 1.jsonl").write_text("\n".join(records))
    overrides = (
        "--config.data.name=jsonl",
        f"--config.data.path={folder / 'corpus 1.jsonl'}",
        f"--config.data.cache_dir={tmp_path / 'my cache'}",
        "--config.data.tokenizer.name=bytes",
        "--config.data.validation_fraction=0.2",
        "--config.train.num_steps=6",
        "--config.eval.compare_with_ngrams=false",
        "--config.mesh.axes.data=1",
    )
    config = command_line.parse(command_line.parser("test"), [CONFIG, *overrides])
    train_lm.train_and_evaluate(config.config, tmp_path / "unbroken")
    workdir = tmp_path / "my runs" / "run 1"
    with monkeypatch.context() as patch:
        patch.setattr(distributed.Watch, "stop_requested", lambda _, step: step == 3)
        train_lm.train_and_evaluate(config.config, workdir)
    workers = "--config.data.num_workers=2"
    command = [sys.executable, "-m", "experiments.train_lm", CONFIG, *overrides]
    subprocess.run(
        [*command, workers, f"--workdir={workdir}"],
        cwd=pathlib.Path(__file__).resolve().parents[2],
        # The same devices as here: the sums of other ones differ in their last bits.
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "8"},
        check=True,
        timeout=200,
    )
    assert lines(workdir) == lines(tmp_path / "unbroken")


def test_another_batch_size_goes_on_at_the_right_sample(tmp_path):
    steady = "--config.schedule.name=warmup_constant_schedule"
    plain = "--config.schedule.kwargs={'peak_value': 1e-3, 'warmup': 4}"
    train(tmp_path, steady, plain, "--config.train.num_steps=10")
    train(
        tmp_path,
        steady,
        plain,
        "--config.train.num_steps=12",
        "--config.data.batch_size=16",
        accept_config_changes=True,
    )
    assert training.read_log(tmp_path)[-1]["samples"] == 10 * 8 + 2 * 16


def test_a_loss_that_is_not_finite_names_step_and_samples(tmp_path):
    with pytest.raises(FloatingPointError, match=r"at step \d+;.* samples are \["):
        train(
            tmp_path,
            "--config.schedule.kwargs.peak_value=1e38",
            "--config.schedule.kwargs.warmup=15",
            "--config.optimizer.max_grad_norm=0.0",
            "--config.checkpoint.every_steps=1",
            "--config.schedule.clock=tokens",
        )
    with training.Checkpoints(tmp_path / "checkpoints", read_only=True) as found:
        last = found.steps()
    for record in training.read_log(tmp_path):
        assert np.isfinite(record.get("loss", 0.0))
    if last:
        params = nnx.state(training.restore(tmp_path), nnx.Param)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))


def test_an_encoder_learns_masked_tokens_with_lamb(tmp_path):
    config = command_line.parse(
        command_line.parser("test"),
        [
            "--config=configs/bert_baseline.py:tiny",
            f"--config.data.cache_dir={CACHE}",
            "--config.mesh.axes.data=1",
        ],
    ).config
    train_lm.train_and_evaluate(config, tmp_path)
    losses = [r["validation_loss"] for r in lines(tmp_path) if "validation_loss" in r]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("last", [2, 1000], ids=["inside", "behind the end"])
def test_a_profile_of_chosen_steps_is_written(tmp_path, last):
    short = ("--config.train.num_steps=3", "--config.schedule.kwargs.warmup=1")
    train(tmp_path, *short, profile_steps=(1, last))
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


def test_a_run_resumed_behind_the_steps_to_profile_goes_on(finished, tmp_path):
    workdir = shutil.copytree(finished, tmp_path / "copy")
    more = "--config.train.num_steps=22"
    train(workdir, more, accept_config_changes=True, profile_steps=(1, 2))
    assert training.read_log(workdir)[-1]["step"] == 22
    assert not (workdir / "profile").exists()


@pytest.mark.parametrize("steps", [(0, 0), (1, 9)])
def test_a_trace_around_a_restart_or_past_the_end_is_written(tmp_path, steps):
    short = ("--config.train.num_steps=3", "--config.schedule.kwargs.warmup=1")
    train(tmp_path, *short, profile_steps=steps)
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    train(tmp_path, *short, profile_steps=steps)


def test_text_comes_out_and_the_same_seed_gives_the_same(finished, capsys):
    def text(*flags):
        generate.main([str(finished), "--num_tokens=8", "--prompt=I like", *flags])
        return capsys.readouterr().out

    first = text()
    assert first.startswith("I like")
    assert first == text()
    assert text("--temperature=0") == text("--temperature=0", "--seed=5")


def test_two_runs_are_compared_on_one_plot(finished, tmp_path, capsys):
    other = shutil.copytree(finished, tmp_path / "other")
    compare.main([str(finished), str(other), f"--output={tmp_path / 'both.png'}"])
    assert (tmp_path / "both.png").stat().st_size > 10_000
    table = capsys.readouterr().out
    assert "run 1" in table
    assert "other" in table


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["--config.data.name=jsonl", "--config.data.path=nowhere.jsonl"], "nowhere"),
        (["--config.data.name=chitchatt"], "chitchat"),
        (["--config.data.name=wiki"], "pip install"),
        (["--config.data.batch_size=12", "--config.mesh.axes.data=8"], "8 and 16"),
        (["--config.mesh.axes.data=99"], "99"),
    ],
)
def test_what_cannot_run_ends_with_status_2(tmp_path, capsys, overrides, says):
    with pytest.raises(SystemExit) as stop:
        train_lm.main([CONFIG, f"--workdir={tmp_path / 'run'}", *overrides])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert says in message
    assert "Traceback" not in message
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_work_directory_that_cannot_be_one_ends_with_status_2(tmp_path, capsys):
    file = tmp_path / "a file"
    file.write_text("")
    assert "a file" in refusal(capsys, file)
    assert "a file" in refusal(capsys, file / "run")
    cache_dir = f"--config.data.cache_dir={file}"
    with pytest.raises(SystemExit) as stop:
        train_lm.main([CONFIG, f"--workdir={tmp_path / 'run'}", cache_dir])
    assert stop.value.code == 2
    assert "a file" in capsys.readouterr().err


def test_a_second_run_in_the_same_work_directory_is_refused(tmp_path, capsys):
    with training.claim(tmp_path):
        assert "in use by another run (process" in refusal(capsys, tmp_path)


def test_an_empty_corpus_ends_with_status_2(tmp_path, capsys):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    with pytest.raises(SystemExit) as stop:
        train_lm.main(
            [
                CONFIG,
                f"--workdir={tmp_path / 'run'}",
                "--config.data.name=text",
                f"--config.data.path={empty}",
            ]
        )
    assert stop.value.code == 2
    assert "empty" in capsys.readouterr().err
