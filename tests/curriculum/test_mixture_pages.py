"""The pages about mixtures and batches by tokens print what they say."""

import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
PRINTED = {
    "mixtures": [
        "('books', 'chat', 'web')",
        "[174, 0, 626]",
        "[0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2]",
        "['loss_0_25', 'loss_25_50', 'loss_50_75', 'loss_75_100']",
        "[0.1, 0.17, 0.28, 0.45]",
    ],
    "batches_by_tokens": [
        "((8, 4), (4, 8), (2, 16))",
        "[(8, 4), (4, 8), (2, 16), (2, 16)]",
        "[1, 7, 4, -1]",
        "0.707",
    ],
}


@pytest.mark.parametrize("page", PRINTED)
def test_the_page_prints_what_it_says(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (DOCS / f"{page}.md").read_text()
    exec("\n".join(re.findall(r"```python\n(.*?)```", text, re.S)), {})
    assert capsys.readouterr().out.splitlines() == PRINTED[page]


@pytest.mark.parametrize("page", PRINTED)
def test_the_index_leads_to_the_page(page):
    assert f"\n{page}\n" in (DOCS / "index.md").read_text()
