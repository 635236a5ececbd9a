"""The shards of an analysis computed by an Apache Beam pipeline.

Only their numbers travel through the pipeline. A worker reads a shard's records and
writes its parts into the folder beside the index, as a local process does, so all else
is shared with the local runner: what is missing, the sums, the index, its bytes.
"""

import contextlib
import functools
import importlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from dataeff_jax.curriculum import _shards

_POLL_SECONDS = 0.2


def check(options: Sequence[str], num_workers: int) -> None:
    """Raise if Beam is missing, or the arguments cannot be meant."""
    if isinstance(options, str):
        raise ValueError(
            f"beam_options={options!r} must be a list of arguments: ['--name=value']."
        )
    if num_workers:
        raise ValueError(
            f"{num_workers=} is of the local runner; with beam_options the pipeline's "
            f"own options tell its workers (such as --direct_num_workers=2)."
        )
    _beam()


@contextlib.contextmanager
def beam_runner(work: _shards.Work, options: Sequence[str]) -> Iterator[_shards.Runner]:
    """Give a runner that computes each pass by a pipeline with these arguments."""
    pickler = _beam("apache_beam.internal.pickler")
    _shards.check_sendable(work, pickler.dumps, instead="leave out beam_options")
    yield functools.partial(_run, work, options)


def _run(
    work: _shards.Work, options: Sequence[str], kind: str, numbers: Sequence[int]
) -> Iterator[int]:
    """Compute the shards that are missing; yield the samples of each that is there."""
    for path in work.parts.glob("*.error"):  # of a run that was killed
        path.unlink()
    waiting = set(numbers)
    yield from _finished(work, kind, waiting)
    if not waiting:
        return
    result = _start(work, options, kind, sorted(waiting))
    state = _beam("apache_beam.runners.runner").PipelineState
    try:
        while not state.is_terminal(result.state):
            yield from _finished(work, kind, waiting)
            time.sleep(_POLL_SECONDS)
    except BaseException:
        result.cancel()
        raise
    result.wait_until_finish()  # raises what the pipeline failed of
    for path in sorted(work.parts.glob("*.error")):
        raise ValueError(path.read_text())
    yield from _finished(work, kind, waiting)
    if waiting:
        raise RuntimeError(
            f"Beam has finished, but the results of {len(waiting)} shards are not in "
            f"{work.parts}: its workers must see that folder under the same path."
        )


def _finished(work: _shards.Work, kind: str, waiting: set[int]) -> Iterator[int]:
    for number in sorted(waiting):
        if _shards.is_done(work, kind, number):
            waiting.remove(number)
            yield work.num_samples(number)


def _start(
    work: _shards.Work, options: Sequence[str], kind: str, numbers: list[int]
) -> Any:
    beam = _beam()
    settings = _beam("apache_beam.options.pipeline_options").PipelineOptions
    pipeline = beam.Pipeline(options=settings(list(options)))
    # Without the shuffle one worker would get what one worker made.
    shards = pipeline | beam.Create(numbers) | beam.Reshuffle()
    _ = shards | beam.Map(functools.partial(_compute, work, kind))
    return pipeline.run()


def _compute(work: _shards.Work, kind: str, number: int) -> None:
    """Compute a shard in a worker. A wrong sample is told once, not tried again."""
    try:
        _shards.compute_shard(work, kind, number)
    except ValueError as error:
        name = f"{kind}-{number:08}.error"
        _shards.save_bytes(work.parts / name, str(error).encode())


def _beam(module: str = "apache_beam") -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            "Analyzing with Beam needs apache-beam; install it with: "
            "pip install '.[beam]'"
        ) from error
