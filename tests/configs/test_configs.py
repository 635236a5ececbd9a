"""Every configuration loads, is locked, and passes the checks of the command line."""

import pathlib

import pytest

from experiments import command_line

FILES = sorted(
    path
    for path in pathlib.Path("configs").glob("*.py")
    if path.name not in ("__init__.py", "common.py")
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_config_loads_and_passes_the_checks(path):
    config = command_line.parse(
        command_line.parser("test"), [f"--config={path}"]
    ).config
    assert config.is_locked
    with pytest.raises(AttributeError):
        config.trian = 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_config_says_its_command_and_its_seed_can_be_chosen(path):
    assert f"--config={path}" in path.read_text()
    config = command_line.load_config(f"{path}:seed=7")
    assert config.seed == 7
