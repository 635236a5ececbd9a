"""The shards of an analysis: computed by processes, each appearing whole or not at all.

Every shard's result is a small file in a folder beside the index, whose name tells
data, metrics and shard size; a run that was killed goes on with what is missing.
"""

import concurrent.futures
import contextlib
import io
import itertools
import math
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from dataeff_jax.curriculum import _difficulty, _records
from dataeff_jax.data import _publish

_PATIENCE_SECONDS = 2.0


class Work:
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

    def num_samples(self, number: int) -> int:
        start, stop = self.shard(number)
        return stop - start

    def part(self, kind: str, place: int, number: int) -> pathlib.Path:
        return self.parts / f"{kind}-{place}-{number:08}.npy"

    def missing(self, kind: str, places: Sequence[int], number: int) -> list[int]:
        return [p for p in places if not self.part(kind, p, number).exists()]

    def batches(self, number: int, size: int) -> Iterator[_records.Records]:
        start, stop = self.shard(number)
        for begin in range(start, stop, size):
            yield _records.Records(self.source, begin, min(begin + size, stop))


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


def save_bytes(path: pathlib.Path, content: bytes | memoryview) -> None:
    """Write a file that appears whole or not at all."""
    temporary = path.with_name(f"{path.name}.{os.urandom(8).hex()}.new")
    with open(temporary, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)


def _save(path: pathlib.Path, array: np.ndarray) -> None:
    stream = io.BytesIO()
    np.save(stream, array)
    save_bytes(path, stream.getbuffer())


def _count_shard(work: Work, number: int) -> int:
    """Write what is counted in a shard; return its samples."""
    counters = list(_counters(work.metrics).values())
    missing = work.missing("counts", range(len(counters)), number)
    totals: dict[int, Any] = dict.fromkeys(missing)
    # Four times as many at once: each time a whole vocabulary is added up.
    size = 4 * max((metric.batch_size for metric in counters), default=1)
    for records in work.batches(number, size) if missing else ():
        for place in missing:
            counts = np.asarray(counters[place].accumulate(records))
            if counts.dtype.kind not in "iub":
                raise ValueError(
                    f"{counters[place].name} counts in {counts.dtype}; counts must be "
                    f"integers, so that their sum does not depend on the shards."
                )
            if totals[place] is None:
                totals[place] = np.zeros(counts.shape, np.int64)
            _check_shapes(counters[place], totals[place], counts)
            totals[place] += counts.astype(np.int64, copy=False)
    for place, total in totals.items():
        _save(work.part("counts", place, number), total)
    return work.num_samples(number)


def _check_shapes(metric: _difficulty.Metric, total: Any, counts: np.ndarray) -> None:
    if total.shape != counts.shape:
        raise ValueError(
            f"{metric.name} counts arrays of shapes {total.shape} and {counts.shape}; "
            f"they must be of one shape."
        )


def _value_shard(work: Work, number: int) -> int:
    """Write the difficulties of a shard's samples; return their number."""
    missing = work.missing("values", range(len(work.metrics)), number)
    if missing:
        totals = {
            fingerprint: np.load(work.parts / f"total-{place}.npy")
            for place, fingerprint in enumerate(_counters(work.metrics))
        }
        prepared = {p: _prepared(work.metrics[p], totals) for p in missing}
        found: dict[int, list[np.ndarray]] = {place: [] for place in missing}
        chosen = [work.metrics[place] for place in missing]
        size = max(metric.batch_size for metric in chosen)
        for records in work.batches(number, size):
            for place, metric in zip(missing, chosen, strict=True):
                values = metric.values(records, prepared[place])
                found[place].append(_checked(metric, records, values))
        for place, pieces in found.items():
            _save(work.part("values", place, number), np.concatenate(pieces))
    return work.num_samples(number)


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
    if found.dtype == metric.dtype and found.dtype.kind != "f":
        return found
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


def _total(work: Work, num_shards: int) -> None:
    """Add up the counts of all shards."""
    for place, metric in enumerate(_counters(work.metrics).values()):
        total: Any = None
        for number in range(num_shards):
            counts = np.load(work.part("counts", place, number))
            total = np.zeros_like(counts) if total is None else total
            _check_shapes(metric, total, counts)
            total += counts
        _save(work.parts / f"total-{place}.npy", total)


def compute_shard(work: Work, kind: str, number: int) -> int:
    """Write what is missing of a shard in a pass; return its samples."""
    return {"counts": _count_shard, "values": _value_shard}[kind](work, number)


def is_done(work: Work, kind: str, number: int) -> bool:
    """Return whether nothing of a shard is missing in a pass."""
    made = _counters(work.metrics) if kind == "counts" else work.metrics
    return not work.missing(kind, range(len(made)), number)


# Maps a pass ("counts" or "values") over the shards with these numbers, in any order;
# yields the samples of each when it is done.
Runner = Callable[[str, Sequence[int]], Iterator[int]]


_WORK: list[Work] = []  # of a worker process, set once when it starts


def _start_worker(work: Work) -> None:
    _WORK[:] = [work]
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A pool whose owner was killed would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _compute_in_worker(kind: str, number: int) -> int:
    return compute_shard(_WORK[0], kind, number)


def check_sendable(
    work: Work, dumps: Callable[[Any], bytes], *, instead: str = ""
) -> None:
    """Say what cannot be sent to processes, before they fail one by one."""
    for what in (*work.metrics, work.source):
        try:
            dumps(what)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            name = getattr(what, "name", "the source")
            raise ValueError(
                f"{name} cannot be sent to processes ({error}); compute in this one "
                f"({instead}), or define its functions in a module."
            ) from error


@contextlib.contextmanager
def local_runner(work: Work, num_workers: int) -> Iterator[Runner]:
    """Give a runner that computes in this process, or in a pool of processes."""
    if not num_workers:
        yield lambda kind, numbers: (compute_shard(work, kind, n) for n in numbers)
        return
    check_sendable(work, pickle.dumps, instead="num_workers=0")
    # Not forked: a copied JAX runtime or file offset would be shared.
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(
        num_workers, context, initializer=_start_worker, initargs=(work,)
    )

    def run(kind: str, numbers: Sequence[int]) -> Iterator[int]:
        jobs = [pool.submit(_compute_in_worker, kind, number) for number in numbers]
        for job in concurrent.futures.as_completed(jobs):
            yield job.result()

    try:
        yield run
    finally:
        pool.shutdown(cancel_futures=True)


def parts_directory(directory: pathlib.Path, key: str) -> pathlib.Path:
    return directory.with_name(f".{directory.name}.{key}.parts")


@contextlib.contextmanager
def own_parts(directory: pathlib.Path, key: str) -> Iterator[pathlib.Path]:
    """Give the folder of the parts, which no other process writes meanwhile."""
    parts = parts_directory(directory, key)
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


def run_passes(
    work: Work,
    runner: contextlib.AbstractContextManager[Runner],
    progress: Callable[[int, int], None] | None,
) -> None:
    """Write all parts that are missing."""
    size = len(work.source)
    num_shards = math.ceil(size / work.shard_size)
    passes = (["counts"] if _counters(work.metrics) else []) + ["values"]
    done = 0
    with runner as run:
        for kind in passes:
            for num_samples in run(kind, range(num_shards)):
                done += num_samples
                if progress is not None:
                    progress(done, size * len(passes))
            if kind == "counts":
                _total(work, num_shards)
