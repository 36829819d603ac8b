"""The training job, in one process, in several processes or in the workers of a pod."""

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from mesh_transformer import files, logs, platforms
from mesh_transformer.checkpoint.adapters import KEY as LORA
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.config import Config
from mesh_transformer.data.batches.loader import Loader
from mesh_transformer.errors import RunError, UserError, is_disk_full
from mesh_transformer.logs import Progress, log
from mesh_transformer.runtime.evaluation.command import RunEvaluation
from mesh_transformer.runtime.session.session import Session
from mesh_transformer.runtime.session.tokenizer import with_run_tokenizer
from mesh_transformer.runtime.training import expert_load, run_folder, samples, start
from mesh_transformer.runtime.training.config import training_config
from mesh_transformer.runtime.training.feeds import open_train_feed, source_scalars
from mesh_transformer.runtime.training.interrupt import Interrupt, StopRequest
from mesh_transformer.runtime.training.memory import check_training
from mesh_transformer.runtime.training.observer import Observer
from mesh_transformer.runtime.training.plots import Plot, plot_experts, plot_losses, remove_partial
from mesh_transformer.runtime.training.profile import StepProfile, write_step_table
from mesh_transformer.runtime.training.provenance import KEY, Provenance
from mesh_transformer.runtime.training.report import Goodput, MetricsReporter, StepWork
from mesh_transformer.runtime.training.result import TrainingResult
from mesh_transformer.runtime.training.session import (
    note_first_batch,
    open_session,
    suggest_a_faster_step,
    warn_of_idle_stages,
)
from mesh_transformer.runtime.training.validation import Validation
from mesh_transformer.train import experts
from mesh_transformer.train.step import TrainProgram, TrainState, stored

PLOT_EVERY_S = 30.0


def run(
    config_path: str,
    overrides: Sequence[str],
    tune_model_path: str | None,
    fresh_opt: bool,
    adapter: str | None = None,
) -> int:
    """Run device_train.py. Returns the exit code of the process.

    Raises:
        UserError: the config, the devices, the data or a checkpoint cannot be used.
        RunError: the loss or a gradient is not finite.
    """
    logs.set_up()
    config = training_config(config_path, overrides, tune_model_path, adapter)
    result = train(config, start.TuningSource(tune_model_path, fresh_opt, adapter))
    if jax.process_index() == 0:
        log.info("%s", result.summary())
    return result.code


def train(
    config: Config,
    source: start.TuningSource,
    observer: Observer | None = None,
    open_feed: Callable[[Session], Loader] = open_train_feed,
    interrupt: StopRequest | None = None,
) -> TrainingResult:
    """Train in this process. Joins the other processes first, if the environment defines any.

    Args:
        observer: gets the steps, phases and metrics.
        open_feed: returns the loader of the training batches. By default, this process reads the data.
        interrupt: stops the run. By default signals do, as `Interrupt` says.

    Raises:
        UserError, RunError: as `run`.
    """
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        compiled = stack.enter_context(platforms.CompileCache())
        platforms.start_devices()
        interrupt = stack.enter_context(Interrupt()) if interrupt is None else interrupt
        config, tokenizer_files = with_run_tokenizer(config, source.tune_model_path)
        session = open_session(config, tokenizer_files, Provenance.read(config.checkpoint.root))
        observer = observer or Observer()
        observer.phase("open", 0)
        config.check_devices(jax.device_count())
        program = TrainProgram(session.placement, session.config, sources=len(config.data.sources))
        check_training(session, program)
        with contextlib.closing(open_feed(session)) as feed:
            result = TrainingRun(session, program, source, interrupt, observer, feed, began).train()
    log.info("%s", compiled)
    return result


class TrainingRun:
    """One execution of the training loop: start or resume, train, and stop at the last step or after a signal.

    Args:
        began: when the process began to train, by `time.monotonic`, for the goodput.
    """

    def __init__(
        self,
        session: Session,
        program: TrainProgram,
        source: start.TuningSource,
        interrupt: StopRequest,
        observer: Observer,
        feed: Loader,
        began: float,
    ):
        self.interrupt, self.observer, self.began = interrupt, observer, began
        self.session, self.config, self.source, self.feed = session, session.config, source, feed
        self.program, self.folder = program, self.config.checkpoint.model_dir
        self.validation = Validation(session, self.program, self._stop_requested)
        self.evaluation = RunEvaluation(session, self._stop_requested)
        self.samples = samples.PromptSamples(session, self._stop_requested)
        self.is_first = jax.process_index() == 0
        # whether the sequences of the batches have several documents; None: there was no batch yet
        self.documents: bool | None = None
        # whether this process has validated, so that the programs are compiled
        self.validated = False
        self.lock: run_folder.RunLock | None = None
        self.loss_plot = Plot("loss", functools.partial(plot_losses, self.folder), PLOT_EVERY_S)
        self.experts_plot = Plot("experts", functools.partial(plot_experts, self.folder), 0)

    def train(self) -> TrainingResult:
        """Train until total_steps or a signal.

        Raises:
            UserError: another process trains in the folder; a checkpoint or the folder cannot be used.
            RunError: the loss or a gradient is not finite; the disk is full; the folder was deleted.
        """
        root = self.config.checkpoint.root
        with contextlib.ExitStack() as stack, self._explain_disk_errors():
            if self.is_first:
                run_folder.check_writable(self.folder)
                self.lock = stack.enter_context(run_folder.RunLock(self.folder))
                self.run_id = run_folder.claim_run_folder(root, self.folder)
                remove_partial(self.folder)
            run_folder.check_shared(root)
            return self._train()

    @contextlib.contextmanager
    def _explain_disk_errors(self) -> Iterator[None]:
        """Turn errors that a full disk or a deleted folder causes into RunErrors with this cause."""
        try:
            yield
        except (UserError, RunError):
            raise
        except Exception as error:
            self._check_folder()
            if not is_disk_full(error):
                raise
            steps = CheckpointStore(self.config.checkpoint.root, read_only=True).steps()
            last = f"the newest complete checkpoint is step_{steps[-1]}" if steps else "there is no checkpoint yet"
            raise RunError(
                f"{self.folder}: the disk is full, or the quota is used up; {last}. Free some space and run the same "
                f"command again: it resumes from there"
            ) from error

    def _stop_requested(self) -> bool:
        return self.interrupt.received is not None

    def _check_folder(self) -> None:
        """Raise RunError if the folder of a local run was deleted or moved, so that it cannot save."""
        local = not files.is_remote(self.config.checkpoint.root)
        if local and self.lock is not None and not self.lock.still_in_place():
            raise RunError(
                f"{self.folder} was deleted or moved during the run, with its checkpoints and metrics: restore it and "
                f"run the same command again to resume. Without it, the command starts a new run"
            )

    def _train(self) -> TrainingResult:
        settings, total = self.config.checkpoint, self.config.optimizer.total_steps
        log.info("%s", self.session.describe())
        warn_of_idle_stages(self.session)
        self.store = store = CheckpointStore(
            settings.root,
            keep_every=settings.keep_every,
            keep_latest=settings.keep_latest,
            model=self.config.model,
            optimizer=self.config.optimizer,
            lora=self.config.lora,
        )
        try:
            logged = self._logged()
            start_point = start.resume_or_start(self.session, self.program, store, self.source, logged)
            if self.is_first and start_point.step < total and not files.is_remote(settings.root):
                size = sum(
                    leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(stored(self.program.abstract_state))
                )
                run_folder.warn_of_little_space(self.folder, size, len(store.steps()), settings.keep_latest)
            if start_point.step == 0:
                suggest_a_faster_step(self.session)
            if start_point.loader_state is not None:
                self.feed.set_state(start_point.loader_state)
            if self.config.logging.op_table:
                self.observer.phase("compile", start_point.step + 1)
                write_step_table(self.program)
            report = self._open_report(start_point, logged)
            computed = range(start_point.step + 1, total + 1)
            with report, StepProfile(self.config, computed, report, self.observer, store.wait) as profile:
                self.observer.started(start_point.step, total, start_point.counters.steps_redone)
                code, step = self._loop(start_point, report, profile)
        finally:
            # with several processes, the running save may wait for a process whose disk is full, and `close` waits for
            # it
            if jax.process_count() == 1 or not is_disk_full(sys.exception()):
                store.close()
        self._publish(last=True)
        newest = files.join(settings.root, f"step_{step}")
        return TrainingResult(code, start_point.step, step, total, report.val_loss, newest)

    def _loop(self, start_point: start.StartPoint, report: MetricsReporter, profile: StepProfile) -> tuple[int, int]:
        """The exit code, and the step after which the run ended."""
        total, state = self.config.optimizer.total_steps, start_point.state
        self.interrupt.in_loop = True
        if start_point.validates and (self.validation or self.evaluation or self.samples):
            report.reopen(start_point.step, self._record(start_point.step))
            if not self._examine(start_point.step, state, report):
                code = self.interrupt.exit_code(start_point.step)
                if code is not None:
                    # a fine-tuning has no checkpoint yet
                    if start_point.step not in self.store.steps():
                        self._save(start_point.step, state, start_point, report, validated=False)
                    return code, start_point.step
        for step in range(start_point.step + 1, total + 1):
            with profile.step(step):
                self.observer.phase("data", step)
                batch = next(self.feed, None)
                if batch is None:
                    return self._end_with_the_data(step - 1, state, start_point, report)
                batch = self.session.place_batch(batch)
                self.documents = batch.documents is not None
                if step == start_point.step + 1:
                    note_first_batch(self.session, batch, start_point.provenance)
                    log.info("compiling: training step")
                # the metrics of the first step are read after the dispatch of the second one
                self.observer.phase("step" if step > start_point.step + 2 else "compile", step)
                state, metrics = self.program.train_step(state, batch)
                report.push(step, metrics, source_scalars(self.config, self.feed))
            validated = self._examine(step, state, report)
            code = self.interrupt.exit_code(step)
            if step % self.config.checkpoint.ckpt_every == 0 or step == total or code is not None:
                self._save(step, state, start_point, report, validated=validated)
            if code is not None:
                self.observer.phase("finish", step)
                return code, step
        # the last checkpoint may still be written
        self.observer.phase("finish", total)
        return 0, max(start_point.step, total)

    def _examine(self, step: int, state: TrainState, report: MetricsReporter) -> bool:
        """Validate and sample after `step`, if it is time for it. Returns whether all was computed, before a signal
        asked the run to stop."""
        due = step % self.config.data.val_every == 0 or step == self.config.optimizer.total_steps
        if due and not self._validate(step, state, report):
            return False
        return not self.samples.due(step) or self._sample(step, state, report)

    def _sample(self, step: int, state: TrainState, report: MetricsReporter) -> bool:
        """Sample the prompts after `step`. Returns as `_examine`."""
        report.settle()
        self.observer.phase("validate", step)
        with report.pause(compiles=not self.samples.compiled):
            return self.samples.run(self.program.parameters(state), step, self.folder, report)

    def _end_with_the_data(
        self, step: int, state: TrainState, start_point: start.StartPoint, report: MetricsReporter
    ) -> tuple[int, int]:
        """Validate and save after `step`, the last one that the data fills. Returns the results of `_loop`."""
        log.info("the training data ends after step %d of %d", step, self.config.optimizer.total_steps)
        # otherwise an earlier process has done both
        validated = step % self.config.data.val_every == 0 or step == start_point.step
        validated = validated or self._validate(step, state, report)
        if step % self.config.checkpoint.ckpt_every and step > start_point.step:
            self._save(step, state, start_point, report, validated=validated)
        self.observer.phase("finish", step)
        return 0 if validated else self.interrupt.exit_code(step) or 0, step

    def _validate(self, step: int, state: TrainState, report: MetricsReporter) -> bool:
        """Validate after `step`. Returns as `_examine`."""
        if not self.validation and not self.evaluation:
            return True
        report.settle()
        self.observer.phase("validate", step)
        first, self.validated = not self.validated, True
        if first:
            log.info("compiling: validation")
        with report.pause(compiles=first):
            validated = self.validation.run(self.program.parameters(state), step)
            evaluated = self.evaluation.run(self.program.parameters(state)) if validated.finished else {}
            measured = {**validated.scalars, **evaluated}
            if measured:
                report.add(measured)
            if self.is_first and validated.load and validated.finished:
                self._show_load(step, validated.load, report)
        if self.is_first and measured:
            numbers = (f"{name} {value:.4f}" for name, value in measured.items())
            log.info("step %d: %s", step, "  ".join(numbers))
        return validated.finished and bool(evaluated or not self.evaluation)

    def _show_load(self, step: int, load: expert_load.Load, report: MetricsReporter) -> None:
        """Record the load of the experts, and give its picture to the sinks."""
        expert_load.append(self.folder, step, load)
        if self.config.logging.plot:
            path = os.path.join(self.folder, run_folder.EXPERTS_PICTURE)
            show = functools.partial(report.picture, step, experts.LOAD, path)
            self.experts_plot.update(show, last=step == self.config.optimizer.total_steps)

    def _save(
        self, step: int, state: TrainState, start_point: start.StartPoint, report: MetricsReporter, *, validated: bool
    ) -> None:
        """Save the state after `step`, after checking that the step is finite."""
        report.settle()
        self.observer.phase("save", step)
        self._check_folder()
        with report.pause():
            tokens = start_point.counters.tokens + (step - start_point.step) * self.session.tokens_per_step
            extra: dict[str, Any] = {
                "loader": self.feed.get_state(),
                "counters": start_point.counters._replace(tokens=tokens)._asdict(),
                "config": self.config.model_dump(mode="json"),
                "mesh": dict(self.session.shape),
                KEY: Provenance.of(self.session, documents=self.documents).to_json(),
            }
            if not validated:
                log.info("step %d: the validation is not finished; the resumed run begins with it", step)
                extra[start.VALIDATION_DUE] = True
            if start_point.lora is not None:
                extra[LORA] = start_point.lora.to_json()
            self.store.save(step, stored(state), extra, start_point.origin)
            self._publish(last=False)

    def _open_report(self, start_point: start.StartPoint, logged: start.LoggedProgress) -> MetricsReporter:
        optimizer, quiet = self.config.optimizer, not self.is_first or self.observer.shows_progress
        progress = Progress("training", optimizer.total_steps, unit="step", done=start_point.step, quiet=quiet)
        sinks: list[logs.Sink] = []
        if self.is_first:
            config_values = self.config.model_dump(mode="json")
            sinks = [*logs.open_sinks(self.config.logging, config_values, self.folder, self.run_id), self.observer]
        redone, stop = start_point.counters.steps_redone, optimizer.nonfinite == "stop"
        goodput = Goodput(self.began, start_point.step, logged.step)
        sources = self.config.data.sources
        return MetricsReporter(sinks, progress, StepWork.of(self.session), goodput, redone, stop, sources)

    def _logged(self) -> start.LoggedProgress:
        path = os.path.join(self.folder, run_folder.METRICS)
        if not self.is_first:
            return start.LoggedProgress()
        logs.cut_broken_end(path)
        expert_load.cut_broken_end(self.folder)
        samples.cut_broken_end(self.folder)
        last = next(reversed(logs.read_json_lines(path)), {"step": 0})
        return start.LoggedProgress(last["step"], int(last.get("train/steps_redone") or 0))

    def _record(self, step: int) -> dict[str, float]:
        """The scalars of a step that this run wrote before it was resumed, if the metrics file has them."""
        records = logs.read_json_lines(os.path.join(self.folder, run_folder.METRICS)) if self.is_first else []
        scalars: dict[str, float] = next((record for record in reversed(records) if record["step"] == step), {})
        return {name: value for name, value in scalars.items() if name != "step" and value is not None}

    def _publish(self, *, last: bool) -> None:
        """Draw the plots, if the last ones are old enough. Copy the plots and the metrics of a run in a bucket
        there."""
        if not self.is_first or not os.path.exists(os.path.join(self.folder, run_folder.METRICS)):
            return
        if self.config.logging.plot:
            self.loss_plot.update(last=last)
            if last:
                self.experts_plot.update(last=True)
        run_folder.publish(self.config.checkpoint.root, self.folder)
