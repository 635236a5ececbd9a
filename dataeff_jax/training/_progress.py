"""How far a run is: a bar in a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

import tqdm


def _clock_text(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


class Progress:
    """Shows steps done, rate and time left, of this session only.

    A run that was resumed at step 700 does not count those steps as done now: the rate
    is that of the steps since this object was made.

    Args:
      total: steps of the whole run.
      start: steps done before this session.
      stream: where to write; None means standard error.
      clock: seconds from any origin.
      every_seconds: least time between plain lines.

    Raises:
      ValueError: if start is not between 0 and total.

    Example:
      >>> import io
      >>> times = iter([0.0, 50.0])
      >>> progress = Progress(
      ...     1000, start=700, stream=io.StringIO(), clock=lambda: next(times))
      >>> progress.update(720)
      >>> progress.seconds_left
      700.0
    """

    def __init__(
        self,
        total: int,
        *,
        start: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        every_seconds: float = 10.0,
    ):
        if not 0 <= start <= total:
            raise ValueError(f"start={start} is not between 0 and total={total}.")
        self._total, self._start, self._step = total, start, start
        self._stream = sys.stderr if stream is None else stream
        self._clock, self._every = clock, every_seconds
        self._begin = self._now = clock()
        self._shown = float("-inf")
        self._bar = None
        if self._stream.isatty():
            self._bar = tqdm.tqdm(
                total=total,
                initial=start,
                file=self._stream,
                unit="step",
                dynamic_ncols=True,
            )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    @property
    def steps_per_second(self) -> float | None:
        """Rate of this session; None before its first step."""
        done, seconds = self._step - self._start, self._now - self._begin
        return done / seconds if done and seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """Time left at this rate; None before the first step of this session."""
        rate = self.steps_per_second
        return None if rate is None else (self._total - self._step) / rate

    def update(self, step: int, **values: float) -> None:
        """Shows that some steps are done.

        Args:
          step: steps done, those of earlier sessions included.
          **values: numbers to show beside, such as the loss.
        """
        advance, self._step, self._now = step - self._step, step, self._clock()
        texts = {name: f"{value:.4g}" for name, value in values.items()}
        if self._bar is not None:
            self._bar.set_postfix(texts, refresh=False)
            self._bar.update(advance)
            return
        if self._now - self._shown < self._every and step < self._total:
            return
        self._shown = self._now
        rate = self.steps_per_second
        speed = "?" if rate is None else f"{rate:.3g}"
        line = f"step {step}/{self._total}  {speed} steps/s"
        line += f"  {_clock_text(self.seconds_left)} left"
        line += "".join(f"  {name} {text}" for name, text in texts.items())
        self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar.close()
