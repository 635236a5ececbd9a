"""DeepSpeed's analysis of sequence length and vocabulary rarity, pass by pass.

Run by `analyzer.py` as a child, by a Python that has deepspeed; prints one JSON object.
"""

import json
import logging
import pathlib
import sys
import time

import numpy as np
import torch


class Rows(torch.utils.data.Dataset):
    """Rows of a mapped file, as the tensors that DeepSpeed's loader stacks."""

    def __init__(self, path):
        self._array = np.load(path, mmap_mode="r")

    def __len__(self):
        return len(self._array)

    def __getitem__(self, index):
        return torch.from_numpy(self._array[index].astype(np.int64))


def analyzer(rows, folder, **metrics):
    """A DataAnalyzer of metrics given as name=(function, type)."""
    from deepspeed.runtime.data_pipeline.data_sampling import data_analyzer

    return data_analyzer.DataAnalyzer(
        rows,
        batch_size=1024,
        metric_names=list(metrics),
        metric_functions=[function for function, _ in metrics.values()],
        metric_types=[kind for _, kind in metrics.values()],
        metric_dtypes=[np.int64] * len(metrics),
        save_path=str(folder),
    )


def main():
    path, vocab_size, folder = sys.argv[1:]
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows, folder = Rows(path), pathlib.Path(folder)
    marks = [(time.perf_counter(), cpu_seconds())]

    def mark():
        marks.append((time.perf_counter(), cpu_seconds()))

    totals = []

    def histogram(data):
        counts = torch.bincount(data.reshape(-1), minlength=int(vocab_size))
        counts[0] = 0  # padding
        totals.append(counts)
        totals[:] = [sum(totals)]
        return counts.numpy().copy()

    counting = analyzer(
        rows, folder, vocabulary=(histogram, "accumulate_value_over_samples")
    )
    counting.run_map()
    counting.run_reduce()
    mark()
    counts = totals[0].clamp(min=1).double()
    rarity = -(counts / counts.sum()).log()
    rarity[0] = 0
    sums = []

    def rarities(data):
        values = rarity[data].sum(dim=1).floor().long()
        sums.append(int(values.sum()))
        return values.numpy()

    def lengths(data):
        return (data != 0).sum(dim=1).numpy()

    both = analyzer(
        rows,
        folder,
        sequence_length=(lengths, "single_value_per_sample"),
        vocabulary_rarity=(rarities, "single_value_per_sample"),
    )
    both.run_map()
    mark()
    both.run_reduce()
    mark()
    files = [f for f in folder.rglob("*") if f.is_file()]
    answer = {
        "version": deepspeed.__version__,
        "num_samples": len(rows),
        "marks": marks,
        "rarity_sum": sum(sums),
        "num_files": len(files),
        "num_bytes": sum(f.stat().st_size for f in files),
    }
    print(json.dumps(answer))


def cpu_seconds():
    """Of this process and of its children that have ended."""
    import resource

    used = [
        resource.getrusage(who)
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    return sum(one.ru_utime + one.ru_stime for one in used)


if __name__ == "__main__":
    main()
