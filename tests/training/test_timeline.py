"""What a run feeds is known before its first step."""

import numpy as np
import pytest

from dataeff_jax import training


def growing(step, tokens):
    return training.Feed(4, 4, *[8 if step < 3 else 16] * 2)


def by_tokens(step, tokens):
    return training.Feed(2, 2, *[2 + tokens // 10] * 2)


def recount(feed_at, num_steps):
    """Tokens before each step, one step after another."""
    before = [0]
    for step in range(num_steps):
        before.append(before[-1] + feed_at(step, before[-1]).tokens)
    return before


@pytest.mark.parametrize("feed_at", [growing, by_tokens])
def test_tokens_before_a_step_are_those_of_a_recount(feed_at):
    timeline = training.Timeline(feed_at, num_steps=9)
    assert [timeline.tokens(step) for step in range(10)] == recount(feed_at, 9)


def test_a_run_by_tokens_ends_with_the_step_that_reaches_them():
    timeline = training.Timeline(growing, num_tokens=3 * 32 + 2 * 64 - 1)
    assert timeline.num_steps == 5
    assert timeline.tokens(4) < 3 * 32 + 2 * 64 - 1 <= timeline.tokens(5)


def test_a_step_is_found_by_its_tokens():
    timeline = training.Timeline(growing, num_steps=5)
    for tokens in range(400):
        step = timeline.step_at(tokens)
        assert timeline.tokens(step) >= tokens
        assert step == 0 or timeline.tokens(step - 1) < tokens


def test_shapes_come_in_the_order_of_their_first_use():
    timeline = training.Timeline(growing, num_steps=5)
    short, long = (4, 8, None), (4, 16, None)
    assert timeline.shapes() == [short, long]
    assert timeline.shapes(3) == [long]
    assert timeline.first_step(long) == 3
    assert timeline.last_step(short) == 2
    assert timeline.first_step(short, start=1) == 1


def test_pieces_that_the_mask_makes_keep_the_shape_and_lose_their_rest():
    feed = training.Feed(samples=2, rows=2, row_length=10, length=4)
    assert feed.tokens == 2 * 8
    assert feed.shape == (2, 10, None)


def test_counts_beyond_32_bits_are_exact():
    feed = training.Feed(2**16, 2**16, 2**12, 2**12)
    timeline = training.Timeline(lambda step, tokens: feed, num_steps=1200)
    assert timeline.tokens(1200) == 1200 * 2**28
    assert timeline.tokens(2000) == 2000 * 2**28
    assert isinstance(timeline.tokens(7), int)


def test_after_the_run_the_last_feed_holds():
    timeline = training.Timeline(growing, num_steps=5)
    assert timeline[100] == timeline[4]
    assert timeline.tokens(7) == timeline.tokens(5) + 2 * 64
    assert timeline.step_at(timeline.tokens(5) + 65) == 7


def dropping(step, tokens, layer_tokens):
    """Keeps more tokens after each 100 layer tokens: of the middle one of 3 layers."""
    kept = 2 + layer_tokens // 100
    return training.Feed(2, 2, 8, 8, kept if kept < 8 else None)


def layer_tokens_of(feed):
    return feed.rows * (2 * feed.length + (feed.num_kept or feed.length))


def test_layer_tokens_are_counted_and_end_the_run():
    timeline = training.Timeline(
        dropping, num_layer_tokens=1000, layer_tokens_of=layer_tokens_of
    )
    layer_tokens = tokens = 0
    for step in range(timeline.num_steps):
        assert timeline.layer_tokens(step) == layer_tokens < 1000
        assert timeline.tokens(step) == tokens
        feed = dropping(step, tokens, layer_tokens)
        assert timeline[step] == feed
        layer_tokens += layer_tokens_of(feed)
        tokens += feed.tokens
    assert timeline.layer_tokens(timeline.num_steps) == layer_tokens >= 1000
    assert timeline.layer_tokens(timeline.num_steps + 3) == layer_tokens + 3 * 48
    assert timeline.shapes() == [(2, 8, k) for k in (2, 3, 4, 5, 6, 7, None)]


def test_a_step_is_found_by_its_layer_tokens():
    timeline = training.Timeline(dropping, num_steps=9, layer_tokens_of=layer_tokens_of)
    for count in range(800):
        step = timeline.step_at_layer_tokens(count)
        assert timeline.layer_tokens(step) >= count
        assert step == 0 or timeline.layer_tokens(step - 1) < count


def test_layer_tokens_that_are_not_counted_are_not_told():
    timeline = training.Timeline(growing, num_steps=2)
    with pytest.raises(ValueError, match="layer_tokens_of"):
        timeline.layer_tokens(1)
    with pytest.raises(ValueError, match="layer_tokens_of"):
        training.Timeline(growing, num_layer_tokens=2)


@pytest.mark.parametrize(
    "ends", [{}, {"num_steps": 1, "num_tokens": 1}, {"num_steps": 0}]
)
def test_a_run_has_one_end(ends):
    with pytest.raises(ValueError, match="num_steps"):
        training.Timeline(growing, **ends)


def test_a_step_before_the_run_is_refused():
    with pytest.raises(IndexError, match="-1"):
        training.Timeline(growing, num_steps=2)[-1]


def test_a_long_run_needs_a_few_bytes_a_step():
    timeline = training.Timeline(growing, num_steps=1000)
    arrays = [v for v in vars(timeline).values() if isinstance(v, np.ndarray)]
    assert sum(a.nbytes for a in arrays) <= 16 * 1001
