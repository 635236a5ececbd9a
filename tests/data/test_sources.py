"""Every source gives records by position, pickles, and names what is wrong."""

import json
import pickle
import sys
import threading

import numpy as np
import pytest
from array_record.python import array_record_module

from dataeff_jax import data

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
datasets = pytest.importorskip("datasets")

TEXTS = ["first", "second line\nand more", "Ünïcödé 🙂 漢字", "the last"]


def write_text(folder):
    (folder / "all.txt").write_text("\n\n".join(TEXTS) + "\n", encoding="utf-8")
    return data.TextSource(folder / "all.txt", delimiter="blank_line")


def write_text_files(folder):
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    return data.TextSource(folder)


def write_jsonl(folder):
    lines = [json.dumps({"text": text, "id": i}) for i, text in enumerate(TEXTS)]
    (folder / "a.jsonl").write_text("\n".join(lines[:3]) + "\n\n", encoding="utf-8")
    (folder / "b.jsonl").write_text(lines[3], encoding="utf-8")  # no last newline
    return data.JsonlSource(folder)


def write_parquet(folder):
    table = pyarrow.table({"text": TEXTS, "id": range(4)})
    parquet.write_table(table, folder / "a.parquet", row_group_size=3)
    return data.ParquetSource(folder)


def write_array_record(folder):
    path = folder / "a.array_record"
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for text in TEXTS:
        writer.write(text.encode())
    writer.close()
    return data.ArrayRecordSource(path)


def write_array_record_json(folder):
    path = folder / "a.array_record"
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for text in TEXTS:
        writer.write(json.dumps({"body": text}).encode())
    writer.close()
    return data.open_source("array_record", path, field="body")


def write_hugging_face(folder):
    splits = datasets.DatasetDict(train=datasets.Dataset.from_dict({"text": TEXTS}))
    splits.save_to_disk(folder / "saved")
    return data.HuggingFaceSource(folder / "saved", split="train")


def in_memory(folder):
    return data.MemorySource(TEXTS)


SOURCES = [
    write_text,
    write_text_files,
    write_jsonl,
    write_parquet,
    write_array_record,
    write_array_record_json,
    write_hugging_face,
    in_memory,
]


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "my data" / "run 1"
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("write", SOURCES)
def test_source_gives_the_texts_by_position(write, folder):
    source = write(folder)
    assert len(source) == len(TEXTS)
    order = [3, 0, 2, 1, 2]
    assert [source[i]["text"] for i in order] == [TEXTS[i] for i in order]


@pytest.mark.parametrize("write", SOURCES)
@pytest.mark.parametrize("index", [-1, 4])
def test_position_outside_the_source_is_an_index_error(write, index, folder):
    with pytest.raises(IndexError, match=f"index={index} is outside"):
        write(folder)[index]


@pytest.mark.parametrize("write", SOURCES)
def test_source_pickles_after_use(write, folder):
    source = write(folder)
    source[0]
    again = pickle.loads(pickle.dumps(source))
    assert [again[i]["text"] for i in range(4)] == TEXTS


@pytest.mark.parametrize("write", SOURCES)
def test_source_feeds_a_grain_dataset(write, folder):
    grain = pytest.importorskip("grain")
    dataset = grain.MapDataset.source(write(folder)).map(lambda record: record["text"])
    assert [dataset[i] for i in range(4)] == TEXTS


@pytest.mark.parametrize("write", SOURCES)
def test_source_may_be_read_by_several_threads(write, folder):
    source, wrong = write(folder), []

    def read():
        for i in range(80):
            if source[i % 4]["text"] != TEXTS[i % 4]:
                wrong.append(i)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


FILE_SOURCES = [s for s in SOURCES if s is not in_memory]


@pytest.mark.parametrize("write", FILE_SOURCES)
def test_fingerprint_follows_the_content(write, tmp_path, monkeypatch):
    one, two, other = (tmp_path / name for name in ("one", "two", "other"))
    for place in (one, two, other):
        place.mkdir()
    fingerprint = write(one).fingerprint
    assert write(two).fingerprint == fingerprint
    same_size = [*TEXTS[:3], "the end!"]
    monkeypatch.setitem(globals(), "TEXTS", same_size)
    assert write(other).fingerprint != fingerprint


def test_fingerprint_follows_how_the_files_are_read(folder):
    (folder / "a.txt").write_text("one\n\ntwo")
    a = data.TextSource(folder, delimiter="blank_line")
    assert a.fingerprint != data.TextSource(folder).fingerprint


@pytest.mark.parametrize(
    "text", ["a\r\n\r\nb\r\n", "\n\n a\n \t\n\n\nb", "a\n\nb\n\n \n"]
)
def test_blank_lines_of_any_kind_stand_between_documents(text, folder):
    (folder / "a.txt").write_bytes(text.encode())
    source = data.TextSource(folder, delimiter="blank_line")
    assert [source[i]["text"].strip() for i in range(len(source))] == ["a", "b"]


def test_any_text_may_stand_between_documents(folder):
    (folder / "a.txt").write_text("one.(*)two(*)\n(*)three")
    source = data.TextSource(folder, delimiter="(*)")
    assert [source[i]["text"] for i in range(len(source))] == ["one.", "two", "three"]


def test_json_records_keep_their_other_fields(folder):
    assert write_jsonl(folder)[2] == {"text": TEXTS[2], "id": 2}


def test_arrays_give_records_of_their_rows():
    images = np.arange(12.0).reshape(3, 2, 2)
    record = data.MemorySource({"images": images, "labels": np.arange(3)})[1]
    np.testing.assert_array_equal(record["images"], images[1])
    assert record["labels"] == 1


def json_without_field(folder):
    (folder / "a.jsonl").write_text('{"body": "x", "id": 1}\n')
    data.JsonlSource(folder)


def table_without_field(folder):
    parquet.write_table(pyarrow.table({"body": ["x"], "id": [1]}), folder / "a.parquet")
    data.ParquetSource(folder)


def dataset_without_field(folder):
    rows = datasets.Dataset.from_dict({"body": ["x"], "id": [1]})
    rows.save_to_disk(folder / "saved")
    data.HuggingFaceSource(folder / "saved")


@pytest.mark.parametrize(
    "build", [json_without_field, table_without_field, dataset_without_field]
)
def test_missing_field_is_named_with_those_present(build, folder):
    with pytest.raises(ValueError, match=r"no field 'text'; its fields are: body, id"):
        build(folder)


def empty_text(folder):
    (folder / "a.txt").write_text("")
    data.TextSource(folder / "a.txt")


def blank_text(folder):
    (folder / "a.txt").write_text("\n \n\n")
    data.TextSource(folder, delimiter="blank_line")


def empty_jsonl(folder):
    (folder / "a.jsonl").write_text("")
    data.JsonlSource(folder)


def empty_parquet(folder):
    table = pyarrow.table({"text": pyarrow.array([], pyarrow.string())})
    parquet.write_table(table, folder / "a.parquet")
    data.ParquetSource(folder)


def empty_array_record(folder):
    path = folder / "a.array_record"
    array_record_module.ArrayRecordWriter(str(path), "group_size:1").close()
    data.ArrayRecordSource(path)


def empty_memory(folder):
    data.MemorySource([])


@pytest.mark.parametrize(
    "build",
    [
        empty_text,
        blank_text,
        empty_jsonl,
        empty_parquet,
        empty_array_record,
        empty_memory,
    ],
)
def test_empty_source_is_refused(build, folder):
    with pytest.raises(ValueError, match="empty"):
        build(folder)


@pytest.mark.parametrize("name", ["text", "jsonl", "parquet", "huggingface"])
def test_missing_path_is_named(name, folder):
    with pytest.raises(ValueError, match=r"run 1/nothing does not exist"):
        data.open_source(name, folder / "nothing")


def test_folder_without_a_fitting_file_is_refused(folder):
    with pytest.raises(
        ValueError, match=r"No file with ending \('.jsonl', '.ndjson'\)"
    ):
        data.JsonlSource(folder)


def test_broken_json_line_is_named_with_its_file(folder):
    (folder / "a.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    source = data.JsonlSource(folder)
    with pytest.raises(ValueError, match=r"Record 1 of .*a\.jsonl is not valid JSON"):
        source[1]


@pytest.mark.parametrize(
    ("line", "message"),
    [('["text"]', "is a list, not an object"), ('{"text": 7}', "holds int, not text")],
)
def test_json_line_without_a_text_is_refused(line, message, folder):
    (folder / "a.jsonl").write_text(line)
    with pytest.raises(ValueError, match=message):
        data.JsonlSource(folder)


def test_array_record_of_plain_texts_does_not_pass_for_json(folder):
    write_array_record(folder)
    with pytest.raises(ValueError, match="Pass field=None if records are texts"):
        data.ArrayRecordSource(folder, field="text")


@pytest.mark.parametrize(
    ("name", "file"),
    [("text", "a.txt"), ("parquet", "a.parquet"), ("array_record", "a.array_record")],
)
def test_file_of_another_kind_is_named(name, file, folder):
    (folder / file).write_bytes(b"\xff no such thing")
    with pytest.raises(ValueError, match=rf"{file} cannot be read: "):
        data.open_source(name, folder / file)[0]


def test_folder_without_a_dataset_is_named(folder):
    with pytest.raises(ValueError, match="cannot be read: "):
        data.HuggingFaceSource(folder)


def test_file_cut_after_the_scan_is_noticed(folder):
    source = write_text_files(folder)
    (folder / "1.txt").write_text("")
    with pytest.raises(ValueError, match="changed while it was read"):
        source[1]


def test_unknown_split_is_named_with_those_present(folder):
    write_hugging_face(folder)
    with pytest.raises(ValueError, match=r"has the splits \['train'\]; pass split"):
        data.HuggingFaceSource(folder / "saved")


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("parquet", "pyarrow.parquet", r"\.\[parquet\]"),
        ("huggingface", "datasets", r"\.\[huggingface\]"),
        (
            "array_record",
            "array_record.python.array_record_data_source",
            "array_record",
        ),
    ],
)
def test_missing_package_is_named_with_its_command(
    name, module, package, folder, monkeypatch
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=f"pip install '{package}'"):
        data.open_source(name, folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("csv", "file"), "No format is called 'csv'; there are"),
        (("text", ""), "needs a path; it is empty"),
    ],
)
def test_wrong_format_or_no_path_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        data.open_source(*arguments)


def test_empty_delimiter_is_refused(folder):
    with pytest.raises(ValueError, match="delimiter is empty"):
        data.TextSource(folder, delimiter="")


def test_arrays_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="differ in their first axis"):
        data.MemorySource({"images": np.zeros((3, 2)), "labels": np.zeros(2)})
