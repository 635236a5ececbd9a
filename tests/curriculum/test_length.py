"""Shorter rows: nothing is lost, invented or told twice, and the losses agree."""

import functools
import pickle

import numpy as np
import pytest
from flax import nnx

from dataeff_jax import curriculum, data, models, schedules

MODES = ("truncate", "reshape", "segment")
LINEAR = schedules.fixed_linear_schedule


def stream(seed, size):
    return np.random.default_rng(seed).integers(1, 50, size)


def packed_batch(length=24, batch_size=3, segments="document"):
    texts = [stream(i, n) for i, n in enumerate((7, 30, 1, 12, 0, 25, 5, 9))]
    documents = data.TokenDocuments(texts, end_of_text=0)
    rows = data.PackedRows(
        documents, length=length, segments=segments, keep_remainder=True
    )
    return data.batches(rows, batch_size=batch_size, seed=0)[0]


def labelled_fields():
    tokens = np.arange(20).reshape(2, 10)
    fields = {"tokens": tokens, "labels": tokens + 1, "attention_mask": tokens * 0 + 1}
    bias = np.arange(200).reshape(2, 1, 10, 10)
    return fields, {**fields, "bias": bias, "weight": np.ones(2)}


def test_all_sequence_fields_are_cut_and_no_other():
    _, batch = labelled_fields()
    short = curriculum.truncate(batch, length=7)
    shapes = {name: array.shape for name, array in short.items()}
    assert shapes == {
        "tokens": (2, 7),
        "labels": (2, 7),
        "attention_mask": (2, 7),
        "bias": (2, 1, 7, 7),
        "weight": (2,),
    }
    # Labels are still one ahead.
    np.testing.assert_array_equal(short["labels"][:, :-1], short["tokens"][:, 1:])
    np.testing.assert_array_equal(short["bias"], batch["bias"][:, :, :7, :7])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [10, 16])
def test_a_length_of_the_row_or_more_changes_nothing(mode, length):
    _, batch = labelled_fields()
    assert getattr(curriculum, mode)(batch, length=length) is batch


def test_reshape_loses_no_token_or_the_declared_rest():
    batch, _ = labelled_fields()
    halves = curriculum.reshape(batch, length=5)
    assert {array.shape for array in halves.values()} == {(4, 5)}
    np.testing.assert_array_equal(halves["tokens"].reshape(2, 10), batch["tokens"])
    short = curriculum.reshape(batch, length=7)
    assert {array.shape for array in short.values()} == {(2, 7)}
    assert short["tokens"].size == 14
    lengths = curriculum.LengthCurriculum(lambda _: 7, mode="reshape", num_steps=1)
    assert lengths.shorten(batch, step=0)["length"].tolist() == [7, 7]


@pytest.mark.parametrize("length", range(1, 25))
def test_pieces_hold_the_multiset_of_tokens_but_the_rest(length):
    batch = packed_batch()
    short = curriculum.reshape(batch, length=length)
    used = 24 // length * length
    for name in ("tokens", "targets", "weights"):
        np.testing.assert_array_equal(
            short[name].reshape(3, -1), batch[name][:, :used], err_msg=name
        )
    inside = short["segment_ids"][:, 1:] == short["segment_ids"][:, :-1]
    inside &= short["segment_ids"][:, 1:] > 0
    # Targets are the next tokens, positions count within each segment from 0 on.
    follows = short["targets"][:, :-1] == short["tokens"][:, 1:]
    assert follows[inside].all()
    steps = np.diff(short["positions"], axis=1)
    assert (steps[inside] == 1).all()
    assert (short["positions"][:, 1:][~inside] == 0).all()
    assert (short["positions"][:, 0] == 0).all()
    # Segments of a piece are 1, 2, ...; padding is 0.
    for ids in short["segment_ids"]:
        assert set(ids) - {0} == set(range(1, ids.max() + 1))
    np.testing.assert_array_equal(short["segment_ids"] > 0, short["weights"] > 0)
    np.testing.assert_array_equal(
        short["sample_id"], np.repeat(batch["sample_id"], 24 // length)
    )


@pytest.mark.parametrize("length", [1, 5, 8, 12, 23])
@pytest.mark.parametrize("segments", ["document", "row"])
def test_segment_tells_the_pieces_of_reshape(length, segments):
    batch = packed_batch(segments=segments)
    masked = curriculum.segment(batch, length=length)
    short = curriculum.reshape(batch, length=length)
    count = 24 // length
    np.testing.assert_array_equal(masked["tokens"], batch["tokens"])
    ids = masked["segment_ids"][:, : count * length].reshape(-1, length)
    want = short.get("segment_ids", np.ones_like(ids))
    # The same partition of each piece, and no segment goes on into the next piece.
    first = np.where(ids > 0, ids - np.maximum(ids[:, :1], 1) + 1, 0)
    np.testing.assert_array_equal(first, want)
    for row in masked["segment_ids"]:
        filled = row[row > 0]
        assert set(filled) == set(range(1, filled.max() + 1))
        assert (np.diff(filled) >= 0).all()
    np.testing.assert_array_equal(masked["weights"][:, count * length :], 0)
    assert masked["weights"].sum() == short["weights"].sum()


@pytest.mark.parametrize(
    ("positions", "segments", "length"),
    [("learned", "document", 10), ("rope", "document", 8), ("rope", "row", 10)],
)
def test_reshape_and_segment_give_the_same_loss(positions, segments, length):
    batch = packed_batch(segments=segments)
    batch.pop("sample_id")
    model = models.GPT(
        vocab_size=50,
        max_length=24,
        num_layers=1,
        width=16,
        num_heads=2,
        positions=positions,
        rngs=nnx.Rngs(0),
    )
    loss = nnx.jit(lambda model, batch: model.loss(batch))
    (total, weight), (masked_total, masked_weight) = (
        loss(model, change(batch, length=length))
        for change in (curriculum.reshape, curriculum.segment)
    )
    assert weight == masked_weight
    # Float32 sums in another order: the bound of the claim.
    np.testing.assert_allclose(total / weight, masked_total / weight, rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "kwargs", "message"),
    [
        ({"labels": np.zeros((2, 4))}, {}, "no field 'tokens'.*it has: labels"),
        ({"tokens": np.zeros((2, 4))}, {"length": 0}, "at least 1"),
        ({"tokens": np.zeros(4)}, {}, r"must be \[B, S"),
        ({"tokens": np.zeros((2, 4, 4))}, {}, "several axes of 4"),
        ({"tokens": np.zeros((2, 4))}, {"axes": {"tokens": (2,)}}, "do not all have 4"),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_a_batch_that_cannot_be_cut_is_told(mode, fields, kwargs, message):
    with pytest.raises(ValueError, match=message):
        getattr(curriculum, mode)(fields, **{"length": 3, **kwargs})


def test_axes_that_are_not_clear_may_be_told():
    batch = {"tokens": np.zeros((2, 4)), "mask": np.arange(32).reshape(2, 4, 4)}
    short = curriculum.truncate(batch, length=3, axes={"mask": (1,), "tokens": (1,)})
    assert short["mask"].shape == (2, 3, 4)
    blocks = curriculum.reshape(batch, length=2, axes={"mask": (1, 2)})["mask"]
    np.testing.assert_array_equal(blocks[1], batch["mask"][0, 2:, 2:])
    alone = curriculum.truncate(batch, length=3, axes={"mask": ()})
    assert alone["mask"] is batch["mask"]


def test_lengths_of_all_steps_are_those_of_the_schedule():
    pacing = LINEAR(80, max_difficulty=500, total=300, difficulty_step=8)
    lengths = curriculum.LengthCurriculum(pacing)
    steps = range(400)
    assert [lengths.length_at(t) for t in steps] == [pacing(t + 1) for t in steps]
    assert lengths.lengths == tuple(sorted({pacing(t + 1) for t in steps}))


@pytest.mark.parametrize("step_offset", [0, 1])
@pytest.mark.parametrize(
    "schedule",
    [
        LINEAR(64, max_difficulty=512, total=90),
        schedules.cyclic_schedule(64, max_difficulty=512, total=90, num_cycles=3),
        schedules.fixed_discrete_schedule([64, 512, 100], boundaries=[20, 50]),
    ],
)
def test_lengths_snap_down_to_few_shapes(schedule, step_offset):
    buckets = schedules.length_buckets(64, max_length=512, multiple=64, max_count=4)
    lengths = curriculum.LengthCurriculum(
        schedule, buckets=buckets, step_offset=step_offset
    )
    snapped = schedules.bucketed_schedule(schedule, buckets=buckets)
    found = [lengths.length_at(t) for t in range(120)]
    assert found == [snapped(t + step_offset) for t in range(120)]
    # Told beforehand, in the order in which they come.
    assert lengths.lengths == tuple(dict.fromkeys(found))
    assert len(lengths.lengths) <= 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: curriculum.LengthCurriculum(lambda t: 8), "pass num_steps"),
        (
            lambda: curriculum.LengthCurriculum(lambda t: 8 - t, num_steps=9),
            "gives 0 at step 7",
        ),
        (
            lambda: curriculum.LengthCurriculum(lambda t: 8.5, num_steps=9),
            "whole number",
        ),
        (
            lambda: curriculum.LengthCurriculum(lambda t: 8, num_steps=1, mode="cut"),
            "truncate, reshape, segment",
        ),
        (
            lambda: curriculum.LengthCurriculum(
                lambda t: 8, num_steps=1, buckets=(8, 4)
            ),
            "must rise",
        ),
        (
            lambda: curriculum.LengthCurriculum(lambda t: 8, num_steps=1, buckets=()),
            "integers from 1",
        ),
        (lambda: curriculum.DocumentRows([], length=0), "at least 1"),
    ],
)
def test_what_makes_no_lengths_is_told_when_built(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("mode", MODES)
def test_batches_have_the_length_of_their_step_wherever_one_starts(mode):
    texts = [stream(i, 40) for i in range(20)]
    documents = data.TokenDocuments(texts, end_of_text=0)
    rows = data.PackedRows(documents, length=16)
    pacing = LINEAR(2, max_difficulty=16, total=30)
    lengths = curriculum.LengthCurriculum(pacing, mode=mode, buckets=(2, 4, 8, 16))
    lengths = pickle.loads(pickle.dumps(lengths))
    steps = lengths.batches(data.batches(rows, batch_size=4, seed=1))
    reader = data.prefetch(steps, start_step=5, buffer_size=16)
    for step, batch in zip(range(5, 40), reader, strict=False):
        length = lengths.length_at(step)
        assert set(batch["length"].tolist()) == {length}
        shape = {
            "truncate": (4, length),
            "reshape": (4 * (16 // length), length),
            "segment": (4, 16),
        }[mode]
        assert batch["tokens"].shape == shape
        np.testing.assert_array_equal(batch["tokens"], steps[step]["tokens"])
    reader.close()


@pytest.mark.parametrize("mode", MODES)
def test_processes_hold_the_rows_of_the_whole_batch(mode):
    rows = data.MemorySource({"tokens": stream(0, (12, 10))})
    pacing = LINEAR(3, max_difficulty=10, total=6)
    lengths = curriculum.LengthCurriculum(pacing, mode=mode)
    whole = lengths.batches(data.batches(rows, batch_size=4, seed=0))
    parts = [
        lengths.batches(
            data.batches(rows, batch_size=4, seed=0, process_index=p, process_count=2)
        )
        for p in range(2)
    ]
    for step in range(8):
        for name, array in whole[step].items():
            local = np.concatenate([part[step][name] for part in parts])
            np.testing.assert_array_equal(local, array, err_msg=name)


@pytest.fixture
def ordered(tmp_path):
    """Documents of many lengths, sampled from short to long."""
    texts = [stream(i, 1 + i % 30) for i in range(90)]
    rows = curriculum.DocumentRows(data.TokenDocuments(texts, end_of_text=0), length=32)
    metric = curriculum.sequence_length(mask_field="segment_ids")
    index = curriculum.analyze(rows, [metric], tmp_path / "index")
    pacing = LINEAR(4, max_difficulty=32, total=20)
    criteria = {metric.name: curriculum.Criterion(pacing, "value")}
    order = curriculum.SampleOrder(index, criteria, batch_size=6, seed=0)
    return rows, order, index.values(metric.name)


def test_trimming_takes_padding_only(ordered):
    rows, order, row_lengths = ordered
    trimming = curriculum.Trimming(order, row_lengths, buckets=(8, 16, 24, 32))
    full = curriculum.batches(rows, order)
    short = trimming.batches(full)
    seen = set()
    for step in range(30):
        longest = row_lengths[order[step]].max()
        width = short[step]["tokens"].shape[1]
        seen.add(width)
        assert longest <= width < longest + 8 and width % 8 == 0
        assert width == trimming.length_at(step) == short[step]["length"][0]
        assert short[step]["weights"].sum() == full[step]["weights"].sum()
    assert seen <= set(trimming.lengths)
    assert min(seen) == 8 and max(seen) >= 24


def test_trimming_changes_no_masked_token_and_no_loss(ordered):
    rows, order, row_lengths = ordered
    trimming = curriculum.Trimming(order, row_lengths, buckets=(16, 32))
    hide = functools.partial(
        data.mask_tokens,
        seed=0,
        mask_token=50,
        vocab_size=51,
        special_tokens=(0,),
        mask_rate=0.3,
    )
    full = curriculum.batches(rows, order, transform=hide)[3]
    short = trimming.batches(curriculum.batches(rows, order, transform=hide))[3]
    assert short["tokens"].shape == (6, 16) and full["tokens"].shape == (6, 32)
    model = models.BERT(
        vocab_size=51,
        max_length=32,
        num_layers=1,
        width=16,
        num_heads=2,
        rngs=nnx.Rngs(0),
    )
    fields = ("tokens", "targets", "segment_ids", "positions", "weights")
    loss = nnx.jit(lambda model, batch: model.loss(batch))
    (total, weight), (short_total, short_weight) = (
        loss(model, {name: batch[name] for name in fields}) for batch in (full, short)
    )
    assert weight == short_weight > 0
    # Float32 sums in another order.
    np.testing.assert_allclose(total / weight, short_total / weight, rtol=1e-5)


def test_all_processes_trim_alike(ordered):
    rows, order, row_lengths = ordered
    trimming = curriculum.Trimming(order, row_lengths, buckets=(8, 16, 32))
    parts = [
        trimming.batches(
            curriculum.batches(rows, order, process_index=p, process_count=3)
        )
        for p in range(3)
    ]
    for step in range(0, 30, 7):
        shapes = {part[step]["tokens"].shape for part in parts}
        assert shapes == {(2, trimming.length_at(step))}


def test_rows_that_no_bucket_holds_are_refused(ordered):
    _, order, row_lengths = ordered
    with pytest.raises(ValueError, match="longest row has 31"):
        curriculum.Trimming(order, row_lengths, buckets=(8, 16))
    with pytest.raises(ValueError, match="89 row_lengths for 90"):
        curriculum.Trimming(order, row_lengths[:-1], buckets=(32,))


def test_a_product_of_difficulty_and_length(ordered):
    rows, order, _ = ordered
    pacing = LINEAR(8, max_difficulty=32, total=10, difficulty_step=8)
    lengths = curriculum.LengthCurriculum(pacing)
    steps = lengths.batches(curriculum.batches(rows, order))
    for step in (0, 4, 9, 20):
        batch = steps[step]
        assert batch["tokens"].shape == (6, pacing(step + 1))
        assert (batch["step"] == step).all()
        assert (batch["difficulty_sequence_length"] <= 32).all()
        np.testing.assert_array_equal(batch["sample_id"], order[step])


def test_document_rows_predict_every_token_once():
    texts = [[1, 2, 3], [], [4] * 9]
    rows = curriculum.DocumentRows(data.TokenDocuments(texts, end_of_text=0), length=5)
    for index, text in enumerate(texts):
        row = rows[index]
        used = row["weights"] == 1
        assert row["targets"][used].tolist() == [*text, 0][:5]
        assert row["tokens"][used].tolist() == [0, *text][:5]
        np.testing.assert_array_equal(row["segment_ids"], used)
    with pytest.raises(IndexError):
        rows[3]
