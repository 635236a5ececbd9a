"""The page about lengths prints what it says."""

import pathlib
import re

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "lengths.md"


def test_the_page_prints_what_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    exec("\n".join(blocks), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["(4, 8, 12, 16)", "(8, 4) (2, 16)", "(2, 8)"]
