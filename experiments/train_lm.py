"""Trains a language model from a configuration.

    python -m experiments.train_lm --config=configs/gpt_baseline.py --workdir=runs/gpt

The work directory receives the resolved config, checkpoints, metrics.jsonl, TensorBoard
events, plots and a summary. Started again with the same work directory, the run goes on
after its newest complete checkpoint, exactly.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import logging
import pathlib
import platform
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from flax import nnx

import dataeff_jax
from dataeff_jax import data, distributed, models, training
from experiments import (
    builders,
    command_line,
    corpora,
    curricula,
    ngram_baselines,
    random_ltd,
)

log = logging.getLogger(__name__)

# Keys that cannot change the trajectory: a run may go on with others.
FREE_KEYS = (
    "mesh",
    "data.cache_dir",
    "data.num_workers",
    "train.log_every_steps",
    "eval",
    "checkpoint",
)

# Steps that the device is given ahead of the host, so that it never waits for it.
STEPS_IN_FLIGHT = 2


def train_and_evaluate(
    config: ml_collections.ConfigDict,
    workdir: str | pathlib.Path,
    *,
    profile_steps: tuple[int, int] | None = None,
    accept_config_changes: bool = False,
    max_steps: int | None = None,
) -> dict[str, Any]:
    """Trains as ``config`` says and returns the last line of the log.

    Args:
      config: a configuration of the schema in ``configs/common.py``.
      workdir: where everything that the run writes lies; resumed from if it holds a
        checkpoint of the same configuration.
      profile_steps: first and last step of a profiler trace.
      accept_config_changes: go on with a checkpoint whose config differs.
      max_steps: stop after so many steps of the run, whose schedules stay those of the
        whole run; None: at its end.

    Returns:
      ``step``, the ledger's counts, ``validation_loss`` and so on.

    Raises:
      ValueError: for a config that cannot run, before anything is computed.
      FloatingPointError: when a loss is not finite; the message names the step and the
        sample ids, and the newest checkpoint is the last good one.
    """
    builders.check_config(config)
    with distributed.guard() as watch, jax.set_mesh(builders.mesh(config)):
        watch.report(None, "set up")
        with training.claim(workdir):
            run = set_up(config, workdir, accept_config_changes=accept_config_changes)
            run.max_steps = max_steps
            return run.train(watch, profile_steps=profile_steps)


def set_up(
    config: ml_collections.ConfigDict,
    workdir: str | pathlib.Path,
    *,
    accept_config_changes: bool = False,
) -> "Run":
    """Builds everything that a run needs, or raises a ValueError that says why not."""
    workdir = pathlib.Path(workdir).absolute()

    # Data.
    corpus = corpora.corpus(
        config, progress=command_line.counter("tokenized documents:")
    )
    resolved = builders.resolved(config, vocab_size=corpus.vocab_size)
    # A file may hold another text than when the run began.
    resolved["data"]["fingerprint"] = corpus.fingerprint
    counter = command_line.counter("analyzed")
    plan = curricula.build(config, corpus, progress=counter)
    if plan.order is not None:
        resolved["curriculum"]["fingerprint"] = plan.order.fingerprint
    if plan.budget is not None:
        resolved["data"]["batches"] = plan.budget.fingerprint
    distributed.check_agreement(
        training.config_hash(resolved, free=("data.cache_dir",)),
        what="config or corpus",
    )
    stored = workdir / training.CONFIG_FILE
    if stored.is_file() and not accept_config_changes:
        old = training.read_config(stored)
        training.check_same_config(old, resolved, free=FREE_KEYS)

    # Model and optimizer.
    model = builders.model(config, vocab_size=corpus.vocab_size)
    graphdef, params = nnx.split(model, nnx.Param)

    def loss_fn(params, batch, keys):
        return nnx.merge(graphdef, params).loss(batch, keys=keys)

    tx = builders.optimizer(config, params)
    state = training.TrainState.create(params, tx)
    # The state has its own copy; a second one would stay on a device for the whole run.
    model = nnx.merge(graphdef, jax.eval_shape(lambda: params))

    # Restore.
    checkpoints = training.Checkpoints(
        workdir / training.CHECKPOINT_DIRECTORY, keep=config.checkpoint.keep
    )
    if checkpoints.steps() and not accept_config_changes:
        # The file may be lost, or of a start that accepted changes and saved nothing.
        old = checkpoints.loop()["config"]
        training.check_same_config(old, resolved, free=FREE_KEYS)
    restored = checkpoints.restore_latest(state)
    if restored is not None:
        state, loop = restored
        if (workdir / training.METRICS_FILE).exists():
            training.read_log(workdir)  # a damaged one stops the run now
        log.info("going on after step %d of %s", loop["step"], workdir)
    else:
        loop: dict[str, Any] = {"step": 0, "seconds": 0.0}
        loop["ledger"] = training.Ledger().to_json()
    if jax.process_index() == 0:
        _write_files(workdir, resolved, corpus.tokenizer)

    # Step: the training step of a model that keeps so many tokens; None: the plain one.
    def step_fn_of(num_kept):
        dropping = random_ltd.loss_fn(config, model, num_kept=num_kept)
        return training.data_parallel_step(
            dropping or loss_fn,
            tx,
            accumulation_steps=config.optimizer.accumulation_steps,
        )

    return Run(
        config=config,
        resolved=resolved,
        workdir=workdir,
        corpus=corpus,
        model=model,
        loss_fn=loss_fn,
        step_fn_of=functools.cache(step_fn_of),
        plan=plan,
        learning_rate_at=builders.learning_rate(config, plan.timeline),
        checkpoints=checkpoints,
        restored=restored is not None,
        state=state,
        step=loop["step"],
        ledger=training.Ledger.from_json(loop["ledger"]),
        seconds=loop["seconds"],
        logged=(loop["step"], loop["seconds"], loop["ledger"]["tokens"]),
    )


@dataclasses.dataclass
class Run:
    """What a run is made of, where it stands, and the loop over its steps."""

    config: ml_collections.ConfigDict
    resolved: dict[str, Any]
    workdir: pathlib.Path
    corpus: corpora.Corpus
    model: models.GPT | models.BERT  # shapes only; the parameters are in `state`
    loss_fn: Callable[..., Any]
    step_fn_of: Callable[[int | None], Any]  # jitted; compiled ahead for every shape
    plan: curricula.Curriculum
    learning_rate_at: Callable[..., float]
    checkpoints: training.Checkpoints
    restored: bool
    # Where it stands.
    state: training.TrainState
    step: int  # steps done
    ledger: training.Ledger
    seconds: float  # spent on steps; compiling, evaluating and saving left out
    logged: tuple[int, float, int]  # step, seconds and tokens of the last line
    max_steps: int | None = None  # stop there, or at the end of the run
    data_seconds: float = 0.0  # of this session, blocked on the next batch
    learning_rate: float = 0.0  # of the last step
    pending: dict[int, Any] = dataclasses.field(default_factory=dict)  # unread metrics

    def train(
        self,
        watch: distributed.Watch,
        *,
        profile_steps: tuple[int, int] | None = None,
    ) -> dict[str, Any]:
        """Takes the steps that are left, then writes the plots and the summary."""
        num_steps = self.plan.timeline.num_steps
        end = min(num_steps, self.max_steps or num_steps)
        logger = training.MetricsLogger(
            self.workdir, restored_step=self.step if self.restored else None
        )
        profile = _Profile(profile_steps, self.workdir / "profile")
        prefetch = contextlib.closing(self._prefetch())
        executables = self._executables()
        with self.checkpoints, logger, profile, executables, prefetch as batches:
            if not self.restored:
                watch.report(0, "evaluate")
                start = {**self.ledger.to_json(), "seconds": 0.0}
                logger.log(0, start | self.evaluate())
            if self.step < end:
                watch.report(self.step, "compile")
                executables.get(self.plan.timeline[self.step].shape)
            # The clocks start here: compiling is no part of the rate.
            progress = training.Progress(max(end, self.step), start=self.step)
            began = time.monotonic()
            while self.step < end and not watch.stop_requested(self.step):
                watch.report(self.step, "train")
                profile.before(self.step)
                self._take_step(batches, executables)
                profile.after(self.step, self.state)
                due = self._due()
                if due:
                    metrics = self._settle()
                    self.seconds += time.monotonic() - began
                    self._act(due, metrics, watch, logger, progress)
                    began = time.monotonic()
            progress.close()
            if self.step < num_steps:
                if self.pending:
                    self._settle()
                self._save()
                log.info("stopped after step %d, which is saved", self.step)
        return self._finish()

    def evaluate(self) -> dict[str, float]:
        """Loss and perplexity on the validation rows, every token once.

        They are of ``config.data``'s own corpus, so that runs with other mixtures
        compare; a mixture's corpora have their losses beside it.
        """
        found = self._evaluate(self.corpus.validation)
        result = {
            "validation_loss": found["loss"],
            "perplexity": found["perplexity"],
            "validation_tokens": found["tokens"],
        }
        for name, part in self.corpus.parts.items():
            if part.validation is not self.corpus.validation:
                part_found = self._evaluate(part.validation)
                result[f"validation_loss_{name}"] = part_found["loss"]
        return result

    def _evaluate(self, rows: data.PackedRows) -> dict[str, float]:
        settings = self.config.eval
        batches = data.evaluation_batches(
            rows,
            batch_size=settings.batch_size,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
            max_rows=None if settings.max_rows == -1 else settings.max_rows,
            transform=self.corpus.transform,
        )
        with contextlib.closing(data.prefetch(batches)) as iterator:
            return training.evaluate(self.loss_fn, self.state.params, iterator)

    @functools.cached_property
    def key(self) -> jax.Array:
        """What the step folds its number into; never changes."""
        # Flax folds 0, 1, 2, ... into the seed's key for the initial parameters, which
        # would be the keys of the first steps.
        return jax.random.fold_in(jax.random.key(self.config.seed), 2**32 - 1)

    @property
    def batches(self) -> Any:
        """The batch of every step; this process's rows."""
        return self._batches(jax.process_index(), jax.process_count())

    def _batches(self, process_index: int, process_count: int) -> Any:
        return self.plan.batches(
            self.config,
            self.corpus,
            process_index=process_index,
            process_count=process_count,
            # Not 0 where an earlier session had another batch size.
            first_sample=self.ledger.samples - self.step * self.config.data.batch_size,
        )

    def _prefetch(self):
        return data.prefetch(
            self.batches,
            start_step=self.step,
            num_workers=self.config.data.num_workers,
        )

    def _executables(self) -> training.Executables:
        """The step for every shape that is left, the next ones compiled meanwhile."""
        mesh, timeline, start = jax.sharding.get_mesh(), self.plan.timeline, self.step
        shapes = timeline.shapes(start) if start < timeline.num_steps else []
        if self.max_steps is not None:
            end = self.max_steps
            shapes = [s for s in shapes if timeline.first_step(s, start) < end]
        state = jax.tree.map(_abstract, self.state)
        batches = self.batches
        if len(shapes) > 1:
            told = ", ".join(map(random_ltd.shape_name, shapes))
            log.info("the step compiles for %d shapes: %s", len(shapes), told)

        def compile(shape):
            batch = batches[timeline.first_step(shape, start)]
            began = time.monotonic()
            with jax.set_mesh(mesh):
                batch = distributed.shard_batch(batch)
                rate = {"learning_rate": np.float32(0)}
                lowered = self.step_fn_of(shape[2]).lower(
                    state, batch, self.key, **rate
                )
                program = lowered.compile()
                if mesh.size == 1 and jax.default_backend() == "cpu":
                    # The first call makes the CPU's matrix kernels, 0.1 s or more.
                    nothing = jax.tree.map(_zeros, state)
                    jax.block_until_ready(program(nothing, batch, self.key, **rate))
            seconds = time.monotonic() - began
            name = random_ltd.shape_name(shape)
            log.info("compiled the step for %s in %.1f s", name, seconds)
            return program

        return training.Executables(compile, shapes)

    def _take_step(self, batches, executables: training.Executables) -> None:
        """Gives the device one more step; does not wait for it."""
        began = time.monotonic()
        batch = next(batches)
        self.data_seconds += time.monotonic() - began
        feed = self.plan.timeline[self.step]
        clocks = self.step, self.ledger.tokens, self.ledger.layer_tokens
        self.learning_rate = self.learning_rate_at(*clocks)
        self.state, metrics = executables.get(feed.shape)(
            self.state,
            distributed.shard_batch(batch),
            self.key,
            learning_rate=np.float32(self.learning_rate),
        )
        if self.step == self.plan.timeline.last_step(feed.shape):
            executables.discard(feed.shape)
        self.step += 1
        self.pending[self.step] = metrics
        self.ledger = self.ledger.add(
            samples=feed.samples,
            tokens=feed.tokens,
            layer_tokens=curricula.layer_tokens(self.config, feed),
            flops=feed.rows * random_ltd.train_flops(self.config, self.model, feed),
        )
        # Bounds what is queued on the device without ever leaving it idle.
        jax.block_until_ready(self.pending.get(self.step - STEPS_IN_FLIGHT))

    def _due(self) -> set[str]:
        """What is to be done after this step."""
        every = {
            "log": self.config.train.log_every_steps,
            "evaluate": self.config.eval.every_steps,
            "save": self.config.checkpoint.every_steps,
        }
        last = self.step == self.plan.timeline.num_steps
        return {name for name, steps in every.items() if last or not self.step % steps}

    def _settle(self) -> dict[str, float]:
        """Waits for the steps taken; raises if one has gone wrong."""
        values = training.read_pending(self.pending)
        self.pending.clear()
        values[self.step]["parameter_norm"] = float(_norm(self.state.params))
        training.check_finite(values, sample_ids=self._sample_ids)
        return values[self.step]

    def _sample_ids(self, step: int):
        """Ids of the rows, over all processes, that step number ``step`` fed."""
        batch = self._batches(0, 1)[step - 1]
        if "corpus" not in batch:
            return batch["sample_id"]
        names = sorted(self.corpus.parts)
        pairs = zip(batch["corpus"], batch["sample_id"], strict=True)
        return [f"{names[number]} {sample}" for number, sample in pairs]

    def _act(self, due, metrics, watch, logger, progress) -> None:
        """Logs, evaluates and saves; a line is written before its checkpoint."""
        line = {
            **{k: v for k, v in metrics.items() if k != "weight"},
            "learning_rate": self.learning_rate,
            **self.ledger.to_json(),
        }
        if self.config.random_ltd is not None:
            feed = self.plan.timeline[self.step - 1]
            line["num_kept"] = random_ltd.num_kept(feed)
        if self.config.curriculum is not None or self.plan.budget is not None:
            line["length"] = self.plan.timeline[self.step - 1].length
            line |= curricula.difficulties_at(self.plan.order, self.step - 1)
        if "evaluate" in due:
            watch.report(self.step, "evaluate")
            line |= self.evaluate()
        progress.update(self.step, loss=line["loss"])
        if due & {"log", "evaluate"}:
            now = self.step, self.seconds, self.ledger.tokens
            steps, seconds, tokens = (
                a - b for a, b in zip(now, self.logged, strict=True)
            )
            self.logged = now
            line |= {
                "seconds": self.seconds,
                "data_seconds": self.data_seconds,
                "steps_per_second": steps / seconds if seconds else 0.0,
                "tokens_per_second": tokens / seconds if seconds else 0.0,
            }
            logger.log(self.step, line)
        if "save" in due:
            watch.report(self.step, "save")
            self._save()

    def _save(self) -> None:
        loop = {
            "ledger": self.ledger.to_json(),
            "seconds": self.seconds,
            "config": self.resolved,
            "config_hash": training.config_hash(self.resolved, free=FREE_KEYS),
        }
        self.checkpoints.save(self.step, self.state, loop)

    def _finish(self) -> dict[str, Any]:
        """Draws the plots, prints the summary, and returns the last line."""
        if jax.process_index() != 0:
            return {}
        records = training.read_log(self.workdir)
        runs = {self.workdir.name: records}
        plot = training.plot_runs(runs, self.workdir / "loss.png")
        summary = training.summary_table(runs)
        evaluated = any("validation_loss" in record for record in records)
        ended = self.step >= self.plan.timeline.num_steps and evaluated
        if self.config.eval.compare_with_ngrams and ended:
            summary += "\n\n" + _ngram_table(self.corpus, records)
        (self.workdir / "summary.txt").write_text(summary + "\n")
        print(f"\n{summary}\n\nplot: {plot}")
        return records[-1] if records else {}  # somebody has removed the log


class _Profile(contextlib.AbstractContextManager):
    """A profiler's trace of chosen steps, of as many of them as the run takes."""

    def __init__(self, steps: tuple[int, int] | None, directory: pathlib.Path):
        self._first, self._last = steps or (0, -1)
        self._directory = directory
        self._running = False

    def before(self, step: int) -> None:
        # A resumed run may begin in the middle of the steps, or behind them.
        if not self._running and self._first <= step <= self._last:
            jax.profiler.start_trace(str(self._directory))
            self._running = True

    def after(self, steps_done: int, state: training.TrainState) -> None:
        if self._running and steps_done > self._last:
            jax.block_until_ready(state)
            self.__exit__()

    def __exit__(self, *exception) -> None:
        if self._running:
            jax.profiler.stop_trace()
            self._running = False


@jax.jit
def _norm(params):
    return optax.tree.norm(params)


def _ngram_table(corpus: corpora.Corpus, records) -> str:
    """What counting reaches on the same validation tokens, beside the model."""
    streams = (corpus.train.documents, corpus.validation.documents)
    losses = ngram_baselines.ngram_losses(
        *map(ngram_baselines.token_stream, streams), vocab_size=corpus.vocab_size
    )
    found = [r["validation_loss"] for r in records if "validation_loss" in r]
    rows = {
        "ln(vocabulary)": losses.uniform,
        "this model, before training": found[0],
        "unigram model": losses.unigram,
        "Kneser-Ney bigram model": losses.bigram,
        "this model, trained": found[-1],
    }
    lines = [f"  {name:<28} {loss:6.3f}" for name, loss in rows.items()]
    return "validation loss, nats a token:\n" + "\n".join(lines)


def _abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(x.shape, x.dtype, device=x.sharding)


def _write_files(workdir: pathlib.Path, resolved: dict, tokenizer) -> None:
    workdir.mkdir(parents=True, exist_ok=True)
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    versions = {name: importlib.metadata.version(name) for name in packages}
    versions |= {"dataeff_jax": dataeff_jax.__version__}
    versions |= {"python": platform.python_version(), "platform": platform.platform()}
    for name, content in (
        (training.CONFIG_FILE, resolved),
        ("versions.json", versions),
    ):
        # A resumed run writes them again, and must not lose them if it is killed here.
        new = workdir / f".{name}.new"
        new.write_text(json.dumps(content, indent=2) + "\n")
        new.replace(workdir / name)
    tokenizer.save(workdir / "tokenizer.json")


def _steps(text: str) -> tuple[int, int]:
    """Reads ``FIRST:LAST``."""
    first, _, last = text.partition(":")
    steps = int(first), int(last or first)
    if not 0 <= steps[0] <= steps[1]:
        raise ValueError
    return steps


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def main(argv: list[str] | None = None) -> None:
    """Parses the flags, connects the processes and trains."""
    parser = command_line.parser(__doc__)
    parser.add_argument("--workdir", required=True, help="where the run's files lie")
    parser.add_argument(
        "--profile_steps",
        type=_steps,
        metavar="FIRST:LAST",
        help="write a profiler trace of these steps to WORKDIR/profile",
    )
    parser.add_argument(
        "--accept_config_changes",
        action="store_true",
        help="go on although the config differs from the checkpoint's",
    )
    parser.add_argument(
        "--max_steps",
        type=_positive,
        metavar="N",
        help="stop after N steps of the run, as if interrupted there",
    )
    group = parser.add_argument_group(
        "several processes (or COORDINATOR, NUM_PROCESSES and PROCESS_ID)"
    )
    group.add_argument("--coordinator", metavar="HOST:PORT")
    group.add_argument("--num_processes", type=int)
    group.add_argument("--process_id", type=int)
    flags = command_line.parse(parser, argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)
    log.setLevel(logging.INFO)
    try:
        distributed.initialize(
            flags.coordinator,
            num_processes=flags.num_processes,
            process_id=flags.process_id,
        )
        mesh = builders.mesh(flags.config)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    with distributed.guard() as watch, jax.set_mesh(mesh):
        watch.report(None, "set up")
        with contextlib.ExitStack() as claimed:
            try:
                claimed.enter_context(training.claim(flags.workdir))
                run = set_up(
                    flags.config,
                    flags.workdir,
                    accept_config_changes=flags.accept_config_changes,
                )
            except (OSError, ValueError) as error:
                parser.exit(2, f"{parser.prog}: {error}\n")
            run.max_steps = flags.max_steps
            run.train(watch, profile_steps=flags.profile_steps)


if __name__ == "__main__":
    main()
