"""A config that cannot run ends with status 2 and says all that is wrong."""

import pytest

from experiments import builders, command_line, curricula

BASELINE = "configs/gpt_baseline.py:tiny"


def parse(*argv, config=BASELINE):
    parser = command_line.parser("test")
    return command_line.parse(parser, [f"--config={config}", *argv])


def refusal(capsys, *argv, config=BASELINE) -> str:
    with pytest.raises(SystemExit) as stop:
        parse(*argv, config=config)
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1, "one message on one line"
    return message


def test_overrides_take_the_type_of_the_default():
    config = parse(
        "--config.train.num_steps=7",
        "--config.schedule.kwargs.peak_value=3e-4",
        "--config.data.name=wiki",
        "--config.optimizer.kwargs.b1=0.8",
    ).config
    assert config.train.num_steps == 7
    assert config.schedule.kwargs.peak_value == 3e-4
    assert config.data.name == "wiki"
    assert config.optimizer.kwargs.b1 == 0.8


def test_a_warm_up_may_be_a_fraction_of_the_run():
    config = parse("--config.schedule.kwargs.warmup=0.25").config
    rate = builders.learning_rate(config, curricula.timeline(config))
    assert rate(5, 0) == max(rate(step, 0) for step in range(21))


def test_a_fraction_of_the_run_may_become_a_count():
    config = parse(
        "--config.curriculum.length.kwargs.total=10",
        config="configs/gpt_seqlen_warmup.py:tiny",
    ).config
    assert config.curriculum.length.kwargs.total == 10


def test_an_argument_of_a_block_may_be_added():
    assert parse("--config.optimizer.kwargs.eps_root=1e-9").config.optimizer.kwargs[
        "eps_root"
    ] == pytest.approx(1e-9)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("--config.train.num_stps=5", "did you mean 'train.num_steps'"),
        ("--config.trian.num_steps=5", "did you mean 'train"),
        ("--config.train.seq_len=5", "did you mean 'data.seq_len'"),
        ("--config.train.num_steps=1e2", "expected an integer"),
        ("--config.train.num_steps=0.5", "is float, expected int"),
        ("--config.model.kwargs.num_layers=0.5", "is float, GPT wants int"),
        ("--config.train.num_steps=true", "expected an integer"),
        ("--config.schedule.kwargs.peak_value=big", "expected a number"),
        ("--config.schedule.name=warmup_cosin_schedule", "warmup_cosine_schedule"),
        ("--config.optimizer.name=adamv", "did you mean 'adam"),
        ("--config.optimizer.kwargs.beta1=0.9", "did you mean 'b1'"),
        ("--config.schedule.kwargs.power=2", "schedule.kwargs.power does not fit"),
        ("--config.model.kwargs.num_layer=4", "did you mean 'num_layers'"),
        ("--config.model.kwargs.num_layers='4'", "expected an integer"),
        ("--config.data.seq_len=0", "at least 1"),
        ("--config.random_ltd=1", "random_ltd=1: expected a block of keys"),
        ("--config.model.kwargs.max_length=16", "exceeds the model's 16 positions"),
        ("--config.model.kwargs.vocab_size=16", "set elsewhere"),
        ("--config.mesh=1", "expected a dict"),
        ("--config.seed=-1", "seed=-1: must lie between 0 and 2**32 - 1"),
        ("--config.seed=4294967296", "must lie between"),
        ("--config.data.num_workers=-1", "must be 0 or more"),
        ("--config.mesh.axes.data=0", "at least 1, or -1 for all"),
        ("--config.eval.max_rows=0", "at least 1, or -1 for all"),
        ("--config.optimizer.kwargs.b1=nan", "must be a finite number"),
        ("--config.optimizer.kwargs={'b1': '0.9'}", "b1='0.9' is str"),
        ("--config.optimizer.name=chain", "'chain' takes no learning_rate"),
        ("--config.optimizer.kwargs=None", "expected a block of keys"),
        ("--config.schedule.kwargs=None", "expected a block of keys"),
        ("--config.model.kwargs=None", "expected a block of keys"),
        ("--config.model.kwargs.dropout_rate=nan", "is str"),
        ("--config.model.name=ViT", "'ViT' is no language model"),
        ("--config.model.name=Block", "'Block' is no language model"),
        ("--config.model.name=BERT", "positions does not fit BERT"),
        ("--config.data.mask_rate=0.15", "hides tokens, but GPT predicts the next"),
        ("--config.train.num_steps", "write --config.train.num_steps=VALUE"),
    ],
)
def test_one_mistake_is_named(capsys, override, says):
    assert says in refusal(capsys, override)


def test_an_encoder_without_hidden_tokens_is_refused(capsys):
    config = "configs/bert_baseline.py:tiny"
    message = refusal(capsys, "--config.data.mask_rate=0", config=config)
    assert "BERT sees all tokens" in message


def test_all_mistakes_come_in_one_message(capsys):
    message = refusal(
        capsys,
        "--config.train.num_stps=5",
        "--config.train.num_steps=1e2",
        "--config.data.batch_size=4",
        "--config.data.batch_size=8",
    )
    assert "num_stps" in message
    assert "1e2" in message
    assert "data.batch_size is given twice" in message
    assert "3 problems" in message


def test_another_optimizer_says_which_arguments_no_longer_fit(capsys):
    message = refusal(capsys, "--config.optimizer.name=sgd")
    for argument in ("b1", "b2", "eps", "weight_decay"):
        assert f"optimizer.kwargs.{argument} does not fit sgd" in message


def test_a_config_file_with_a_wrong_key_or_type_is_refused(capsys, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from configs import common\n"
        "def get_config(arg=None):\n"
        "    config = common.base()\n"
        "    config.train.num_stepz = 3\n"
        "    return config\n"
    )
    assert "num_steps" in refusal(capsys, config=str(path))
    path.write_text(
        "from configs import common\n"
        "def get_config(arg=None):\n"
        "    config = common.base()\n"
        "    with config.unlocked(), config.train.ignore_type():\n"
        "        config.train.num_steps = '100'\n"
        "        config.modle = 3\n"
        "    return config\n"
    )
    message = refusal(capsys, config=str(path))
    assert "train.num_steps='100' is str, expected int" in message
    assert "modle" in message


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("def get_config(:", "SyntaxError: invalid syntax"),
        ("import no_such_package", "No module named 'no_such_package'"),
        ("def get_config(arg): return None", "get_config returns None"),
        ("def get_config(arg): 1 / 0", "ZeroDivisionError: division by zero"),
        ("x = 1", "has no attribute 'get_config"),
    ],
)
def test_a_file_that_makes_no_config_is_named(capsys, tmp_path, content, says):
    path = tmp_path / "mine.py"
    path.write_text(content)
    message = refusal(capsys, config=str(path))
    assert "mine.py does not make a config: " in message
    assert says in message


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("configs/no_such.py", "no config file"),
        ("configs/gpt_baseline.py:tiny,sed=3", "no variant 'sed'"),
        ("configs/gpt_baseline.py:tiny,seed=x", "'seed=x' needs seed=<int>"),
    ],
)
def test_a_config_that_is_not_there(capsys, config, says):
    assert says in refusal(capsys, config=config)


def test_an_unknown_flag_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        parse("--wrokdir=x")
    assert stop.value.code == 2
