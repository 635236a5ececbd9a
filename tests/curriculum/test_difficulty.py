import functools

import numpy as np
import pytest

from dataeff_jax import curriculum, data
from dataeff_jax.curriculum import _difficulty

RNG = np.random.default_rng(3)
VOCAB = 50
ROWS = [RNG.integers(0, VOCAB - 5, RNG.integers(0, 9)) for _ in range(40)]
DENSE = RNG.integers(0, VOCAB, (40, 7)).astype(np.uint16)


def computed(metric, source, batch=7):
    """The two passes, as the analysis makes them."""
    pieces = [
        curriculum.Records(source, i, min(i + batch, len(source)))
        for i in range(0, len(source), batch)
    ]
    total = sum(metric.accumulate(p) for p in pieces) if metric.counts else None
    prepared = metric.prepare(total)
    return np.concatenate([metric.values(p, prepared) for p in pieces]), total


def rarity_by_brute_force(rows):
    counts = np.zeros(VOCAB)
    for row in rows:
        for token in row:
            counts[token] += 1
    counts[counts == 0] = 1
    p = counts / counts.sum()
    return [int(np.floor(-np.sum(np.log(p[np.asarray(row, int)])))) for row in rows]


@pytest.mark.parametrize("batch", [1, 3, 11, 40])
@pytest.mark.parametrize("rows", [ROWS, DENSE], ids=["ragged", "dense"])
def test_rarity_and_length_equal_brute_force_for_every_batch(batch, rows):
    rarity = curriculum.vocabulary_rarity(vocab_size=VOCAB)
    values, total = computed(rarity, rows, batch)
    assert values.tolist() == rarity_by_brute_force(rows)
    assert total.sum() == sum(map(len, rows))
    lengths, _ = computed(curriculum.sequence_length(), rows, batch)
    assert lengths.tolist() == [len(row) for row in rows]


class Columns:
    """Rows that are read many at once."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        raise AssertionError("single records are not read")

    def read_range(self, start, stop):
        return {"tokens": self.rows[start:stop]}


def test_dicts_tuples_arrays_columns_and_caches_agree(tmp_path):
    texts = ["some text", "x", "", "aaaa", "zebra"]
    tokenizer = data.ByteTokenizer()
    cache = data.tokenize(data.MemorySource(texts), tokenizer, tmp_path / "cache")
    rows = [np.asarray(cache[i]) for i in range(len(texts))]
    metric = functools.partial(curriculum.vocabulary_rarity, vocab_size=257)
    want = computed(metric(), rows)[0].tolist()
    assert computed(metric(), cache, 2)[0].tolist() == want
    assert computed(metric(), [{"tokens": r, "x": 1} for r in rows])[0].tolist() == want
    pairs = [(7, row.tolist()) for row in rows]
    assert computed(metric(field=1), pairs)[0].tolist() == want
    dense = computed(curriculum.vocabulary_rarity(vocab_size=VOCAB), DENSE)[0]
    columns = computed(curriculum.vocabulary_rarity(vocab_size=VOCAB), Columns(DENSE))
    assert dense.tolist() == columns[0].tolist()


@pytest.mark.parametrize("way", ["padding", "mask"])
def test_padding_is_neither_counted_nor_rare(way):
    width = max(map(len, ROWS))
    padding = VOCAB - 1
    records = [
        {
            "tokens": np.pad(row, (0, width - len(row)), constant_values=padding),
            "segment_ids": np.arange(width) < len(row),
        }
        for row in ROWS
    ]
    told = {"padding": padding} if way == "padding" else {"mask_field": "segment_ids"}
    rarity = curriculum.vocabulary_rarity(vocab_size=VOCAB, **told)
    values, total = computed(rarity, records)
    assert values.tolist() == rarity_by_brute_force(ROWS)
    assert total.sum() == sum(map(len, ROWS))
    lengths, _ = computed(curriculum.sequence_length(**told), records)
    assert lengths.tolist() == [len(row) for row in ROWS]


def test_a_product_orders_by_the_first_and_then_by_the_second():
    length = curriculum.sequence_length()
    rarity = curriculum.vocabulary_rarity(vocab_size=VOCAB)
    product = curriculum.Lexicographic(length, rarity, bound=1000)
    records = curriculum.Records(ROWS, 0, len(ROWS))
    table = rarity.prepare(rarity.accumulate(records))
    values = product.values(records, [None, table])
    first, second = length.values(records, None), rarity.values(records, table)
    np.testing.assert_array_equal(
        np.argsort(values, kind="stable"), np.lexsort((second, first))
    )
    assert values.tolist() == (1000 * first + second).tolist()
    small = curriculum.Lexicographic(length, rarity, bound=int(second.max()))
    with pytest.raises(ValueError, match=rf"Sample {int(second.argmax())} has .*bound"):
        small.values(records, [None, table])


def test_counts_are_of_64_bits():
    metric = curriculum.function_metric(
        lambda record, total: total[0],
        name="total",
        dtype="int64",
        accumulate=lambda record: np.array([record], np.int32),
    )
    values, total = computed(metric, [2_147_483_640, *[1] * 77], 1)
    assert total.tolist() == [2_147_483_717]
    assert set(values.tolist()) == {2_147_483_717}


def test_the_fingerprint_follows_settings_and_code_but_not_the_object():
    def make(**kw):
        return curriculum.vocabulary_rarity(vocab_size=VOCAB, **kw).fingerprint

    def length(record):
        return len(record)

    def named(function, version=""):
        return curriculum.function_metric(
            function, name="f", version=version
        ).fingerprint

    assert make() == make()
    product = functools.partial(
        curriculum.Lexicographic,
        curriculum.sequence_length(),
        curriculum.vocabulary_rarity(vocab_size=3),
    )
    different = [
        make(),
        make(field="other"),
        make(padding=0),
        curriculum.sequence_length().fingerprint,
        product(bound=5).fingerprint,
        product(bound=6).fingerprint,
        named(length),
        named(len),
        named(length, version="2"),
        named(functools.partial(length, 1)),
        named(functools.partial(length, 2)),
        named(_difficulty._SequenceLength("tokens", None, None).values),
    ]
    assert len(set(different)) == len(different)
    assert product(bound=5).fingerprint == product(bound=5).fingerprint
    assert named(functools.partial(length, 1)) == named(functools.partial(length, 1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: curriculum.sequence_length(mask_field="m", padding=0),
            "both tell the padding",
        ),
        (lambda: curriculum.vocabulary_rarity(vocab_size=0), "vocab_size=0"),
        (lambda: curriculum.function_metric(3, name="f"), "function=3"),
        (lambda: curriculum.function_metric(len, name="a b"), "name='a b'"),
        (lambda: curriculum.function_metric(len, name="f", dtype="U5"), "dtype='U5'"),
        (
            lambda: curriculum.Lexicographic(
                curriculum.sequence_length(),
                curriculum.function_metric(len, name="f"),
                bound=3,
            ),
            "f has float32 values",
        ),
        (
            lambda: curriculum.Lexicographic(
                curriculum.sequence_length(), curriculum.sequence_length(), bound=0
            ),
            "bound=0",
        ),
    ],
)
def test_bad_arguments_are_told_when_built(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("source", "metric", "message"),
    [
        ([[1], [2, VOCAB]], curriculum.vocabulary_rarity(vocab_size=VOCAB), "Sample 1"),
        ([[1], [-1]], curriculum.vocabulary_rarity(vocab_size=VOCAB), "token -1"),
        ([{"text": 1}], curriculum.sequence_length(), "its fields are: text"),
        ([(1, 2)], curriculum.sequence_length(field=2), "tuple of 2: field=2"),
        (
            [{"a": [1, 2], "m": [1]}],
            curriculum.sequence_length(field="a", mask_field="m"),
            "Sample 0: 'a' and 'm' differ",
        ),
    ],
)
def test_records_that_do_not_fit_are_named(source, metric, message):
    with pytest.raises(ValueError, match=message):
        computed(metric, source)


@pytest.mark.parametrize("function", [int, str.count, len, float.fromhex])
def test_built_in_classes_and_methods_are_functions_too(function):
    def fingerprint(of):
        return curriculum.function_metric(of, name="f", dtype="int64").fingerprint

    assert fingerprint(function) == fingerprint(function) != fingerprint(abs)


def test_a_class_may_be_the_function():
    metric = curriculum.function_metric(int, name="f", dtype="int64")
    values, _ = computed(metric, ["3", "14"])
    assert values.tolist() == [3, 14]
