"""The Parquet file holds what the index holds, and appears whole or not at all."""

import importlib

import numpy as np
import pytest

from dataeff_jax import curriculum
from dataeff_jax.curriculum import _parquet

parquet = pytest.importorskip("pyarrow.parquet")

ROWS = [{"tokens": np.arange(1 + i * 7 % 13)} for i in range(50)]
METRICS = [
    curriculum.sequence_length(),
    curriculum.function_metric(
        lambda record: len(record["tokens"]) / 3, name="third", dtype="float32"
    ),
]


@pytest.fixture
def index(tmp_path):
    return curriculum.analyze(ROWS, METRICS, tmp_path / "my index")


@pytest.mark.parametrize("row_group", [7, 50, 1000])
def test_columns_are_those_of_the_index(index, row_group, tmp_path, monkeypatch):
    monkeypatch.setattr(_parquet, "_ROW_GROUP", row_group)
    path = curriculum.export_parquet(index, tmp_path / "a folder" / "index.parquet")
    table = parquet.read_table(path)
    assert table.column_names == ["sample_id", "sequence_length", "third"]
    np.testing.assert_array_equal(table["sample_id"], np.arange(50))
    for name in index.metrics:
        column = table[name].to_numpy()
        assert column.dtype == index.values(name).dtype
        np.testing.assert_array_equal(column, index.values(name))
        order = np.argsort(column, kind="stable")
        np.testing.assert_array_equal(order, index.order(name))
    told = table.schema.metadata
    assert told[b"dataeff_jax.index"].decode() == index.fingerprint
    assert told[b"dataeff_jax.source"].decode() == index.manifest["source"]


def test_a_stopped_export_leaves_the_old_file(index, tmp_path, monkeypatch):
    path = tmp_path / "index.parquet"
    path.write_bytes(b"old")

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(curriculum.DifficultyIndex, "__len__", stop)
    with pytest.raises(KeyboardInterrupt):
        curriculum.export_parquet(index, path)
    assert path.read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["index.parquet", "my index"]


def test_without_pyarrow_the_extra_is_named(index, tmp_path, monkeypatch):
    whole = importlib.import_module

    def without(name, *rest):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return whole(name, *rest)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(ValueError, match=r"pip install '\.\[parquet\]'"):
        curriculum.export_parquet(index, tmp_path / "x.parquet")


def test_a_metric_with_the_name_of_the_samples_is_refused(tmp_path):
    metric = curriculum.function_metric(lambda record: 1, name="sample_id")
    index = curriculum.analyze(ROWS[:2], [metric], tmp_path / "index")
    with pytest.raises(ValueError, match="under another name"):
        curriculum.export_parquet(index, tmp_path / "x.parquet")
    assert len(list(tmp_path.iterdir())) == 1
