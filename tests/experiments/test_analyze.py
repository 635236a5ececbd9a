"""The commands about an index: they agree with each other, and say what is wrong."""

import io
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import analysis_interruptions
from dataeff_jax import curriculum, training
from experiments import analyze, command_line, corpora, inspect, train_lm, verify

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = "--config=configs/gpt_baseline.py:tiny"
BOTH = ("--metric=sequence_length", "--metric=vocabulary_rarity")


def data_flags(folder, path="my texts.jsonl"):
    return (
        CONFIG,
        "--config.data.name=jsonl",
        f"--config.data.path={folder / path}",
        f"--config.data.cache_dir={folder / 'the cache'}",
        "--config.data.tokenizer.name=bytes",
        "--config.data.validation_fraction=0.2",
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A corpus in a folder with a blank in its name."""
    result = tmp_path_factory.mktemp("a corpus") / "my data"
    result.mkdir()
    lines = [json.dumps({"text": f"{i} " + "ab" * (i % 40)}) for i in range(120)]
    (result / "my texts.jsonl").write_text("\n".join(lines))
    return result


@pytest.fixture(scope="module")
def index(folder):
    """The index of the rows by both metrics."""
    directory = folder / "run 1" / "index"
    analyze.main([*data_flags(folder), *BOTH, f"--output={directory}"])
    return directory


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def refusal(capsys, main, *argv) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(argv))
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_the_difficulties_are_those_of_numpy(folder, index):
    opened = curriculum.DifficultyIndex(index)
    rows = training_rows(folder)
    tokens = np.stack([rows[i]["tokens"] for i in range(len(rows))])
    counts = np.maximum(np.bincount(tokens.ravel(), minlength=257), 1)
    rarity = -np.log(counts / counts.sum())[tokens].sum(axis=1)
    np.testing.assert_array_equal(opened.values("sequence_length"), 32)
    np.testing.assert_array_equal(
        opened.values("vocabulary_rarity"), np.floor(rarity).astype(int)
    )


def test_the_line_of_progress_tells_the_pass_and_the_time_left():
    stream, times = io.StringIO(), iter([0, 10, 90, 180, 200])
    line = analyze._Line("rows", stream, clock=lambda: next(times))
    for done in (50, 450, 900, 1000):
        line(done, 1000, 500)
    assert stream.getvalue().split("\r")[1:] == [
        "pass 1 of 2: 50 of 500 rows, 3:10 left ",
        "pass 1 of 2: 450 of 500 rows, 1:50 left ",
        "pass 2 of 2: 400 of 500 rows, 0:20 left ",
        "pass 2 of 2: 500 of 500 rows, 0:00 left \n",
    ]


def training_rows(folder):
    parser = command_line.parser("test")
    config = command_line.parse(parser, list(data_flags(folder))).config
    return corpora.corpus(config).train


def test_the_same_command_again_changes_nothing(folder, index, capsys):
    before = contents(index)
    analyze.main([*data_flags(folder), *BOTH, f"--output={index}"])
    assert contents(index) == before
    assert "100%" in capsys.readouterr().out


@pytest.mark.slow
def test_an_analysis_killed_at_any_moment_gives_the_bytes_of_an_unbroken_one(
    folder, tmp_path
):
    place = tmp_path / "a place"
    place.mkdir()
    flags = (*data_flags(folder), "--shard_size=1")
    record = analysis_interruptions.run(2, place, flags=flags)
    assert record["equal"] and not record["left_over"]
    assert record["killed"] == 2 and record["workers_ended"]
    assert record["cases"][1]["num_workers"] == 2


def test_blanks_in_paths_change_no_byte(folder, index, tmp_path):
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "texts.jsonl").write_bytes((folder / "my texts.jsonl").read_bytes())
    flags = [f for f in data_flags(plain, "texts.jsonl") if "cache_dir" not in f]
    flags.append(f"--config.data.cache_dir={plain}/cache")
    analyze.main([*flags, *BOTH, f"--output={plain}/index"])
    assert contents(plain / "index") == contents(index)


def test_an_index_is_replaced_only_when_asked(folder, tmp_path, capsys):
    flags = [*data_flags(folder), f"--output={tmp_path}/index"]
    analyze.main([*flags, BOTH[0]])
    before = contents(tmp_path / "index")
    message = refusal(capsys, analyze.main, *flags, BOTH[1])
    assert "or pass --overwrite to replace it" in message
    assert contents(tmp_path / "index") == before
    analyze.main([*flags, BOTH[1], "--overwrite"])
    found = curriculum.DifficultyIndex(tmp_path / "index").metrics
    assert found == ("vocabulary_rarity",)


def test_documents_are_samples_as_well(folder, capsys):
    directory = folder / "documents"
    flags = [*data_flags(folder), "--of=documents", f"--output={directory}"]
    product = "sequence_length_vocabulary_rarity"
    analyze.main([*flags, *BOTH, f"--metric={product}"])
    opened = curriculum.DifficultyIndex(directory)
    length, rarity = (opened.values(m) for m in opened.metrics[:2])
    want = np.lexsort((np.arange(len(opened)), rarity, length))
    np.testing.assert_array_equal(opened.order(product), want)
    capsys.readouterr()
    inspect.main([*data_flags(folder), str(directory), "--percentile=0"])
    shown = capsys.readouterr().out
    shortest = int(opened.order("sequence_length")[1])
    assert f"sample {shortest} ({length[shortest]}): " in shown


def test_inspect_shows_percentiles_texts_and_a_picture(folder, index, capsys):
    picture = folder / "a picture.png"
    flags = ["--percentile=0", "--percentile=100", "--num_samples=1"]
    inspect.main(
        [
            *data_flags(folder),
            str(index),
            "--metric=vocabulary_rarity",
            f"--output={picture}",
            *flags,
        ]
    )
    shown = capsys.readouterr().out
    assert picture.read_bytes()[:4] == b"\x89PNG"
    opened = curriculum.DifficultyIndex(index)
    order = opened.order("vocabulary_rarity")
    values = opened.values("vocabulary_rarity")
    for sample in (order[0], order[-1]):
        assert f"sample {sample} ({values[sample]}): " in shown
    assert "abab" in shown


@pytest.mark.parametrize("percentile", [0, 1, 50, 99, 100])
@pytest.mark.parametrize("count", [1, 3, 10_000])
def test_the_last_sample_shown_is_the_percentiles(index, percentile, count):
    opened = curriculum.DifficultyIndex(index)
    metric = "vocabulary_rarity"
    found = inspect.samples_at(opened, metric, percentile, count)
    assert len(found) == min(count, len(opened))
    if count == 1:
        value = opened.values(metric)[found[0]]
        assert value == opened.quantile(metric, percentile)


def test_an_index_of_other_data_is_refused(folder, index, capsys):
    flags = [*data_flags(folder), "--config.data.seq_len=16"]
    message = refusal(capsys, inspect.main, *flags, str(index))
    assert "other data than this config's" in message
    message = refusal(capsys, analyze.main, *flags, *BOTH, f"--output={index}")
    assert "was made from another source" in message


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--metric=length"], "invalid choice: 'length'"),
        (["--metric=sequence_length"] * 2, "must be different"),
        (["--metric=sequence_length", "--num_workers=-1"], "must not be negative"),
        (["--metric=loss"], "give --model=WORKDIR of a run"),
        (["--metric=sequence_length", "--model=x"], "of the metrics loss and"),
        (["--metric=loss", "--model=x", "--of=documents"], "leave out --of"),
        (["--metric=loss", "--model=no run"], "no run has no config.json"),
    ],
)
def test_analyze_names_what_is_wrong(folder, tmp_path, capsys, flags, says):
    argv = [*data_flags(folder), *flags, f"--output={tmp_path}/x"]
    assert says in refusal(capsys, analyze.main, *argv)
    assert not list(tmp_path.iterdir())


def test_a_corpus_that_is_missing_is_named(folder, tmp_path, capsys):
    argv = [*data_flags(folder, "no.jsonl"), *BOTH, f"--output={tmp_path}/x"]
    assert "no.jsonl does not exist" in refusal(capsys, analyze.main, *argv)


def test_an_output_that_is_a_file_is_refused(folder, tmp_path, capsys):
    path = tmp_path / "a file"
    path.write_text("x")
    refusal(capsys, analyze.main, *data_flags(folder), *BOTH, f"--output={path}")
    assert path.read_text() == "x"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--percentile=101"], "invalid choice"),
        (["--metric=size"], "has no metric 'size'"),
        (["--num_samples=0"], "at least 1"),
    ],
)
def test_inspect_names_what_is_wrong(folder, index, capsys, flags, says):
    argv = [*data_flags(folder), str(index), *flags]
    assert says in refusal(capsys, inspect.main, *argv)


def test_verify_says_whole_or_what_is_damaged(index, tmp_path, capsys):
    verify.main([str(index)])
    assert "whole" in capsys.readouterr().out
    copy = tmp_path / "a copy"
    copy.mkdir()
    for name, content in contents(index).items():
        (copy / name).write_bytes(content)
    path = copy / "vocabulary_rarity.values.npy"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    message = refusal(capsys, verify.main, str(copy), str(tmp_path / "nothing"))
    assert str(path) in message
    assert "has no manifest.json" in message


def test_the_command_runs_with_processes_and_blanks_in_paths(folder, index):
    # Processes start by importing the main module again: only a real one shows it.
    directory = folder / "run 2" / "index"
    command = [sys.executable, "-m", "experiments.analyze", *data_flags(folder), *BOTH]
    subprocess.run(
        [*command, f"--output={directory}", "--num_workers=1"],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        check=True,
        capture_output=True,
    )
    assert contents(directory) == contents(index)


@pytest.fixture(scope="module")
def run(folder):
    """The work directory of a run of two steps."""
    workdir = folder / "a run"
    parser = command_line.parser("test")
    flags = [*data_flags(folder), "--config.train.num_steps=2"]
    flags += ["--config.schedule.kwargs.warmup=1", "--config.eval.max_rows=8"]
    config = command_line.parse(parser, flags).config
    train_lm.train_and_evaluate(config, workdir)
    return workdir


def test_loss_and_perplexity_are_those_of_the_runs_model(folder, run, capsys):
    directory = folder / "losses"
    flags = [f"--model={run}", "--metric=loss", "--metric=perplexity"]
    flags += [*data_flags(folder), f"--output={directory}"]
    analyze.main(flags)
    opened = curriculum.DifficultyIndex(directory)
    model, rows = training.restore(run), training_rows(folder)
    for sample in (0, len(rows) - 1):
        batch = {k: v[None] for k, v in rows[sample].items() if k != "sample_id"}
        loss, weight = model.loss(batch)
        # float32 sums in another order
        np.testing.assert_allclose(
            opened.values("loss")[sample], loss / weight, rtol=1e-5
        )
    np.testing.assert_allclose(
        opened.values("perplexity"), np.exp(opened.values("loss")), rtol=1e-5
    )
    flags[-1] = f"--output={folder / 'others'}"
    message = refusal(capsys, analyze.main, *flags, "--num_workers=1")
    assert "compute in this one (--num_workers=0)" in message


def test_a_model_of_other_rows_is_refused(folder, run, tmp_path, capsys):
    flags = [f"--model={run}", "--metric=loss", f"--output={tmp_path}/x"]
    longer = ["--config.data.seq_len=64", "--config.model.kwargs.max_length=64"]
    message = refusal(capsys, analyze.main, *data_flags(folder), *longer, *flags)
    assert "32 positions, this config" in message
