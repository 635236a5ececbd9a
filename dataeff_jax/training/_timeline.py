"""What every step of a run feeds to the model, known before the run."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Feed(NamedTuple):
    """What one step feeds to the model.

    Arguments:
      samples: rows drawn from the data.
      rows: rows of the batch's arrays; more than ``samples`` where rows are split.
      row_length: positions of a row of the arrays.
      length: positions of a piece of text; less than ``row_length`` where the attention
        mask splits rows.
      num_kept: tokens of a row that layers which drop tokens see; None means all.
    """

    samples: int
    rows: int
    row_length: int
    length: int
    num_kept: int | None = None

    @property
    def tokens(self) -> int:
        """Tokens fed: those of whole pieces."""
        return self.rows * (self.row_length // self.length) * self.length

    @property
    def shape(self) -> tuple[int, int, int | None]:
        """What a step is compiled for."""
        return self.rows, self.row_length, self.num_kept


class Timeline:
    """The feeds of all steps, with the tokens fed before each.

    Schedules of lengths and of kept tokens are functions of the step or of the tokens
    fed, so everything that a run will feed, its number of steps, and the shapes that
    will be compiled follow before its first step.

    Args:
      feed_at: ``(step, tokens) -> Feed`` with the tokens fed before the step; where
        ``layer_tokens_of`` is given, ``(step, tokens, layer_tokens) -> Feed``.
      num_steps: how many steps the run has; or
      num_tokens: the run ends with the step that reaches so many tokens; or
      num_layer_tokens: with the step that reaches so many layer tokens.
      layer_tokens_of: ``Feed -> int``, the tokens that go through a block in such a
        step, summed over blocks; None: layer tokens are not counted.

    Attributes:
      num_steps: steps of the run, T.
      feeds: the different feeds, in the order in which they first come.

    Raises:
      ValueError: not one of the three ends, one below 1, or an end by layer tokens
        that are not counted.

    Example:
      >>> from dataeff_jax import training
      >>> feed_at = lambda step, tokens: training.Feed(2, 2, *[8 if step else 4] * 2)
      >>> timeline = training.Timeline(feed_at, num_tokens=40)
      >>> timeline.num_steps, [timeline.tokens(step) for step in range(4)]
      (3, [0, 8, 24, 40])
      >>> timeline.shapes()
      [(2, 4, None), (2, 8, None)]
    """

    def __init__(
        self,
        feed_at: Callable[..., Feed],
        *,
        num_steps: int | None = None,
        num_tokens: int | None = None,
        num_layer_tokens: int | None = None,
        layer_tokens_of: Callable[[Feed], int] | None = None,
    ):
        ends = (num_steps, num_tokens, num_layer_tokens)
        given = [place for place, end in enumerate(ends) if end is not None]
        told = f"{num_steps=}, {num_tokens=}, {num_layer_tokens=}"
        if len(given) != 1:
            raise ValueError(f"{told}: give one of them, which ends the run.")
        if (end := ends[given[0]] or 0) < 1:
            raise ValueError(f"{told}: a run needs at least 1.")
        if num_layer_tokens is not None and layer_tokens_of is None:
            raise ValueError(f"{told}: such an end needs layer_tokens_of.")
        codes: dict[Feed, int] = {}
        counts: list[int] = []  # layer tokens by code
        order: list[int] = []
        before, layers_before = [0], [0]
        while (len(order), before[-1], layers_before[-1])[given[0]] < end:
            clocks = (len(order), before[-1], layers_before[-1])
            feed = feed_at(*clocks[: 2 if layer_tokens_of is None else 3])
            code = codes.setdefault(feed, len(codes))
            if code == len(counts):
                counts.append(0 if layer_tokens_of is None else layer_tokens_of(feed))
            order.append(code)
            before.append(before[-1] + feed.tokens)
            layers_before.append(layers_before[-1] + counts[code])
        self.num_steps = len(order)
        self.feeds = tuple(codes)
        self._order = np.array(order, np.int32)
        self._before = np.array(before, np.int64)
        self._layers_before = None
        if layer_tokens_of is not None:
            self._layers_before = np.array(layers_before, np.int64)
        self._last: dict[tuple[int, int, int | None], int] = {}

    def __getitem__(self, step: int) -> Feed:
        """Return the feed of a step; after the run that of its last one."""
        if step < 0:
            raise IndexError(f"step={step} must not be negative.")
        return self.feeds[self._order[min(step, self.num_steps - 1)]]

    def tokens(self, step: int) -> int:
        """Return the tokens fed before a step."""
        return self._count(self._before, step)

    def layer_tokens(self, step: int) -> int:
        """Return the layer tokens before a step.

        Raises:
          ValueError: they are not counted.
        """
        return self._count(self._counted(), step)

    def step_at(self, tokens: int) -> int:
        """Return the first step before which at least so many tokens are fed."""
        return self._step_at(self._before, tokens)

    def step_at_layer_tokens(self, layer_tokens: int) -> int:
        """Return the first step before which there are so many layer tokens.

        Raises:
          ValueError: they are not counted.
        """
        return self._step_at(self._counted(), layer_tokens)

    def _counted(self) -> np.ndarray:
        if self._layers_before is None:
            raise ValueError(
                "this timeline counts no layer tokens; build it with layer_tokens_of."
            )
        return self._layers_before

    def _count(self, before: np.ndarray, step: int) -> int:
        # After the run every step is like its last one.
        over = max(0, step - self.num_steps)
        return int(before[step - over]) + over * int(before[-1] - before[-2])

    def _step_at(self, before: np.ndarray, count: int) -> int:
        step = int(np.searchsorted(before, count))
        if step <= self.num_steps:
            return step
        rest = count - int(before[-1])
        return self.num_steps + -(-rest // int(before[-1] - before[-2]))

    def shapes(self, first_step: int = 0) -> list[tuple[int, int, int | None]]:
        """Return the shapes of the steps from one on, in the order of their first."""
        codes, places = np.unique(self._order[first_step:], return_index=True)
        found = [self.feeds[code].shape for code in codes[np.argsort(places)]]
        return list(dict.fromkeys(found))

    def first_step(self, shape: tuple[int, int, int | None], start: int = 0) -> int:
        """Return the first step from ``start`` on that has a shape."""
        return start + int(np.flatnonzero(self._has(shape)[start:])[0])

    def last_step(self, shape: tuple[int, int, int | None]) -> int:
        """Return the last step that has a shape."""
        if shape not in self._last:
            self._last[shape] = int(np.flatnonzero(self._has(shape))[-1])
        return self._last[shape]

    def _has(self, shape: tuple[int, int, int | None]) -> np.ndarray:
        return np.array([feed.shape == shape for feed in self.feeds])[self._order]
