"""The analysis: difficulties of all samples, shard by shard, into an index.

The data set is cut into shards. Every shard's result is a small file that appears whole
or not at all, in a folder beside the index whose name tells data, metrics and shard
size; a run that was killed goes on with what is missing. The index does not depend on
shards or processes: counts are integers, and each value is of one sample.

References:
  Li et al., "DeepSpeed Data Efficiency", https://arxiv.org/abs/2212.03597, 2022
"""

import concurrent.futures
import contextlib
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from dataeff_jax.curriculum import _difficulty, _index, _records, _sorting
from dataeff_jax.data import _publish

# Records that a metric sees at once. Few, so that their arrays stay in the processor's
# cache and are not mapped anew each time: 64 of 512 tokens took a quarter of the time
# of 256.
_BATCH = 64

_PATIENCE_SECONDS = 2.0


class _Work:
    """What all processes need to compute a shard's results."""

    def __init__(
        self,
        source: Any,
        metrics: Sequence[_difficulty.Metric],
        parts: pathlib.Path,
        shard_size: int,
    ):
        self.source = source
        self.metrics = metrics
        self.parts = parts
        self.shard_size = shard_size

    def shard(self, number: int) -> tuple[int, int]:
        start = number * self.shard_size
        return start, min(start + self.shard_size, len(self.source))

    def part(self, kind: str, place: int, number: int) -> pathlib.Path:
        return self.parts / f"{kind}-{place}-{number:08}.npy"

    def missing(self, kind: str, places: Sequence[int], number: int) -> list[int]:
        return [p for p in places if not self.part(kind, p, number).exists()]

    def batches(self, number: int) -> Iterator[_records.Records]:
        start, stop = self.shard(number)
        for begin in range(start, stop, _BATCH):
            yield _records.Records(self.source, begin, min(begin + _BATCH, stop))


def _counters(
    metrics: Sequence[_difficulty.Metric],
) -> dict[str, _difficulty.Metric]:
    """Return the metrics that count something, parts of products too, each once."""
    leaves = itertools.chain(*(metric.parts or (metric,) for metric in metrics))
    return {leaf.fingerprint: leaf for leaf in leaves if leaf.counts}


def _prepared(metric: _difficulty.Metric, totals: dict[str, np.ndarray]) -> Any:
    if metric.parts:
        return [_prepared(part, totals) for part in metric.parts]
    return metric.prepare(totals.get(metric.fingerprint))


def _save(path: pathlib.Path, array: np.ndarray) -> None:
    """Write a part that appears whole or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    with open(temporary, "wb") as stream:
        np.save(stream, array)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)


def _count_shard(work: _Work, number: int) -> int:
    """Write what is counted in a shard; return its samples."""
    counters = list(_counters(work.metrics).values())
    missing = work.missing("counts", range(len(counters)), number)
    totals: dict[int, Any] = dict.fromkeys(missing)
    for records in work.batches(number) if missing else ():
        for place in missing:
            counts = np.asarray(counters[place].accumulate(records))
            if counts.dtype.kind not in "iub":
                raise ValueError(
                    f"{counters[place].name} counts in {counts.dtype}; counts must be "
                    f"integers, so that their sum does not depend on the shards."
                )
            before = totals[place]
            counts = counts.astype(np.int64)
            totals[place] = counts if before is None else before + counts
    for place, total in totals.items():
        _save(work.part("counts", place, number), total)
    return _num_samples(work, number)


def _num_samples(work: _Work, number: int) -> int:
    start, stop = work.shard(number)
    return stop - start


def _value_shard(work: _Work, number: int) -> int:
    """Write the difficulties of a shard's samples; return their number."""
    missing = work.missing("values", range(len(work.metrics)), number)
    if missing:
        totals = {
            fingerprint: np.load(work.parts / f"total-{place}.npy")
            for place, fingerprint in enumerate(_counters(work.metrics))
        }
        prepared = {p: _prepared(work.metrics[p], totals) for p in missing}
        found: dict[int, list[np.ndarray]] = {place: [] for place in missing}
        for records in work.batches(number):
            for place in missing:
                metric = work.metrics[place]
                values = metric.values(records, prepared[place])
                found[place].append(_checked(metric, records, values))
        for place, pieces in found.items():
            _save(work.part("values", place, number), np.concatenate(pieces))
    return _num_samples(work, number)


def _checked(
    metric: _difficulty.Metric, records: _records.Records, values: Any
) -> np.ndarray:
    """Return values in the metric's type, or say which sample has none."""
    found = np.asarray(values)
    if found.shape != (len(records),):
        raise ValueError(
            f"{metric.name} gave values of shape {found.shape} for {len(records)} "
            f"samples."
        )
    if found.dtype.kind not in "iufb":
        raise ValueError(f"{metric.name} gave {found.dtype} values, not numbers.")
    if not np.isfinite(found).all():
        bad = int(np.argmin(np.isfinite(found)))
        raise ValueError(
            f"{metric.name} of sample {records.start + bad} is {found[bad]}; a "
            f"difficulty must be a finite number. Nothing of this analysis is kept."
        )
    with np.errstate(over="ignore", invalid="ignore"):
        result = found.astype(metric.dtype)
    exact = result.dtype.kind == "f" or np.array_equal(result, found)
    if not exact or not np.isfinite(result).all():
        wrong = ~np.isfinite(result) if result.dtype.kind == "f" else result != found
        bad = int(np.argmax(wrong))
        raise ValueError(
            f"{metric.name} of sample {records.start + bad} is {found[bad]}, which its "
            f"dtype {metric.dtype} does not hold. Nothing of this analysis is kept."
        )
    return result


def _total(work: _Work, num_shards: int) -> None:
    """Add up the counts of all shards."""
    for place, metric in enumerate(_counters(work.metrics).values()):
        total: Any = None
        for number in range(num_shards):
            counts = np.load(work.part("counts", place, number))
            if total is not None and total.shape != counts.shape:
                raise ValueError(
                    f"{metric.name} counts arrays of shapes {total.shape} and "
                    f"{counts.shape}; they must be of one shape."
                )
            total = counts if total is None else total + counts
        _save(work.parts / f"total-{place}.npy", total)


_WORK: list[_Work] = []  # of a worker process, set once when it starts


def _start_worker(work: _Work) -> None:
    _WORK[:] = [work]


def _count_in_worker(number: int) -> int:
    return _count_shard(_WORK[0], number)


def _value_in_worker(number: int) -> int:
    return _value_shard(_WORK[0], number)


@contextlib.contextmanager
def _runner(
    work: _Work, num_workers: int
) -> Iterator[Callable[[str, int], Iterator[int]]]:
    """Give a function that maps a pass over all shards, in no order."""
    if not num_workers:
        here = {"counts": _count_shard, "values": _value_shard}
        yield lambda kind, n: (here[kind](work, number) for number in range(n))
        return
    there = {"counts": _count_in_worker, "values": _value_in_worker}
    # Not forked: a copied JAX runtime or file offset would be shared.
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(
        num_workers, context, initializer=_start_worker, initargs=(work,)
    )

    def run(kind: str, num_shards: int) -> Iterator[int]:
        jobs = [pool.submit(there[kind], number) for number in range(num_shards)]
        for job in concurrent.futures.as_completed(jobs):
            yield job.result()

    try:
        yield run
    finally:
        pool.shutdown(cancel_futures=True)


def _parts(directory: pathlib.Path, key: str) -> pathlib.Path:
    return directory.with_name(f".{directory.name}.{key}.parts")


@contextlib.contextmanager
def _own_parts(directory: pathlib.Path, key: str) -> Iterator[pathlib.Path]:
    """Give the folder of the parts, which no other process writes meanwhile."""
    parts = _parts(directory, key)
    lock = parts.with_suffix(".partslock")
    parts.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    # The operating system drops the lock of a process that dies, however it dies.
    while (descriptor := _publish._try_lock(lock, create=True)) is None:
        if time.monotonic() > deadline:
            raise ValueError(
                f"Another process analyzes the same into {directory}; wait for it, or "
                f"name another directory."
            )
        time.sleep(0.05)
    try:
        parts.mkdir(exist_ok=True)
        yield parts
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _write_index(
    temporary: pathlib.Path, work: _Work, num_shards: int, source_fingerprint: str
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


def analyze(
    source: Any,
    metrics: Sequence[_difficulty.Metric],
    directory: str | os.PathLike,
    *,
    num_workers: int = 0,
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
        directory that holds something else or that another process fills just now.

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
            if _parts(directory, key).exists():  # killed after it was finished
                with _own_parts(directory, key) as parts:
                    shutil.rmtree(parts)
            return index
        except ValueError:
            if not overwrite:
                raise
    with _own_parts(directory, key) as parts:
        work = _Work(source, metrics, parts, shard_size)
        try:
            _run(work, num_workers, progress)
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


def _run(
    work: _Work, num_workers: int, progress: Callable[[int, int], None] | None
) -> None:
    """Write all parts that are missing."""
    size = len(work.source)
    num_shards = math.ceil(size / work.shard_size)
    passes = (["counts"] if _counters(work.metrics) else []) + ["values"]
    done = 0
    with _runner(work, num_workers) as run:
        for kind in passes:
            for num_samples in run(kind, num_shards):
                done += num_samples
                if progress is not None:
                    progress(done, size * len(passes))
            if kind == "counts":
                _total(work, num_shards)
