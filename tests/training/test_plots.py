import pytest

from dataeff_jax import training


def records(scale):
    lines = [
        {
            "step": s,
            "tokens": 8 * s,
            "seconds": s / 2,
            "flops": 10**12 * s,
            "loss": 9 / s,
        }
        for s in range(1, 20)
    ]
    for line in lines[::5]:
        line["validation_loss"] = scale * line["loss"]
    return lines


@pytest.mark.parametrize("names", [["one"], ["one", "two"]])
def test_runs_become_one_png(tmp_path, names):
    runs = {name: records(i + 1) for i, name in enumerate(names)}
    path = training.plot_runs(runs, tmp_path / "new" / "loss.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_fields_that_a_run_lacks_are_left_out(tmp_path):
    training.plot_runs({"a": [{"step": 1, "loss": None}]}, tmp_path / "a.png")


def test_no_run_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no run"):
        training.plot_runs({}, tmp_path / "a.png")


def test_the_table_has_the_last_value_of_each_field():
    table = training.summary_table({"first run": records(2), "b": [{"step": 1_000}]})
    header, first, second = table.splitlines()
    assert header.split() == (
        "run step tokens seconds flops loss validation loss perplexity".split()
    )
    assert first.split()[2:] == (
        ["19", "152", "9.5", "19,000,000,000,000", "0.4737", "1.125", "-"]
    )
    assert second.split() == ["b", "1,000", "-", "-", "-", "-", "-", "-"]
    assert len({len(line) for line in table.splitlines()}) == 1
