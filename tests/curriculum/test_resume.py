import pytest

from benchmarks import sampling_resume


@pytest.mark.slow
def test_sampling_goes_on_from_random_stops_with_other_hosts_and_workers():
    record = sampling_resume.run(3, batches=50)
    assert record["equal"] == 3, record["cases"]
    assert record["at_a_difficulty_change"]
    assert record["largest_state_bytes"] < 1000
