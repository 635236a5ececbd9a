import json

import numpy as np
import pytest

from dataeff_jax import training


def write(workdir, steps, **kwargs):
    """One session that logs some steps; returns the whole log."""
    with training.MetricsLogger(workdir, tensorboard=False, **kwargs) as logger:
        for step in steps:
            logger.log(step, {"loss": 1 / 3 / (step + 1), "seconds": 0.1})
    return training.read_log(workdir)


def test_a_line_is_on_the_disk_when_log_returns(tmp_path):
    logger = training.MetricsLogger(tmp_path, tensorboard=False)
    logger.log(5, {"loss": 0.1, "tokens": 2**40})
    assert training.read_log(tmp_path) == [{"step": 5, "loss": 0.1, "tokens": 2**40}]
    logger.close()


def test_numbers_come_back_bit_for_bit(tmp_path):
    loss = float(np.float32(1) / np.float32(3))
    with training.MetricsLogger(tmp_path, tensorboard=False) as logger:
        logger.log(1, {"loss": np.float32(loss), "flops": 2**70, "x": np.int64(2**40)})
    (line,) = training.read_log(tmp_path)
    assert line == {"step": 1, "loss": loss, "flops": 2**70, "x": 2**40}


def test_what_json_cannot_hold_becomes_null(tmp_path):
    with training.MetricsLogger(tmp_path, tensorboard=False) as logger:
        logger.log(1, {"perplexity": float("inf"), "loss": float("nan")})
    assert training.read_log(tmp_path) == [
        {"step": 1, "perplexity": None, "loss": None}
    ]


@pytest.mark.parametrize("torn", ["", '{"step": 60, "lo', '{"step": 60}'])
@pytest.mark.parametrize("killed_after", [30, 40, 50])
def test_a_resumed_log_equals_the_unbroken_one(tmp_path, killed_after, torn):
    unbroken = write(tmp_path / "unbroken", range(0, 101, 10))
    write(tmp_path / "killed", range(0, killed_after + 1, 10))
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write(torn)
    resumed = write(tmp_path / "killed", range(40, 101, 10), restored_step=30)
    assert resumed == unbroken
    assert {p.name for p in (tmp_path / "killed").iterdir()} == {"metrics.jsonl"}


def test_a_run_killed_before_its_first_checkpoint_starts_a_new_log(tmp_path):
    write(tmp_path, [0, 10])
    assert [line["step"] for line in write(tmp_path, [0, 10, 20])] == [0, 10, 20]


def test_lines_of_the_restored_step_stay(tmp_path):
    write(tmp_path, [0, 10, 10, 20])
    log = write(tmp_path, [20], restored_step=10)
    assert [line["step"] for line in log] == [0, 10, 10, 20]
    assert [line["step"] for line in write(tmp_path, [10], restored_step=0)] == [0, 10]


@pytest.mark.parametrize("damaged", ['{"step": 1\n{"step": 2}\n', "{}\n", "3\n"])
def test_a_damaged_log_is_an_error_that_names_the_file(tmp_path, damaged):
    (tmp_path / "metrics.jsonl").write_text(damaged)
    with pytest.raises(ValueError, match=r"metrics\.jsonl.*no JSON"):
        training.MetricsLogger(tmp_path, restored_step=2)


def test_tensorboard_gets_the_numbers_by_step(tmp_path):
    with training.MetricsLogger(tmp_path) as logger:
        logger.log(5, {"loss": 0.5, "note": "text"})
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"loss" in events.read_bytes()
    assert b"note" not in events.read_bytes()


def test_wall_clock_fields_are_left_out_of_comparisons():
    line = dict.fromkeys(training.WALL_CLOCK_FIELDS, 1.0) | {"step": 1, "loss": 2.0}
    assert training.without_wall_clock(line) == {"step": 1, "loss": 2.0}
    json.dumps(line)
