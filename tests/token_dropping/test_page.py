"""The page about token dropping prints what it says."""

import pathlib
import re

import jax

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "token_dropping.md"


def test_the_page_prints_what_it_says(capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert len(blocks) == 5
    loop = blocks[-1].partition("S, D, L")[2].splitlines()
    assert len([line for line in loop if line.strip()]) < 45
    with jax.numpy_rank_promotion("allow"):  # flax's own layers promote ranks
        exec("\n".join(blocks), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        *("True", "False", "True"),  # dropping, evaluation, shared arrays
        "20 1280 3808 3",
        *("3", "True"),
        "[4, 4]",
        "True",
    ]
