"""A list of runs: each result is kept as it ends, and made only once."""

import json
import pathlib

import pytest

from experiments import command_line, data_efficiency, stability, sweep

CACHE = str(pathlib.Path(__file__).resolve().parents[2] / ".cache" / "data")
TINY = (f"data.cache_dir={CACHE}", "mesh.axes.data=1", "train.num_steps=6")


def test_a_loss_ratio_is_a_loss_over_the_smallest_before():
    assert sweep.loss_ratios([4.0, 2.0, 3.0, 1.0, 2.0]) == [1, 0.5, 1.5, 0.5, 2]


def test_windows_weigh_losses_by_their_tokens(monkeypatch):
    monkeypatch.setattr(sweep, "WINDOW_TOKENS", 10)
    tokens = [4, 8, 16, 26, 30]
    assert sweep.windowed(tokens, [1.0, 2.0, 4.0, 7.0, 9.0]) == [
        (4 * 1 + 4 * 2 + 8 * 4) / 16,
        7.0,
    ]


def test_a_result_is_made_once_and_tells_how(tmp_path, monkeypatch):
    run = sweep.Run("a", "configs/gpt_baseline.py:tiny", TINY, (("method", "x"),))
    found = sweep.run_all([run], tmp_path)["a"]
    assert found["steps"] == 6
    assert found["tokens"] == 6 * 8 * 32
    assert found["diverged"] == ""
    assert found["method"] == "x"
    assert "--config.train.num_steps=6" in found["command"]
    assert found["validation_curve"][-1][3] == round(found["validation_loss"], 5)
    monkeypatch.setattr(sweep, "make", lambda run: pytest.fail("made again"))
    assert sweep.run_all([run], tmp_path) == {"a": found}


def test_a_run_that_diverges_is_a_result(tmp_path):
    overrides = (
        *TINY,
        "schedule.kwargs.peak_value=1e38",
        "schedule.kwargs.warmup=1",
        "optimizer.max_grad_norm=0.0",
    )
    run = sweep.Run("wild", "configs/gpt_baseline.py:tiny", overrides)
    found = sweep.run_all([run], tmp_path)["wild"]
    assert " at step " in found["diverged"]
    assert found["validation_loss"] is None
    json.loads((tmp_path / "wild.json").read_text(), parse_constant=pytest.fail)


def test_only_the_runs_of_a_pattern_are_made(tmp_path, monkeypatch):
    made = []
    result = {"diverged": "", "steps": 2, "validation_curve": [[2, 0, 0, 1.0]]}
    monkeypatch.setattr(sweep, "make", lambda run: made.append(run.name) or result)
    runs = [sweep.Run(name, "") for name in ("a-0", "a-1", "b-0")]
    assert list(sweep.run_all(runs, tmp_path, only="a-*")) == made == ["a-0", "a-1"]


def test_a_run_that_was_stopped_is_not_kept(tmp_path, monkeypatch):
    part = {"diverged": "", "steps": 7, "validation_curve": [[0, 0, 0, 5.0]]}
    monkeypatch.setattr(sweep, "make", lambda run: part)
    with pytest.raises(SystemExit, match="a was stopped"):
        sweep.run_all([sweep.Run("a", "")], tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("experiment", [stability, data_efficiency])
def test_the_runs_of_an_experiment_are_configs_that_can_run(experiment):
    runs = experiment.runs() + experiment.runs(quick=True)
    assert len({run.name for run in runs}) == len(runs)
    for run in runs[::5]:
        flags = [f for f in run.command() if not f.startswith("--workdir")]
        command_line.parse(command_line.parser("test"), flags)


@pytest.mark.parametrize("experiment", [stability, data_efficiency])
def test_table_and_plot_take_results_that_are_not_complete(experiment, tmp_path):
    results = {}
    for run in experiment.runs()[:3]:
        results[run.name] = {
            **dict(run.labels),
            "diverged": "",
            "validation_loss": 3.25,
            "max_loss_ratio": 1.5,
            "spikes": 1,
            "validation_curve": [[0, 0, 0, 5.0], [9, 90, 900, 3.25]],
            **dict.fromkeys(("steps", "samples", "tokens", "flops"), 9),
            "cpu_seconds": 2.0,
        }
    assert "3.25" in experiment.table(results)
    experiment.plot(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").exists()
