"""The preview tells what the run then does."""

import pathlib

import numpy as np
import pytest

from experiments import command_line, preview

CACHE = str(pathlib.Path(__file__).resolve().parents[2] / ".cache" / "data")
CONFIG = "configs/gpt_curriculum.py:tiny"


def found_for(*overrides, config=CONFIG):
    argv = [f"--config={config}", f"--config.data.cache_dir={CACHE}", *overrides]
    return preview.preview(command_line.parse(command_line.parser("test"), argv).config)


@pytest.fixture(scope="module")
def found():
    return found_for()


def test_curves_hold_what_the_steps_have(found):
    timeline, curves = found["timeline"], found["curves"]
    assert found["steps"].tolist() == list(range(timeline.num_steps))
    for step, length, tokens in zip(
        found["steps"], curves["length"], curves["tokens"], strict=True
    ):
        assert length == timeline[step].length
        assert tokens == timeline.tokens(step)
    assert curves["learning rate"].max() == pytest.approx(4e-3, rel=0.1)


def test_the_pool_grows_with_the_difficulty_to_all_samples(found):
    pool = found["curves"]["eligible, %"]
    np.testing.assert_allclose(pool, found["curves"]["vocabulary rarity"], atol=0.01)
    assert (np.diff(pool) >= 0).all()
    assert pool[-1] == 100


def test_the_table_has_the_first_and_the_last_step(found):
    lines = preview.table(found, rows=5).splitlines()
    assert len(lines) == 6
    assert lines[1].split()[:2] == ["0", "0"]
    assert lines[-1].split()[0] == str(found["timeline"].num_steps - 1)


def test_shapes_are_told_with_their_steps(found):
    text = preview.shapes_table(found["timeline"])
    assert text.startswith("4 shapes")
    steps = [int(line.split(": ")[1].split()[0]) for line in text.splitlines()[1:]]
    assert sum(steps) == found["timeline"].num_steps


def test_a_config_without_metrics_reads_no_data(tmp_path):
    found = found_for(
        "--config.data.name=text",
        f"--config.data.path={tmp_path}/missing",
        config="configs/gpt_seqlen_warmup.py:tiny",
    )
    assert "length" in found["curves"]


def test_a_long_run_is_thinned_out():
    found = found_for(
        "--config.train.num_steps=5000",
        "--config.train.num_tokens=0",
        config="configs/gpt_seqlen_warmup.py:tiny",
    )
    assert len(found["steps"]) == preview.MAX_POINTS
    assert found["steps"][-1] == 4999


def test_the_command_prints_and_draws(tmp_path, capsys):
    picture = tmp_path / "some dir" / "preview.png"
    preview.main(
        [
            f"--config={CONFIG}",
            f"--config.data.cache_dir={CACHE}",
            f"--output={picture}",
            "--rows=3",
        ]
    )
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert "shapes, each compiled once" in capsys.readouterr().out


def test_too_few_rows_are_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        preview.main([f"--config={CONFIG}", "--rows=1"])
    assert stop.value.code == 2
    assert "--rows=1 must be at least 2" in capsys.readouterr().err
