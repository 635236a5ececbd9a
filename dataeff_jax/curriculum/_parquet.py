"""Difficulties as a Parquet file, for tools that read tables."""

import importlib
import os
import pathlib
import tempfile
from typing import Any

import numpy as np

from dataeff_jax.curriculum import _index

_ROW_GROUP = 2**20  # samples that are in memory at once


def export_parquet(
    index: _index.DifficultyIndex, path: str | os.PathLike
) -> pathlib.Path:
    """Writes the difficulties of all samples as a Parquet file.

    A row a sample, in order: ``sample_id`` int64 and a column for each metric in its
    own type. The file's metadata tells the fingerprints of index and data under
    ``dataeff_jax.index`` and ``dataeff_jax.source``. The order of difficulty is that of
    a stable sort by a metric. Memory is bounded, and the file appears whole or not.

    Args:
      index: what to export.
      path: of the file; its directory is made if needed, and a file there is replaced.

    Returns:
      The path.

    Raises:
      ValueError: pyarrow is not installed (the extra ``parquet``), or a metric is
        called ``sample_id``.

    Example:
      >>> import tempfile
      >>> import pyarrow.parquet
      >>> from dataeff_jax import curriculum
      >>> source = [{"tokens": [1, 2, 3]}, {"tokens": [4]}]
      >>> directory = tempfile.mkdtemp()
      >>> index = curriculum.analyze(
      ...     source, [curriculum.sequence_length()], f"{directory}/index")
      >>> path = curriculum.export_parquet(index, f"{directory}/index.parquet")
      >>> pyarrow.parquet.read_table(path).to_pydict()
      {'sample_id': [0, 1], 'sequence_length': [3, 1]}
    """
    arrow, parquet = _pyarrow()
    if "sample_id" in index.metrics:
        raise ValueError(
            f"{index.directory} has a metric 'sample_id', which is the name of the "
            f"samples' column; analyze it under another name."
        )
    types = {"sample_id": np.dtype("int64")}
    types |= {name: index.values(name).dtype for name in index.metrics}
    schema = arrow.schema(
        [(name, arrow.from_numpy_dtype(dtype)) for name, dtype in types.items()],
        metadata={
            "dataeff_jax.index": index.fingerprint,
            "dataeff_jax.source": str(index.manifest["source"]),
        },
    )
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".parquet-", dir=path.parent) as folder:
        temporary = pathlib.Path(folder) / path.name
        with parquet.ParquetWriter(temporary, schema) as writer:
            for start in range(0, len(index), _ROW_GROUP):
                stop = min(start + _ROW_GROUP, len(index))
                columns = [np.arange(start, stop)]
                columns += [index.values(name)[start:stop] for name in index.metrics]
                writer.write_table(arrow.table(columns, schema=schema))
        os.replace(temporary, path)
    return path


def _pyarrow() -> tuple[Any, Any]:
    try:
        arrow = importlib.import_module("pyarrow")
        return arrow, importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ValueError(
            "Writing Parquet needs pyarrow; install it with: pip install '.[parquet]'"
        ) from error
