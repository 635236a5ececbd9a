"""The page for people who come from elsewhere: its code runs, its keys are all told."""

import pathlib
import re
import struct

import grain
import numpy as np
import pytest

from dataeff_jax import curriculum

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "coming_from.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


def write_rows(prefix, rows):
    sizes = np.array([len(row) for row in rows])
    head = struct.pack("<9sQBQQ", b"MMIDIDX", 1, 5, len(rows), 0)
    starts = 8 * (np.cumsum(sizes) - sizes)
    body = sizes.astype("<i4").tobytes() + starts.astype("<i8").tobytes()
    pathlib.Path(f"{prefix}.idx").write_bytes(head + body)
    pathlib.Path(f"{prefix}.bin").write_bytes(np.concatenate(rows).tobytes())


@pytest.fixture
def names(tmp_path, monkeypatch):
    """What the page's code made, beside the files that it speaks of."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("ds_config.json").write_text(blocks("json")[0])
    pathlib.Path("map").mkdir()
    samples = [np.arange(i, 200, 20) for i in range(20)]
    write_rows("map/vocabularyrarity_index_to_sample", samples)
    write_rows("map/vocabularyrarity_index_to_metric", [[i] for i in range(20)])
    row = {"tokens": np.zeros(2048, np.int32)}
    # Grain's own datasets serve as rows, as the page says.
    result = {"rows": grain.MapDataset.range(200).map(lambda _: row)}
    for code in blocks("python"):
        exec(code, result)
    return result


def test_the_code_runs_and_gives_the_papers_steps(names):
    batches, found = names["batches"], names["found"]
    # 100 percentiles by the square root of 110,000 steps; 80 to 2048 in eights.
    voc = found.criteria["vocabularyrarity"].schedule
    assert [voc(t) for t in (1, 12, 45, 110_000)] == [1, 2, 3, 100]
    assert batches[0]["tokens"].shape == (8, 80)
    assert batches[110_000]["tokens"].shape == (8, 2048)
    assert set(batches[0]["sample_id"] % 20) == {0}, "the easiest of 20 values"


def test_composers_warmup_ends_after_three_tenths(names):
    lengths = names["lengths"]
    assert [lengths.length_at(t) for t in (0, 2_999, 3_000)] == [8, 1016, 1024]


def test_every_name_of_ours_on_the_page_exists():
    for name in set(re.findall(r"`curriculum\.([A-Za-z_]+)", PAGE)) - {"batches"}:
        assert name in curriculum.__all__, name


def test_the_index_leads_to_the_page():
    assert "\ncoming_from\n" in (ROOT / "docs" / "index.md").read_text()
