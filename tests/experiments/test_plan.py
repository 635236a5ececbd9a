"""The table of `plan` says what does not fit and which collectives run in loops."""

import pytest

from experiments import plan

REPORT = {
    "device": "NVIDIA H200",
    "hosts": 2,
    "devices_per_host": 8,
    "parameters": 1_000_000,
    "flops_per_step": 3 * 10**15,
    "memory_bytes_per_device": {"arguments": 2 * 10**9, "total": 2 * 10**9},
    "memory_limit_bytes": 141 * 10**9,
    "fits": True,
    "collectives": [
        {
            "op": "all-reduce",
            "dtype": "f32",
            "group_size": 16,
            "payload_bytes": 4,
            "wire_bytes": 10**6,
            "times": 3,
            "conditional": True,
            "source": "psum",
        }
    ],
    "wire_bytes_per_device": 3 * 10**6,
    "kernels": [{"name": "gather", "registers": 22, "spill_bytes": 0}],
}


@pytest.mark.parametrize(("fits", "word"), [(True, "fits"), (False, "DOES NOT FIT")])
def test_the_table_says_whether_it_fits(fits, word):
    assert word in plan.table({**REPORT, "fits": fits})


def test_the_table_counts_all_runs_of_a_collective():
    text = plan.table(REPORT)
    assert "16 x NVIDIA H200" in text
    assert "3.000  (in a branch)" in text
    assert "gather: 22 registers" in text
