"""A config's curriculum: known before the run, counted exactly, resumed exactly."""

import pathlib

import jax
import numpy as np
import pytest

from dataeff_jax import training
from experiments import command_line, corpora, curricula, difficulties, train_lm

CACHE = str(pathlib.Path(__file__).resolve().parents[2] / ".cache" / "data")


def config_of(method="seqtru_voc", *overrides, devices=1):
    argv = [
        f"--config=configs/gpt_curriculum.py:tiny,method={method}",
        f"--config.data.cache_dir={CACHE}",
        f"--config.mesh.axes.data={devices}",
        *overrides,
    ]
    return command_line.parse(command_line.parser("test"), argv).config


def planned(config):
    corpus = corpora.corpus(config)
    metrics = config.curriculum.metrics
    index = difficulties.index(config, corpus) if metrics else None
    return corpus, curricula.build(config, corpus, index=index)


def lines(workdir):
    return [training.without_wall_clock(r) for r in training.read_log(workdir)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "curriculum"
    train_lm.train_and_evaluate(config_of(), workdir)
    return workdir


def test_the_ledger_is_that_of_the_timeline_and_of_the_batches(finished):
    config = config_of()
    corpus, plan = planned(config)
    batches = plan.batches(config, corpus)
    tokens = 0
    for record in lines(finished)[1:]:
        step = record["step"] - 1
        batch = batches[step]
        tokens += batch["tokens"].size
        assert batch["tokens"].shape == plan.timeline[step].shape[:2]
        assert record["tokens"] == tokens == plan.timeline.tokens(step + 1)
        assert record["samples"] == (step + 1) * config.data.batch_size
        assert record["length"] == batch["length"][0]
        difficulty = record["difficulty_vocabulary_rarity"]
        assert difficulty == batch["difficulty_vocabulary_rarity"][0]


def test_a_run_by_tokens_ends_when_they_are_fed(finished):
    config = config_of()
    last = lines(finished)[-1]
    assert last["tokens"] >= config.train.num_tokens
    assert last["tokens"] - config.train.num_tokens < 8 * 32
    assert last["step"] > config.train.num_steps


def test_the_rate_follows_the_tokens_after_a_warm_up_in_steps(finished):
    config = config_of()
    warmup, peak = 4, config.schedule.kwargs.peak_value
    rates = [record["learning_rate"] for record in lines(finished)[1:]]
    np.testing.assert_allclose(
        rates[: warmup + 1], peak * np.arange(warmup + 1) / warmup
    )
    before = [0, *(r["tokens"] for r in lines(finished)[1:])]
    start, total = before[warmup], config.train.num_tokens
    done = (np.array(before[warmup:-1]) - start) / (total - start)
    expected = peak * (0.1 + 0.9 * (1 + np.cos(np.pi * done)) / 2)
    np.testing.assert_allclose(rates[warmup:], expected, rtol=1e-12)


def test_a_run_goes_on_in_the_middle_of_a_change_on_other_devices(finished, tmp_path):
    class Stop(Exception):
        pass

    def stop_after(save, step):
        def saved(self):
            save(self)
            if self.step == step:
                raise Stop

        return saved

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_lm.Run, "_save", stop_after(train_lm.Run._save, 5))
        with pytest.raises(Stop):
            train_lm.train_and_evaluate(config_of(), tmp_path / "run")
    config = config_of(devices=8)
    train_lm.train_and_evaluate(config, tmp_path / "run")
    for ours, unbroken in zip(lines(tmp_path / "run"), lines(finished), strict=True):
        assert set(ours) == set(unbroken)
        for name, value in unbroken.items():
            # Sums over 8 devices are taken in another order: float32.
            np.testing.assert_allclose(ours[name], value, rtol=2e-5, err_msg=name)


def test_only_the_shapes_told_before_are_compiled(finished, tmp_path, monkeypatch):
    compiled = []
    lower = jax.stages.Lowered.compile

    def count(self, *args, **kwargs):
        compiled.append(self)
        return lower(self, *args, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", count)
    config = config_of("seqres")
    train_lm.train_and_evaluate(config, tmp_path)
    assert len(compiled) == len(curricula.timeline(config).shapes()) == 4


@pytest.mark.parametrize("method", ["seqtru", "seqres", "voc", "seqres_voc"])
def test_every_method_feeds_what_its_timeline_says(method):
    config = config_of(method)
    corpus, plan = planned(config)
    batches = plan.batches(config, corpus)
    for step in range(0, plan.timeline.num_steps, 3):
        assert batches[step]["tokens"].shape == plan.timeline[step].shape[:2]


def test_a_clock_of_tokens_gives_the_schedules_the_tokens_fed():
    config = config_of("seqtru_voc", "--config.curriculum.clock=tokens")
    _, plan = planned(config)
    total = round(0.4 * config.train.num_tokens)
    for step in range(plan.timeline.num_steps):
        done = min(plan.timeline.tokens(step) / total, 1)
        ideal = 8 + (32 - 8) * done
        assert plan.timeline[step].length == int(ideal) // 8 * 8
        percentile = plan.order.difficulties(step)["vocabulary_rarity"]
        assert percentile == int(5 + (100 - 5) * done**0.5)


def test_the_mask_can_split_rows_in_one_shape():
    config = config_of("seqres", "--config.curriculum.length.mode=segment")
    corpus, plan = planned(config)
    assert len(plan.timeline.shapes()) == 1
    batches = plan.batches(config, corpus)
    fields = {frozenset(batches[step]) for step in (0, plan.timeline.num_steps - 1)}
    assert len(fields) == 1
    assert batches[0]["segment_ids"].max() >= 4


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["curriculum.clock=hours"], "must be 'steps' or 'tokens'"),
        (["curriculum.draw=random"], "must be 'stratified' or"),
        (["curriculum.length.mode=cut"], "curriculum.length.mode='cut'"),
        (["curriculum.length.mode=trim"], "data.packed=False"),
        (["curriculum.length.schedule=linear"], "curriculum.length.schedule='linear'"),
        (["curriculum.length.kwargs.min=3"], "curriculum.length.kwargs.min does not"),
        (["curriculum.length.kwargs.max_difficulty=99"], "exceeds data.seq_len=32"),
        (["curriculum.length.kwargs.total=2.5"], "length.kwargs.total: a duration"),
        (
            ["curriculum.length.buckets.multiple=1", "train.max_shapes=3"],
            "more than train.max_shapes=3",
        ),
        (["curriculum.metrics={'rarity': {}}"], "'vocabulary_rarity'"),
        (["curriculum.metrics={}", "curriculum.length=None"], "neither metrics nor"),
        (["curriculum={'metrics': {}}"], "'curriculum.length' is missing"),
        (["curriculum=7"], "expected a dict or None"),
        (["train.num_tokens=-1"], "train.num_tokens=-1"),
        (["schedule.warmup_clock=days"], "schedule.warmup_clock='days'"),
    ],
)
def test_what_is_wrong_is_said_before_any_work(overrides, says, capsys):
    overrides = [f"--config.{override}" for override in overrides]
    with pytest.raises(SystemExit) as stop:
        config_of("seqtru_voc", *overrides)
    assert stop.value.code == 2
    assert says in capsys.readouterr().err


def test_an_index_of_other_data_is_refused(tmp_path):
    config = config_of("voc")
    corpus = corpora.corpus(config)
    other = config_of("voc", "--config.data.seq_len=16")
    made = difficulties.index(other, corpora.corpus(other))
    with config.unlocked():
        config.curriculum.index = str(made.directory)
    with pytest.raises(ValueError, match="made from other data"):
        difficulties.index(config, corpus)
