"""The difficulty index: dense arrays on disk, memory-mapped, verified when opened.

A directory of plain ``.npy`` files, readable with NumPy alone, two for each metric:

    METRIC.values.npy    the metric's dtype [N]    the difficulty of sample i
    METRIC.order.npy     uint32 or uint64 [N]      the samples from easy to hard
    manifest.json        counts, sizes, checksums, fingerprints, histograms, quantiles

Equal difficulties are ordered by sample. It is written into a hidden sibling directory
and renamed when it is complete.
"""

import hashlib
import os
import pathlib
from typing import Any

import numpy as np

from dataeff_jax.data import _manifest, _publish

FORMAT = "dataeff_jax.difficulty"
VERSION = 1
_FIELDS = ("build", "num_samples", "source", "metrics", "files")

# Opening reads files up to this size whole, and blocks of larger ones, so that it takes
# milliseconds whatever their size; `verify` reads them whole.
_CHECKED_BYTES = 64 * 2**10
_BLOCK_BYTES = 4 * 2**10


class DifficultyIndex:
    """Difficulties of all samples of a data set, and their orders; memory-mapped.

    Opening checks the format, the files' sizes, the counts and checksums of blocks, and
    keeps O(1) in memory. A pickled index reopens its directory and refuses another
    build.

    Args:
      directory: what ``analyze`` has written.

    Attributes:
      manifest: what ``manifest.json`` says.

    Raises:
      ValueError: no index, or one that is cut, damaged or mixed; the message names the
        file with the expected and the actual size or count.

    Example:
      >>> import tempfile
      >>> from dataeff_jax import curriculum
      >>> source = [{"tokens": [1, 2, 3]}, {"tokens": [4]}]
      >>> directory = tempfile.mkdtemp()
      >>> _ = curriculum.analyze(source, [curriculum.sequence_length()], directory)
      >>> index = curriculum.DifficultyIndex(directory)
      >>> index.metrics, len(index), index.quantile("sequence_length", 100)
      (('sequence_length',), 2, 3)
      >>> index.values("sequence_length").tolist()
      [3, 1]
    """

    def __init__(self, directory: str | os.PathLike):
        self.directory = pathlib.Path(directory)
        self.manifest, self._arrays = _publish.open_consistently(
            self.directory, _read_manifest, _open_arrays
        )

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.manifest["num_samples"]

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return the metrics' names."""
        return tuple(self.manifest["metrics"])

    @property
    def fingerprint(self) -> str:
        """Return a sha256 that changes when any difficulty does."""
        files = sorted((n, f["sha256"]) for n, f in self.manifest["files"].items())
        return hashlib.sha256(repr(files).encode()).hexdigest()

    def values(self, metric: str) -> np.ndarray:
        """Return the difficulty of each sample, [N]."""
        return self._arrays[f"{self._known(metric)}.values.npy"]

    def order(self, metric: str) -> np.ndarray:
        """Return the samples from easy to hard, [N]."""
        return self._arrays[f"{self._known(metric)}.order.npy"]

    def quantile(self, metric: str, percentile: int) -> int | float:
        """Return the largest difficulty that a whole percentile admits."""
        quantiles = self.manifest["metrics"][self._known(metric)]["quantiles"]
        if not 0 <= percentile < len(quantiles):
            raise ValueError(f"percentile={percentile} must be an integer in 0 to 100.")
        return quantiles[percentile]

    def _known(self, metric: str) -> str:
        if metric not in self.manifest["metrics"]:
            raise ValueError(
                f"{self.directory} has no metric {metric!r}; it has: "
                f"{', '.join(self.metrics)}."
            )
        return metric

    def verify(self) -> None:
        """Read all files and check them: checksums, finite values, orders.

        Raises:
          ValueError: what is wrong with which file.
        """
        for name, expected in self.manifest["files"].items():
            path = self.directory / name
            if (found := sha256(path)) != expected["sha256"]:
                raise ValueError(
                    f"{path} has sha256 {found}, the manifest says "
                    f"{expected['sha256']}: it is damaged. {_REBUILD}"
                )
        for metric in self.metrics:
            _check_order(
                self.directory, metric, self.values(metric), self.order(metric)
            )

    def __reduce__(self):
        return (_reopen, (str(self.directory.absolute()), self.manifest["build"]))


def _reopen(directory: str, build: str) -> DifficultyIndex:
    index = DifficultyIndex(directory)
    if index.manifest["build"] != build:
        raise ValueError(f"{directory} was rebuilt since it was opened; open it again.")
    return index


def _check_order(
    directory: pathlib.Path, metric: str, values: np.ndarray, order: np.ndarray
) -> None:
    seen = np.zeros(len(order), bool)
    chunk, last = 2**22, None
    for start in range(0, len(order), chunk):
        samples = order[start : start + chunk]
        seen[samples] = True
        sorted_values = values[samples]
        if not np.isfinite(sorted_values).all():
            raise ValueError(f"{directory}/{metric}.values.npy holds no number.")
        if last is not None:
            sorted_values = np.concatenate([[last], sorted_values])
        if (sorted_values[1:] < sorted_values[:-1]).any():
            raise ValueError(f"{directory}/{metric}.order.npy is not in order.")
        last = sorted_values[-1]
    if not seen.all():
        raise ValueError(
            f"{directory}/{metric}.order.npy lacks sample {int(np.argmin(seen))}."
        )


_REBUILD = "Delete the directory, or analyze with overwrite=True."


def _open_arrays(
    directory: pathlib.Path, manifest: dict[str, Any]
) -> dict[str, np.ndarray]:
    return {
        name: _manifest.open_array(
            directory / name,
            expected,
            count=manifest["num_samples"],
            checksum=block_checksum,
            rebuild=_REBUILD,
        )
        for name, expected in manifest["files"].items()
    }


def _read_manifest(directory: pathlib.Path) -> dict[str, Any]:
    manifest = _manifest.read(
        directory, kind="difficulty index", found=(FORMAT, VERSION), rebuild=_REBUILD
    )
    missing = [name for name in _FIELDS if name not in manifest]
    for metric in manifest.get("metrics", ()):
        files = (f"{metric}.{kind}.npy" for kind in ("values", "order"))
        missing += [f for f in files if f not in manifest.get("files", ())]
    if missing:
        path = directory / "manifest.json"
        raise ValueError(f"{path} lacks {', '.join(missing)}. {_REBUILD}")
    return manifest


def block_checksum(path: pathlib.Path) -> str:
    """Return the checksum that opening an index compares."""
    return _manifest.block_checksum(
        path, checked_bytes=_CHECKED_BYTES, block_bytes=_BLOCK_BYTES
    )


def sha256(path: pathlib.Path) -> str:
    """Return the sha256 of a whole file."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def described(path: pathlib.Path) -> dict[str, Any]:
    """Return a file's size and checksums for the manifest, after syncing it."""
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())
    return {
        "num_bytes": path.stat().st_size,
        "checksum": block_checksum(path),
        "sha256": sha256(path),
    }
