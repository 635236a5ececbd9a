"""The search for the longest stable ramp: few trials, kept, and told in words."""

import json
import math
import pathlib

import pytest

from dataeff_jax import training
from experiments import command_line, ramp_search, ramps, sweep, train_lm, tune

CACHE = str(pathlib.Path(__file__).resolve().parents[2] / ".cache" / "data")
CONFIG = "configs/gpt_curriculum.py:tiny"


def verdict(stable=True, starts_well=True):
    return ramp_search.Verdict(1.0 if stable else 2.0, 1.0, 1.0, stable, starts_well)


@pytest.mark.parametrize("threshold", range(33))
def test_six_trials_find_the_longest_stable_of_32_ramps(threshold):
    totals, asked, told = list(range(10, 330, 10)), [], []

    def attempt(total, start):
        asked.append(total)
        return verdict(stable=total <= 10 * threshold)

    found = ramp_search.search(
        totals, [None], attempt, trials=6, after=lambda verdict, left: told.append(left)
    )
    assert found.total == (10 * threshold or None)
    assert found.unstable == (None if threshold == 32 else 10 * threshold + 10)
    assert found.untried == 0
    assert len(set(asked)) == len(asked) == len(told) <= 6
    # What is said to be left is an upper bound, and in the end exact.
    assert all(left >= len(asked) - n for n, left in enumerate(told, start=1))
    assert told[-1] == 0


def test_a_search_without_enough_trials_says_what_it_left_out():
    def attempt(total, start):
        return verdict(stable=total <= 70)

    found = ramp_search.search(range(1, 101), [None], attempt, trials=4)
    assert found == ramp_search.Found(63, None, 76, 12)


def test_the_smallest_value_rises_until_the_start_is_calm():
    asked = []

    def attempt(total, start):
        asked.append((total, start))
        return verdict(stable=start >= 24, starts_well=start >= 24)

    found = ramp_search.search([4, 8, 12], [8, 16, 24], attempt, trials=6)
    assert found == ramp_search.Found(12, 24, None, 0)
    assert asked == [(4, 8), (4, 16), (4, 24), (8, 24), (12, 24)]


def test_a_start_that_never_gets_calm_ends_the_search():
    def attempt(total, start):
        return verdict(stable=False, starts_well=False)

    found = ramp_search.search([4, 8], [8, 16], attempt, trials=6)
    assert found == ramp_search.Found(None, 16, 4, 0)
    found = ramp_search.search([4, 8], [8, 16, 24], attempt, trials=1)
    assert found == ramp_search.Found(None, 8, 4, 0)


def result(*losses, diverged="", steps=30, **labels):
    curve = [[10 * place, 0, 0, loss] for place, loss in enumerate(losses)]
    labels = {"total": 4, "minimum": 8, "start": 10, **labels}
    common = dict(diverged=diverged, steps=steps, wall_seconds=60.0)
    return {**labels, **common, "max_loss_ratio": 1.1, "validation_curve": curve}


def test_the_fluctuation_is_a_perplexity_over_the_smallest_before():
    losses = [math.log(p) for p in (100, 50, 20, 30)]
    found = ramp_search.judge(result(*losses), 1.3)
    assert found.fluctuation == pytest.approx(1.5, rel=1e-12)
    assert found.at_start == 1.0  # of the first 10 steps
    assert (found.is_stable, found.starts_well) == (False, True)
    assert ramp_search.judge(result(*losses), 1.6).is_stable


@pytest.mark.parametrize(("steps", "starts_well"), [(5, False), (25, True)])
def test_a_trial_that_diverges_is_unstable(steps, starts_well):
    found = ramp_search.judge(result(3.0, diverged="at 5", steps=steps), 1.3)
    assert (found.is_stable, found.starts_well) == (False, starts_well)
    assert ramp_search.judge(result(3.0, math.nan), 1.3).fluctuation == math.inf


def tuning(directory, config=CONFIG, **kwargs):
    lines = []
    kwargs = {"overrides": {}, "tell": lines.append, **kwargs}
    found = tune.Tuning(
        config,
        ramp=ramps.RAMPS["curriculum"],
        name="curriculum",
        directory=directory,
        **kwargs,
    )
    return found, lines


def fake(threshold, made):
    """Trials whose perplexity doubles where the ramp is longer than a threshold."""

    def make(run):
        labels = dict(run.labels)
        made.append(labels["total"])
        last = 3.0 if labels["total"] <= threshold else 3.0 + math.log(2)
        found = result(4.0, 3.5, 3.0, last, steps=run.max_steps, **labels)
        return {**found, "command": run.told}

    return make


def test_a_stopped_search_goes_on_with_the_trials_that_are_there(tmp_path):
    made = []

    def stops(run):
        if len(made) == 2:
            raise KeyboardInterrupt
        return fake(11, made)(run)

    first, _ = tuning(tmp_path, make=stops)
    with pytest.raises(KeyboardInterrupt):
        tune.report(first, None, None, 6)
    assert len(made) == 2
    second, lines = tuning(tmp_path, make=fake(11, made))
    text = tune.report(second, None, None, 6)
    assert len(set(made)) == len(made) == len(second.found)
    assert len(lines) == 1 + len(made)
    assert "trial 1: 4 steps from 8, 20 steps: stable (1.000); 3 more" in lines[1]
    assert "about 3.0 min" in lines[1]
    assert "unstable (2.000); 1 more at most, about 1.0 min" in lines[2]
    assert "A ramp of 8 steps is stable; one of 12 is not:" in text
    assert text.count("--config.curriculum.length.kwargs.total=") == 1
    assert (tmp_path / "plot.png").read_bytes()[1:4] == b"PNG"


def test_trials_of_other_settings_are_not_mixed(tmp_path):
    first, _ = tuning(tmp_path, make=fake(10**9, []))
    tune.report(first, None, None, 1)
    other, _ = tuning(tmp_path, make=fake(10**9, []), overrides={"seed": "1"})
    with pytest.raises(ValueError, match=r"of other settings.*choose another --output"):
        tune.report(other, None, None, 1)


def test_a_trial_that_a_signal_stopped_is_not_kept(tmp_path):
    def make(run):
        return {**fake(10**9, [])(run), "steps": 1}

    stopped, _ = tuning(tmp_path, make=make)
    with pytest.raises(InterruptedError, match="stopped after 1"):
        tune.report(stopped, None, None, 1)
    assert not list(tmp_path.glob("*.json"))


def test_length_and_difficulties_share_the_ramp_and_pasted_text_gives_it(tmp_path):
    found, _ = tuning(tmp_path)
    assert found.clock == "steps"
    totals = found.totals()
    assert totals == [4, 8, 12, 16, 20]  # warm-ups, and the run
    assert found.changes(12, 16) == {
        "curriculum.length.kwargs.total": "0.6",
        "curriculum.metrics.vocabulary_rarity.kwargs.total": "0.6",
        "curriculum.length.kwargs.min_difficulty": "16",
    }
    assert found.start.values == (8, 16, 24)
    run = found.trial(20, 8)
    assert "curriculum.length.kwargs.total=1.0" in run.overrides


def test_a_ramp_given_as_a_count_stays_one(tmp_path):
    kwargs = "{'min_difficulty': 8, 'max_difficulty': 32, 'total': 5}"
    overrides = {"curriculum.length.kwargs": kwargs}
    config = CONFIG + ",method=seqtru"
    found, _ = tuning(tmp_path, config, overrides=overrides)
    assert found.changes(20, 8) == {"curriculum.length.kwargs.total": "20"}
    assert found.trial(20, 8).overrides[:2] == (
        f"curriculum.length.kwargs={kwargs}",
        "curriculum.length.kwargs.total=20",
    )


def test_a_trial_is_a_few_warm_ups_of_the_whole_run(tmp_path):
    found, _ = tuning(tmp_path, warmups=3, evaluations=5)
    run = found.trial(8, 8)
    assert run.max_steps == 12
    assert dict(run.labels) == {"total": 8, "minimum": 8, "start": 4}
    assert "eval.every_steps=2" in run.overrides
    assert "--max_steps=12" in run.command()
    assert not any("num_steps" in text for text in run.overrides)


def test_the_report_says_what_was_not_found(tmp_path):
    found, _ = tuning(tmp_path, make=fake(0, []))
    text = tune.report(found, None, None, 6)
    assert "No ramp is stable: the shortest one, 4 steps" in text
    assert "| 4 | 0.200 | 8 | 2.000 | 1.000 | 1.100 | unstable |" in text


def message(capsys, *flags, config=CONFIG):
    with pytest.raises(SystemExit) as stop:
        tune.main([f"--config={config}", "--output=unused", *flags])
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--config.curriculum=None"], "no curriculum, so there is no ramp"),
        (["--trials=0"], "--trials=0 must be at least 1"),
        (["--warmups=0.5"], "--warmups=0.5 must be at least 1"),
        (["--max_fluctuation=1"], "must be above 1"),
        (["--lower=30"], "from 30 to 20 steps do not lie between 1 and the run's 20"),
        (["--config.schedule.kwargs.warmup=0"], "--warmup=N"),
        (["--config.sede=1"], "sede"),
    ],
)
def test_what_is_wrong_is_said_before_any_trial(capsys, flags, text):
    assert text in message(capsys, *flags)


def test_a_schedule_without_a_total_has_no_ramp(capsys):
    kwargs = "{'difficulties': [8, 32], 'boundaries': [5]}"
    flags = [
        "--config.curriculum.length.schedule=fixed_discrete_schedule",
        f"--config.curriculum.length.kwargs={kwargs}",
    ]
    config = CONFIG + ",method=seqtru"
    assert "has fixed_discrete_schedule" in message(capsys, *flags, config=config)


def test_a_real_trial_is_made_kept_and_reported(tmp_path, capsys):
    flags = [
        f"--config={CONFIG},method=seqtru",
        f"--config.data.cache_dir={CACHE}",
        "--config.mesh.axes.data=1",
        f"--output={tmp_path}",
        "--warmup=2",
        "--warmups=1",
        "--trials=1",
        "--evaluations=2",
    ]
    tune.main(flags)
    (kept,) = tmp_path.glob("*.json")
    found = json.loads(kept.read_text())
    assert [point[0] for point in found["validation_curve"]] == [0, 1, 2]
    assert found["steps"] == 2
    assert found["total"] == 2
    first = capsys.readouterr().out
    assert "--config.curriculum.length.kwargs.total=0.1\n" in first
    before = kept.stat().st_mtime_ns
    tune.main(flags)
    assert capsys.readouterr().out == first
    assert kept.stat().st_mtime_ns == before


def test_a_run_stopped_after_some_steps_is_the_beginning_of_the_whole(tmp_path):
    flags = [
        f"--config={CONFIG},method=seqtru",
        f"--config.data.cache_dir={CACHE}",
        "--config.mesh.axes.data=1",
    ]
    config = command_line.parse(command_line.parser("test"), flags).config
    for steps in (2, 3):  # goes on after the first
        last = train_lm.train_and_evaluate(config, tmp_path, max_steps=steps)
        assert last["step"] == steps
    records = training.read_log(tmp_path)
    assert [r["step"] for r in records] == [0, 1, 2, 3]
    # The schedule is that of the whole run: warm-up is not over.
    assert [r["learning_rate"] for r in records[1:]] == [0.0, 1e-3, 2e-3]


def test_a_run_that_is_limited_says_so_in_its_command(capsys):
    assert "--max_steps=3" in sweep.Run("any", CONFIG, max_steps=3).told
    assert "--max_steps" not in sweep.Run("any", CONFIG).told
    with pytest.raises(SystemExit):
        train_lm.main([f"--config={CONFIG}", "--workdir=unused", "--max_steps=0"])
    assert "--max_steps" in capsys.readouterr().err
