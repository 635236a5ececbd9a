"""The analysis: difficulties of all samples, shard by shard, into an index.

The index does not depend on shards or processes: counts are integers, and each value is
of one sample.

References:
  Li et al., "DeepSpeed Data Efficiency", https://arxiv.org/abs/2212.03597, 2022
"""

import hashlib
import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dataeff_jax.curriculum import (
    _beam,
    _difficulty,
    _index,
    _records,
    _shards,
    _sorting,
)
from dataeff_jax.data import _publish


def _write_index(
    temporary: pathlib.Path,
    work: _shards.Work,
    num_shards: int,
    source_fingerprint: str,
) -> None:
    """Join the shards, sort, and describe it all in the manifest."""
    size, files, described = len(work.source), {}, {}
    for place, metric in enumerate(work.metrics):
        path = temporary / f"{metric.name}.values.npy"
        values = np.lib.format.open_memmap(
            path, mode="w+", dtype=np.dtype(metric.dtype), shape=(size,)
        )
        for number in range(num_shards):
            start, stop = work.shard(number)
            values[start:stop] = np.load(work.part("values", place, number))
        values.flush()
        order_path = temporary / f"{metric.name}.order.npy"
        order = _sorting.write_order(values, order_path)
        described[metric.name] = {
            "fingerprint": metric.fingerprint,
            "dtype": metric.dtype,
            **_sorting.summary(values, order),
        }
        for one in (path, order_path):
            files[one.name] = _index.described(one)
    manifest = {
        "format": _index.FORMAT,
        "version": _index.VERSION,
        # The same content is the same build, so undisturbed and resumed runs agree.
        "build": hashlib.sha256(
            json.dumps([source_fingerprint, described, files]).encode()
        ).hexdigest(),
        "num_samples": size,
        "source": source_fingerprint,
        "metrics": described,
        "files": files,
    }
    (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1))


def _open_fitting(
    directory: pathlib.Path,
    source_fingerprint: str,
    metrics: Sequence[_difficulty.Metric],
) -> _index.DifficultyIndex:
    """Open the index if it is of this data and these metrics, else refuse."""
    index = _index.DifficultyIndex(directory)
    found = {name: m["fingerprint"] for name, m in index.manifest["metrics"].items()}
    pairs = [("source", index.manifest["source"], source_fingerprint)]
    pairs += [
        (f"metric {metric.name}", found.get(metric.name), metric.fingerprint)
        for metric in metrics
    ]
    for what, has, wanted in pairs:
        if has != wanted:
            raise ValueError(
                f"{directory} was made from another {what}: it has fingerprint {has}, "
                f"asked for is {wanted}. Use another directory, or pass overwrite=True "
                f"to replace it."
            )
    return index


def _check_arguments(
    source: Any,
    metrics: Sequence[_difficulty.Metric],
    num_workers: int,
    shard_size: int,
) -> None:
    if not len(source):
        raise ValueError("The source is empty; there is nothing to analyze.")
    names = [metric.name for metric in metrics]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"metrics={names} must be different, at least one.")
    for metric in metrics:
        if np.dtype(metric.dtype).kind not in "iuf" or not metric.name.isidentifier():
            raise ValueError(
                f"Metric {metric.name!r} with dtype {metric.dtype!r} needs a name that "
                f"is a word, and an integer or float dtype."
            )
    if num_workers < 0 or shard_size < 1:
        raise ValueError(
            f"{num_workers=} must not be negative, {shard_size=} be at least 1."
        )


def _runner(work: _shards.Work, num_workers: int, beam_options: Sequence[str] | None):
    if beam_options is None:
        return _shards.local_runner(work, num_workers)
    return _beam.beam_runner(work, beam_options)


def analyze(
    source: Any,
    metrics: Sequence[_difficulty.Metric],
    directory: str | os.PathLike,
    *,
    num_workers: int = 0,
    beam_options: Sequence[str] | None = None,
    shard_size: int = 2**16,
    source_fingerprint: str | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> _index.DifficultyIndex:
    """Compute the difficulties of all samples into an index, or open what is there.

    A run that was killed goes on with the shards that are missing when it is called
    again with the same arguments (``num_workers`` may differ), and the index has the
    same bytes. An error of a metric keeps nothing. Memory is bounded by a shard's
    values and 2^23 values to sort.

    Worker processes start by importing the main script again, so a script that uses
    them needs ``if __name__ == "__main__":`` around its start.

    Args:
      source: records by position: anything with ``__len__`` and ``__getitem__``; a
        record is a dict, a tuple or an array. ``read_range(start, stop) -> dict of
        arrays [n, ...]``, where the source has it, is much faster.
      metrics: for example ``[sequence_length()]``; their names differ.
      directory: of the index; made by this call.
      num_workers: processes; 0 computes in this one. May exceed the shards.
      beam_options: arguments of an Apache Beam pipeline, such as
        ``["--runner=FlinkRunner", "--flink_master=host:8081"]``, that computes the
        shards (the extra ``beam``). Its workers read the records, and must see the
        source's files and the directory under the same paths. None computes here.
      shard_size: samples a shard.
      source_fingerprint: stands for the data. None takes ``source.fingerprint``, or
        reads all records; give your own (a version, a date) where that takes too long.
      overwrite: replace an index of other data or metrics, or a damaged one. Readers
        see the old one or the new one.
      progress: called as ``progress(done, total)`` when a shard is done, in samples
        times passes.

    Returns:
      The index.

    Raises:
      ValueError: an empty source, a sample without a finite difficulty (named), a
        directory that holds something else or that another process fills just now,
        Beam asked for where it is not installed.

    Example:
      >>> import tempfile
      >>> from dataeff_jax import curriculum
      >>> source = [{"tokens": [1, 2, 3]}, {"tokens": [4]}]
      >>> metrics = [curriculum.sequence_length()]
      >>> index = curriculum.analyze(source, metrics, tempfile.mkdtemp())
      >>> index.order("sequence_length").tolist()
      [1, 0]
    """
    metrics = tuple(metrics)
    _check_arguments(source, metrics, num_workers, shard_size)
    if beam_options is not None:
        _beam.check(beam_options, num_workers)
    directory = pathlib.Path(directory).resolve()
    if source_fingerprint is None:
        source_fingerprint = _records.records_fingerprint(source)
    settings = [source_fingerprint, len(source), shard_size]
    settings += [metric.fingerprint for metric in metrics]
    key = hashlib.sha256(repr(settings).encode()).hexdigest()[:16]
    _publish.remove_leftovers(directory)
    if directory.exists() and any(directory.iterdir()):
        if not (directory / "manifest.json").exists():
            raise ValueError(f"{directory} holds other files; name a new directory.")
        try:
            index = _open_fitting(directory, source_fingerprint, metrics)
            if _shards.parts_directory(
                directory, key
            ).exists():  # killed after it was finished
                with _shards.own_parts(directory, key) as parts:
                    shutil.rmtree(parts)
            return index
        except ValueError:
            if not overwrite:
                raise
    with _shards.own_parts(directory, key) as parts:
        work = _shards.Work(source, metrics, parts, shard_size)
        try:
            _shards.run_passes(work, _runner(work, num_workers, beam_options), progress)
        except ValueError:
            shutil.rmtree(parts, ignore_errors=True)
            raise
        with _publish.temporary_directory(directory) as temporary:
            num_shards = math.ceil(len(source) / shard_size)
            _write_index(temporary, work, num_shards, source_fingerprint)
            _publish.publish(temporary, directory, overwrite=overwrite)
        shutil.rmtree(parts, ignore_errors=True)
    # Another process may have been first; its index serves if it fits.
    return _open_fitting(directory, source_fingerprint, metrics)
