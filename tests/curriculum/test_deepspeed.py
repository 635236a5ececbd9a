"""What DeepSpeed's users have: their configuration and the files of its analyzer."""

import copy
import json
import pathlib
import struct

import numpy as np
import pytest

from dataeff_jax import curriculum
from dataeff_jax.curriculum import _deepspeed_index

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"
CLUSTERS = json.loads((GOLDEN / "data_sampler_clusters.json").read_text())
SCHEDULES = json.loads((GOLDEN / "curriculum_scheduler.json").read_text())["cases"]
CODES = {"u1": 1, "i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<u2": 6, "<u4": 7, "<u8": 8}


def write_rows(prefix, rows, dtype="<i8"):
    """A transcription of the format: a header, sizes, byte offsets, documents."""
    item = np.dtype(dtype).itemsize
    sizes = np.array([len(row) for row in rows])
    documents = [0, len(rows)]
    with open(f"{prefix}.idx", "wb") as stream:
        stream.write(b"MMIDIDX\x00\x00" + struct.pack("<Q", 1))
        stream.write(struct.pack("<B", CODES[dtype]))
        stream.write(struct.pack("<QQ", len(rows), len(documents)))
        stream.write(sizes.astype("<i4").tobytes())
        stream.write((item * (np.cumsum(sizes) - sizes)).astype("<i8").tobytes())
        stream.write(np.array(documents, "<i8").tobytes())
    flat = np.concatenate([np.asarray(row) for row in rows])
    pathlib.Path(f"{prefix}.bin").write_bytes(flat.astype(dtype).tobytes())


def grouped(values):
    """The distinct values, rising, and the samples that have each."""
    distinct = np.unique(values)
    return [[v] for v in distinct], [np.flatnonzero(values == v) for v in distinct]


def write_metric(folder, name, values, sample_dtype="<i8", value_dtype="<i8"):
    rows, samples = grouped(np.asarray(values))
    pair = (folder / f"{name}_index_to_sample", folder / f"{name}_index_to_metric")
    write_rows(pair[0], samples, sample_dtype)
    write_rows(pair[1], rows, value_dtype)
    return tuple(map(str, pair))


def test_the_transcription_groups_as_the_original_did():
    rows, samples = grouped(np.array(CLUSTERS["metric_a"]))
    assert [row[0] for row in rows] == CLUSTERS["index_to_metric_a"]
    first = CLUSTERS["index_to_sample_a_first_rows"]
    assert [row.tolist() for row in samples[: len(first)]] == first


@pytest.mark.parametrize("sample_dtype", ["<u2", "<i4", "<u4", "<i8", "<u8"])
@pytest.mark.parametrize("value_dtype", ["<i2", "<u2", "<i8", "<u8"])
def test_values_come_back_whatever_their_type(tmp_path, sample_dtype, value_dtype):
    pair = write_metric(tmp_path, "b", CLUSTERS["metric_b"], sample_dtype, value_dtype)
    index = curriculum.import_deepspeed_index({"b": pair}, tmp_path / "index")
    np.testing.assert_array_equal(index.values("b"), CLUSTERS["metric_b"])
    index.verify()


def test_negative_values_and_numbers_above_2_to_the_24_stay_exact(tmp_path):
    values = [-(2**40), 2**24 + 1, 2**24, 2**62 + 1]
    pair = write_metric(tmp_path, "m", values)
    index = curriculum.import_deepspeed_index({"m": pair}, tmp_path / "index")
    assert index.values("m").tolist() == values


def configuration(metrics, **more):
    learning = {"enabled": True, "curriculum_metrics": metrics, **more}
    sampling = {"enabled": True, "curriculum_learning": learning}
    return {
        "train_batch_size": 8,
        "data_efficiency": {"enabled": True, "seed": 7, "data_sampling": sampling},
    }


@pytest.mark.parametrize("name", CLUSTERS["cases"])
def test_pools_are_the_recorded_ones(name, tmp_path):
    case = CLUSTERS["cases"][name]
    metrics = copy.deepcopy(case["metrics"])
    for metric, block in metrics.items():
        values = CLUSTERS[f"metric_{metric}"]
        paths = write_metric(tmp_path, metric, values)
        block["index_to_sample_path"], block["index_to_metric_path"] = paths
    path = tmp_path / "ds config.json"
    path.write_text(json.dumps(configuration(metrics)))
    found = curriculum.read_deepspeed_config(path)
    index = curriculum.import_deepspeed_index(found.index_paths, tmp_path / "index")
    order = curriculum.SampleOrder(index, found.criteria, batch_size=8, seed=found.seed)
    pool: set[int] = set()
    for row in case["steps"]:
        step = row["step"] - 1  # the original counts from 1
        assert order.difficulties(step) == row["difficulties"]
        for cluster in row["new_cluster"] or []:
            pool |= set(cluster)
        assert order.num_eligible(step) == len(pool)
        assert set(order._order[: len(pool)].tolist()) == pool
        assert set(order[step].tolist()) <= pool


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_the_recorded_ones(name):
    case = SCHEDULES[name]
    block = {**case["config"], "clustering_type": "single_cluster"}
    found = curriculum.read_deepspeed_config(configuration({"seqlen": block}))
    assert not found.criteria and not found.index_paths
    pacing = found.schedules["seqlen"]
    for step, want in zip(case["steps"], case["get_difficulty"], strict=True):
        assert pacing(step) == want


METRIC = {
    "index_to_sample_path": "s",
    "index_to_metric_path": "m",
    "difficulty_type": "percentile",
    "clustering_type": "schedule_based",
    "min_difficulty": 1,
    "max_difficulty": 10,
    "schedule_type": "fixed_discrete",
    "schedule_config": {"difficulty": [2, 10, 4], "max_step": [3, 6]},
}


def test_a_discrete_schedule_stays_at_the_maximum():
    found = curriculum.read_deepspeed_config(configuration({"voc": METRIC}))
    pacing = found.criteria["voc"].schedule
    assert [pacing(t) for t in (1, 3, 4, 6, 7, 99)] == [2, 2, 10, 10, 10, 10]


def test_percentiles_are_in_units_of_the_told_maximum():
    block = {**METRIC, "schedule_config": {"difficulty": [2, 5], "max_step": [3]}}
    found = curriculum.read_deepspeed_config(configuration({"voc": block}))
    criterion = found.criteria["voc"]
    samples = np.arange(103)
    counts = [criterion.count(criterion.schedule(t), samples, samples) for t in (1, 4)]
    assert counts == [2 * (103 // 10), 5 * (103 // 10)]


def test_all_other_keys_are_translated():
    config = configuration({"voc": METRIC}, data_cluster_path="some clusters")
    sampling = config["data_efficiency"]["data_sampling"]
    sampling |= {"num_epochs": 3, "num_workers": 2, "pin_memory": False}
    sampling["dynamic_batching"] = {"enabled": False, "max_tokens": 100}
    config["data_efficiency"]["data_routing"] = {"enabled": False, "random_ltd": {}}
    found = curriculum.read_deepspeed_config(config)
    assert (found.seed, found.num_epochs, found.num_workers) == (7, 3, 2)
    assert found.plan_directory == "some clusters"
    assert found.index_paths == {"voc": ("s", "m")}
    assert found.criteria["voc"].difficulty_type == "deepspeed_percentile"


def test_defaults_are_those_of_the_original():
    config = configuration({"voc": METRIC})
    del config["data_efficiency"]["seed"]
    found = curriculum.read_deepspeed_config(config)
    assert (found.seed, found.num_epochs, found.num_workers) == (1234, 1000, 0)
    assert found.plan_directory is None


def test_a_function_of_the_users_is_a_custom_schedule():
    block = {k: v for k, v in METRIC.items() if k != "schedule_config"}
    block["schedule_type"] = "custom"
    config = configuration({"voc": block})
    functions = {"voc": lambda step: 2 * step}
    found = curriculum.read_deepspeed_config(config, custom_schedules=functions)
    assert [found.criteria["voc"].schedule(t) for t in (1, 4, 9)] == [2, 8, 10]
    with pytest.raises(ValueError, match=r"custom_schedules\['voc'\]"):
        curriculum.read_deepspeed_config(config)
    with pytest.raises(ValueError, match="of no metric with schedule_type custom"):
        curriculum.read_deepspeed_config(
            configuration({"voc": METRIC}), custom_schedules=functions
        )


EFFICIENCY = ("data_efficiency",)
SAMPLING = (*EFFICIENCY, "data_sampling")
LEARNING = (*SAMPLING, "curriculum_learning")
VOC = (*LEARNING, "curriculum_metrics", "voc")


@pytest.mark.parametrize(
    ("where", "value", "says"),
    [
        ((*EFFICIENCY, "enabled"), False, "data_efficiency.enabled must be true"),
        ((*EFFICIENCY, "seeed"), 1, "data_efficiency.seeed is no key"),
        ((*EFFICIENCY, "seed"), True, "seed=True must be of type int"),
        ((*EFFICIENCY, "data_routing"), {"enabled": True}, "data_routing is no curric"),
        ((*SAMPLING, "pin_memory"), True, "pin_memory has no counterpart"),
        (
            (*SAMPLING, "dynamic_batching"),
            {"enabled": True},
            "is not combined",
        ),
        ((*SAMPLING, "enabled"), "yes", "enabled='yes' must be of type bool"),
        (LEARNING, 3, "curriculum_learning=3 must be an object"),
        ((*LEARNING, "curriculum_metrics"), {}, "at least one metric"),
        ((*LEARNING, "cluster_path"), "x", "cluster_path is no key"),
        ((*VOC, "difficulty_type"), "values", "must be one of value, percentile"),
        ((*VOC, "clustering_type"), None, "voc.clustering_type=None must be one of"),
        ((*VOC, "schedule_type"), "linear", "must be one of fixed_linear"),
        ((*VOC, "metric_path"), "x", "voc.metric_path is no key"),
        ((*VOC, "index_to_sample_path"), 3, "must be of type str"),
        ((*VOC, "schedule_config"), {}, "schedule_config.difficulty is missing"),
        ((*VOC, "schedule_config", "step"), 1, "schedule_config.step is no key"),
        ((*VOC, "schedule_config", "max_step"), [3], "makes no schedule"),
        ((*VOC, "schedule_config", "difficulty"), 3, "makes no schedule"),
        ((*VOC, "max_difficulty"), "high", "makes no schedule"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(where, value, says):
    config = configuration({"voc": copy.deepcopy(METRIC)})
    block = config
    for key in where[:-1]:
        block = block[key]
    block[where[-1]] = value
    with pytest.raises(ValueError) as error:
        curriculum.read_deepspeed_config(config)
    assert says in str(error.value)


@pytest.mark.parametrize("key", METRIC)
def test_every_key_of_a_metric_is_needed(key):
    block = {k: v for k, v in METRIC.items() if k != key}
    with pytest.raises(ValueError, match=rf"voc\.{key}\S* is missing"):
        curriculum.read_deepspeed_config(configuration({"voc": block}))


def test_all_problems_come_in_one_message():
    block = {**METRIC, "difficulty_type": "x", "colour": 1}
    config = configuration({"voc": block}, speed=2)
    with pytest.raises(ValueError, match=r"3 problems: .*colour.*speed"):
        curriculum.read_deepspeed_config(config)


def test_what_is_no_configuration_is_told(tmp_path):
    with pytest.raises(ValueError, match="no data_efficiency; it has: zero"):
        curriculum.read_deepspeed_config({"zero": 1})
    path = tmp_path / "broken.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"broken\.json is no JSON file"):
        curriculum.read_deepspeed_config(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="holds a list"):
        curriculum.read_deepspeed_config(path)


def damaged(tmp_path, change):
    """The message for files of three samples that ``change`` has damaged."""
    pair = write_metric(tmp_path, "m", [5, 5, 8])
    change(*map(pathlib.Path, pair))
    with pytest.raises(ValueError) as error:
        curriculum.import_deepspeed_index({"m": pair}, tmp_path / "index")
    assert not (tmp_path / "index").exists()
    return str(error.value)


def cut(path, suffix, count):
    path = pathlib.Path(f"{path}{suffix}")
    path.write_bytes(path.read_bytes()[:-count])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s, m: pathlib.Path(f"{m}.bin").unlink(), "does not exist"),
        (lambda s, m: cut(s, ".bin", 1), "has 23 bytes"),
        (lambda s, m: cut(s, ".idx", 8), "it is cut or damaged"),
        (lambda s, m: cut(s, ".idx", 60), "is no index of DeepSpeed's analyzer"),
        (lambda s, m: write_rows(s, [[0, 1], [1]]), "holds sample 1 twice"),
        (lambda s, m: write_rows(s, [[0, 1], [3]]), "holds sample 3 among 3"),
        (lambda s, m: write_rows(s, [[0, 1, 2]]), "merged by percentiles"),
        (lambda s, m: write_rows(m, [[5, 6], [8]]), "rows of several values"),
        (lambda s, m: write_rows(s, [[], []]), "there is no sample"),
        (
            lambda s, m: write_rows(m, [[5], [2**63]], "<u8"),
            "more than int64 does",
        ),
    ],
)
def test_damaged_and_foreign_files_are_named(tmp_path, change, says):
    assert says in damaged(tmp_path, change)


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [(9, 2, "version 2"), (17, 9, "type 9"), (18, 3, "3 rows"), (42, 1, "end to end")],
)
def test_headers_that_lie_are_refused(tmp_path, place, value, says):
    def change(sample_path, _):
        path = pathlib.Path(f"{sample_path}.idx")
        content = bytearray(path.read_bytes())
        content[place] = value
        path.write_bytes(content)

    assert says in damaged(tmp_path, change)


def test_metrics_of_different_data_are_refused(tmp_path):
    paths = {
        "a": write_metric(tmp_path, "a", [1, 2]),
        "b": write_metric(tmp_path, "b", [1, 2, 3]),
    }
    with pytest.raises(ValueError, match="different numbers of samples"):
        curriculum.import_deepspeed_index(paths, tmp_path / "index")
    with pytest.raises(ValueError, match="at least one"):
        curriculum.import_deepspeed_index({}, tmp_path / "index")


def test_another_import_into_a_directory_is_refused_unless_it_replaces(tmp_path):
    first = {"m": write_metric(tmp_path, "m", [1, 2])}
    index = curriculum.import_deepspeed_index(first, tmp_path / "index")
    again = curriculum.import_deepspeed_index(first, tmp_path / "index")
    assert again.fingerprint == index.fingerprint
    other = {"m": write_metric(tmp_path, "m", [2, 1])}
    with pytest.raises(ValueError, match="another source"):
        curriculum.import_deepspeed_index(other, tmp_path / "index")
    new = curriculum.import_deepspeed_index(other, tmp_path / "index", overwrite=True)
    assert new.values("m").tolist() == [2, 1]


def test_rows_are_read_as_they_were_written(tmp_path):
    write_rows(tmp_path / "x", [[3, 1], [], [2]], "<i4")
    flat, sizes = _deepspeed_index.read_rows(tmp_path / "x")
    assert flat.tolist() == [3, 1, 2] and sizes.tolist() == [2, 0, 1]
