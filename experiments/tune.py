"""Searches the longest stable ramp of a curriculum with a few short trials.

    python -m experiments.tune --config=configs/gpt_curriculum.py --output=tuning \\
        [--config.key=value ...] [--warmups=5] [--trials=6] [--max_fluctuation=1.3]

A ramp that is too long shows early, in a perplexity of full validation rows that falls
and rises again. So a trial trains the first few multiples of the learning rate's
warm-up only, with the schedules of the whole run:

1. the shortest ramp is tried. Where its perplexity fluctuates in the first warm-up, the
   smallest length is raised to the next bucket;
2. the longest ramp without a significant fluctuation is searched by bisection.

A fluctuation is the largest perplexity over the smallest one before it. The papers ask
for none that is significant and give no number: 1.3 is ours. Every trial is kept as
JSON in the output directory, and a search that was stopped goes on with what is there.

Li et al., The Stability-Efficiency Dilemma, https://arxiv.org/abs/2108.06084, and
Li et al., DeepSpeed Data Efficiency, https://arxiv.org/abs/2212.03597.
"""

import dataclasses
import math
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import ml_collections

from experiments import builders, command_line, curricula, ramp_search, ramps, sweep


@dataclasses.dataclass
class Tuning:
    """The trials of one config: makes them, keeps them, tells of them."""

    reference: str  # "configs/file.py:arg"
    overrides: dict[str, str]  # by key
    ramp: ramps.Ramp
    name: str  # of the ramp
    directory: pathlib.Path
    warmups: float = 5.0
    warmup_steps: int | None = None  # None: that of the config
    max_fluctuation: float = ramp_search.MAX_FLUCTUATION
    evaluations: int = 25
    make: Callable[[sweep.Run], dict[str, Any]] = sweep.make
    tell: Callable[[str], None] = print
    found: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for name in ("warmups", "evaluations"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"--{name}={getattr(self, name)} must be at least 1")
        if not self.max_fluctuation > 1:
            raise ValueError(
                f"--max_fluctuation={self.max_fluctuation} must be above 1: it is a "
                "perplexity over the smallest one before it"
            )
        self.config = self._config({})
        self.ramp.blocks(self.config)  # says what is missing
        self.clock = self.ramp.clock(self.config)
        self.warmup = ramps.warmup(self.config, self.clock, self.warmup_steps)
        self.run_length = curricula.run_length(self.config, self.clock)
        self.start = self.ramp.start(self.config)

    def _config(self, changes: Mapping[str, str]) -> ml_collections.ConfigDict:
        config = command_line.load_config(self.reference)
        texts = [f"--config.{k}={v}" for k, v in {**self.overrides, **changes}.items()]
        problems = command_line.apply_overrides(config, texts)
        builders.check_config(config, problems=problems)
        return config

    def totals(self, lower: int | None = None, upper: int | None = None) -> list[int]:
        """Multiples of the warm-up from ``lower`` on, and ``upper``, the run."""
        lower = self.warmup if lower is None else lower
        upper = self.run_length if upper is None else upper
        if not 1 <= lower <= upper <= self.run_length:
            raise ValueError(
                f"ramps from {lower:,} to {upper:,} {self.clock} do not lie between 1 "
                f"and the run's {self.run_length:,}; set --lower and --upper"
            )
        return ramp_search.candidates(lower, upper, self.warmup)

    def changes(self, total: int, start: int | None) -> dict[str, str]:
        """Values by key: the ramp, and its start where it was raised."""
        result = ramps.totals_overrides(self.config, self.ramp, total)
        if self.start is not None and start != self.start.values[0]:
            result[self.start.key] = str(start)
        return result

    def trial(self, total: int, start: int | None) -> sweep.Run:
        """The run of a trial."""
        changes = self.changes(total, start)
        first, steps = self._steps(self._config(changes))
        every = max(1, steps // self.evaluations)
        changes |= {
            "train.log_every_steps": "1",
            "eval.every_steps": str(every),
            "eval.compare_with_ngrams": "false",
            "checkpoint.every_steps": "1000000000",
        }
        own = {**self.overrides, **changes}
        suffix = "" if start is None else f"-from-{start}"
        return sweep.Run(
            f"{self.name}-{total}{suffix}",
            self.reference,
            tuple(f"{key}={value}" for key, value in own.items()),
            # Steps of the first warm-up, for the verdict.
            (("total", total), ("minimum", start), ("start", first)),
            -(-steps // every) * every,  # evaluated there as well
        )

    def _steps(self, config: ml_collections.ConfigDict) -> tuple[int, int]:
        """Steps of one warm-up, and of a trial."""
        timeline, count, own = curricula.timeline(config), self.warmup_steps, "steps"
        if count is None:
            count, own = builders.warmup_duration(config, timeline)
        ends = count, math.ceil(self.warmups * count)
        if own == "tokens":
            ends = timeline.step_at(ends[0]), timeline.step_at(ends[1])
        return min(ends[0], timeline.num_steps), min(ends[1], timeline.num_steps)

    def attempt(self, total: int, start: int | None) -> ramp_search.Verdict:
        """Takes the trial's result, or makes it."""
        run = self.trial(total, start)
        result = sweep.results([run], self.directory).get(run.name)
        if result is None:
            result = self.make(run)
            self._check_ended(run, result)
            sweep.keep(run, self.directory, result)
        elif result["command"] != run.told:
            raise ValueError(
                f"{self.directory / run.name}.json is of other settings, made by "
                f"{result['command']!r}; choose another --output, or delete it"
            )
        self.found[run.name] = result
        return ramp_search.judge(result, self.max_fluctuation)

    def tell_of(self, verdict: ramp_search.Verdict, left: int) -> None:
        """Tells what the last trial shows, and how long the others may take."""
        result = list(self.found.values())[-1]
        seconds = [r["wall_seconds"] for r in self.found.values()]
        rest = left * sum(seconds) / len(seconds)
        begins = "" if result["minimum"] is None else f" from {result['minimum']}"
        self.tell(
            f"trial {len(self.found)}: {result['total']:,} {self.clock}{begins}, "
            f"{result['steps']:,} steps: {ramp_search.told(verdict)}; "
            f"{left} more at most, about {rest / 60:.1f} min"
        )

    def _check_ended(self, run: sweep.Run, result: Mapping[str, Any]) -> None:
        changes = dict(override.split("=", 1) for override in run.overrides)
        whole = curricula.timeline(self._config(changes)).num_steps
        if not result["diverged"] and result["steps"] < min(run.max_steps or 0, whole):
            raise InterruptedError(f"{run.name} was stopped after {result['steps']}")


def table(tuning: Tuning) -> str:
    """A line a trial, in their order."""
    lines = [
        f"| ramp, {tuning.clock} | of the run | from | perplexity, largest ratio | "
        "in the first warm-up | training loss, largest ratio | |",
        "| --- " * 7 + "|",
    ]
    for result in tuning.found.values():
        verdict = ramp_search.judge(result, tuning.max_fluctuation)
        minimum = "" if result["minimum"] is None else result["minimum"]
        lines.append(
            f"| {result['total']:,} | {result['total'] / tuning.run_length:.3f} | "
            f"{minimum} | {verdict.fluctuation:.3f} | {verdict.at_start:.3f} | "
            f"{verdict.loss_ratio:.3f} | {ramp_search.told(verdict).split(' ')[0]} |"
        )
    return "\n".join(lines)


def recommendation(tuning: Tuning, found: ramp_search.Found) -> str:
    """What to do, with overrides that can be pasted."""
    if found.total is None:
        return (
            f"No ramp is stable: the shortest one, {found.unstable:,} {tuning.clock}, "
            "fluctuates already. A lower peak learning rate, a longer warm-up of it, a "
            "smaller --lower, a larger minimum or more --trials may help."
        )
    changes = tuning.changes(found.total, found.start)
    flags = " ".join(f"--config.{key}={value}" for key, value in changes.items())
    if found.unstable is None:
        bound, where = "none that was tried is unstable", "longer ones"
    else:
        bound, where = f"one of {found.unstable:,} is not", "between the two"
    if found.untried:
        bound += f" ({found.untried} {where} left untried for want of trials)"
    text = (
        f"A ramp of {found.total:,} {tuning.clock} is stable; {bound}:\n\n    {flags}\n"
    )
    peak = tuning.config.schedule.kwargs.get("peak_value")
    text += (
        "\nFor another budget DeepSpeed Data Efficiency scales the ramp with it (a "
        "fraction of the run does so itself) and the peak learning rate inversely"
    )
    if peak:
        text += ": with half of the tokens, "
        text += f"--config.schedule.kwargs.peak_value={2 * peak:g}"
    return text + ". A higher rate is less stable: try it in the same way."


def plot(tuning: Tuning, path: pathlib.Path) -> None:
    """Draws the validation perplexity of the trials; unstable ones are dashed."""
    import matplotlib.figure  # takes a second

    figure = matplotlib.figure.Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for result in tuning.found.values():
        verdict = ramp_search.judge(result, tuning.max_fluctuation)
        curve = result["validation_curve"]
        begins = "" if result["minimum"] is None else f" from {result['minimum']}"
        axes.plot(
            [point[0] for point in curve],
            [ramp_search.perplexity(point) for point in curve],
            "-" if verdict.is_stable else "--",
            label=f"{result['total']:,}{begins}: {ramp_search.told(verdict)}",
        )
    axes.set_yscale("log")
    axes.set_xlabel("steps")
    axes.set_ylabel("validation perplexity")
    axes.set_title(f"ramps, in {tuning.clock}")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, format="png")


def _parser():
    parser = command_line.parser(__doc__ or "")
    add = parser.add_argument
    add("--output", type=pathlib.Path, required=True, metavar="DIR")
    add("--ramp", choices=sorted(ramps.RAMPS), default="curriculum")
    add("--warmups", type=float, default=5.0, help="length of a trial (5)")
    add("--warmup", type=int, metavar="STEPS", help="of the rate, if not the config's")
    add(
        "--max_fluctuation",
        type=float,
        default=ramp_search.MAX_FLUCTUATION,
        help="largest perplexity over the smallest before (1.3, our choice)",
    )
    add("--trials", type=int, default=6, help="at most (6)")
    add("--evaluations", type=int, default=25, help="of a trial, at least (25)")
    add("--lower", type=int, help="shortest ramp, in its clock (one warm-up)")
    add("--upper", type=int, help="longest ramp, in its clock (the whole run)")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Parses the flags, makes the trials that are missing, and reports."""
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser()
    flags = command_line.parse(parser, argv)
    texts = [a.removeprefix("--config.") for a in argv if a.startswith("--config.")]
    try:
        tuning = Tuning(
            reference=parser.parse_known_args(argv)[0].config,
            overrides=dict(text.split("=", 1) for text in texts),
            ramp=ramps.RAMPS[flags.ramp],
            name=flags.ramp,
            directory=flags.output,
            warmups=flags.warmups,
            warmup_steps=flags.warmup,
            max_fluctuation=flags.max_fluctuation,
            evaluations=flags.evaluations,
        )
        print(report(tuning, flags.lower, flags.upper, flags.trials))
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def report(tuning: Tuning, lower: int | None, upper: int | None, trials: int) -> str:
    """Searches, and writes ``report.md`` and ``plot.png``; returns the report."""
    totals = tuning.totals(lower, upper)
    starts = [None] if tuning.start is None else tuning.start.values
    steps = tuning.trial(totals[0], starts[0]).max_steps
    tuning.tell(
        f"{len(totals)} ramps from {totals[0]:,} to {totals[-1]:,} {tuning.clock}: at "
        f"most {trials} trials, the first of {steps:,} steps"
    )
    found = ramp_search.search(
        totals, starts, tuning.attempt, trials=trials, after=tuning.tell_of
    )
    text = f"{table(tuning)}\n\n{recommendation(tuning, found)}\n"
    (tuning.directory / "report.md").write_text(text)
    plot(tuning, tuning.directory / "plot.png")
    return f"\n{text}\nplot: {tuning.directory / 'plot.png'}"


if __name__ == "__main__":
    main()
