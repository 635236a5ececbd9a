"""The order of a curriculum with several metrics, on disk, built once.

One metric needs none: its order in the index is the order of eligibility. With several
metrics the samples are sorted by the stage tau from which on all of them admit a
sample. The plan lies beside the index, in a folder named by index and schedules.
"""

import hashlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from dataeff_jax.curriculum import _eligibility, _index, _sorting
from dataeff_jax.data import _publish

_FORMAT, _VERSION = "dataeff_jax.plan", 1


def open_plan(
    index: _index.DifficultyIndex,
    criteria: Mapping[str, _eligibility.Criterion],
    stages: _eligibility.Stages,
    directory: str | os.PathLike | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the samples by stage, and how many each stage admits, int64[J].

    Several metrics' plan is built if it is not there; ``directory`` is the folder of
    all plans, None for one beside the index.
    """
    if len(criteria) == 1:
        (name, criterion), *_ = criteria.items()
        values, order = index.values(name), index.order(name)
        difficulties = stages.difficulties[name]
        counts = _eligibility.admitted_counts(criterion, difficulties, values, order)
        return order, counts
    if directory is None:
        directory = index.directory.absolute()
        directory = directory.with_name(f"{directory.name}.plans")
    key = _key(index, criteria, stages)
    path = pathlib.Path(directory).absolute() / key[:16]
    _publish.remove_leftovers(path)
    if not path.exists():
        with _publish.temporary_directory(path) as temporary:
            _write(temporary, index, criteria, stages, key)
            _publish.publish(temporary, path, overwrite=False)
    return _open(path, key)


def _key(
    index: _index.DifficultyIndex,
    criteria: Mapping[str, _eligibility.Criterion],
    stages: _eligibility.Stages,
) -> str:
    """Return what the plan depends on, as a sha256: not the code of the schedules."""
    told = [index.fingerprint, stages.starts.tolist()]
    for name, criterion in sorted(criteria.items()):
        top = None
        if criterion.difficulty_type == "deepspeed_percentile":
            top = getattr(criterion.schedule, "max_difficulty")  # noqa: B009
        difficulties = stages.difficulties[name]
        told.append([name, criterion.difficulty_type, top, repr(difficulties)])
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _write(
    temporary: pathlib.Path,
    index: _index.DifficultyIndex,
    criteria: Mapping[str, _eligibility.Criterion],
    stages: _eligibility.Stages,
    key: str,
) -> None:
    num_samples, num_stages = len(index), len(stages.starts)
    scratch = temporary / "tau.npy"
    tau = np.lib.format.open_memmap(
        scratch, mode="w+", dtype=np.uint16, shape=(num_samples,)
    )
    for name, criterion in criteria.items():
        values, order = index.values(name), index.order(name)
        difficulties = stages.difficulties[name]
        _eligibility.raise_tau(tau, criterion, difficulties, values, order)

    def stages_of(piece: slice) -> np.ndarray:
        return tau[piece]

    sizes = _sorting.group_sizes(stages_of, num_samples, num_stages)
    path = temporary / "order.npy"
    if sizes.sum():
        order = np.lib.format.open_memmap(
            path,
            mode="w+",
            dtype=_sorting.order_dtype(num_samples),
            shape=(int(sizes.sum()),),
        )
        _sorting.group_samples(stages_of, num_samples, num_stages, order)
        order.flush()
    else:
        np.save(path, np.zeros(0, np.uint32))
    scratch.unlink()
    manifest = {
        "format": _FORMAT,
        "version": _VERSION,
        "key": key,
        "counts": np.cumsum(sizes).tolist(),
        "files": {"order.npy": _index.described(path)},
    }
    (temporary / "manifest.json").write_text(json.dumps(manifest))


def _open(path: pathlib.Path, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Map a plan after checking that it is whole and the one that is meant."""
    try:
        manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text())
        found = (manifest["format"], manifest["version"], manifest["key"])
        expected = manifest["files"]["order.npy"]
        counts = np.array(manifest["counts"], np.int64)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no plan ({error!r}); delete the directory to build it again."
        ) from None
    order = path / "order.npy"
    num_bytes = order.stat().st_size if order.is_file() else 0
    checksum = _index.block_checksum(order) if num_bytes else None
    if (num_bytes, checksum) != (expected["num_bytes"], expected["checksum"]) or (
        found != (_FORMAT, _VERSION, key)
    ):
        raise ValueError(
            f"{order} has {num_bytes} bytes and checksum {checksum}, the manifest of "
            f"{found} says {expected['num_bytes']} and {expected['checksum']}: it is "
            f"damaged or foreign. Delete the directory to build it again."
        )
    mapped = np.load(order, mmap_mode="r" if counts[-1] else None)
    return mapped, counts
