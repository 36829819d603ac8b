"""The training job: the same for one process, several processes and the workers of a pod."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Self

import jax
import numpy as np
from jax.experimental import multihost_utils

from mesh_transformer import files, logs, platforms
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.config import Config, load_config
from mesh_transformer.data.loader import Loader
from mesh_transformer.errors import RunError, UserError, is_disk_full
from mesh_transformer.logs import Progress, log
from mesh_transformer.models.model import Params
from mesh_transformer.runtime.evaluation.command import RunEvaluation
from mesh_transformer.runtime.session.session import Session
from mesh_transformer.runtime.training import run_folder, start
from mesh_transformer.runtime.training.ending import Ending
from mesh_transformer.runtime.training.feeds import open_train_feed, open_val_feed
from mesh_transformer.runtime.training.observer import Observer
from mesh_transformer.runtime.training.report import MetricsReporter, plot_losses
from mesh_transformer.stop_signals import StopSignals
from mesh_transformer.train.step import TrainProgram, TrainState

PLOT_EVERY_S = 30.0


def run(config_path: str, overrides: Sequence[str], tune_model_path: str | None, fresh_opt: bool) -> int:
    """Train as device_train.py's arguments say. Returns the process's exit code.

    Raises:
        UserError: the config, the devices, the data or a checkpoint cannot be used.
        RunError: the loss or a gradient is not finite.
    """
    logs.set_up()
    config = load_config(config_path, overrides)
    ending = train(config, start.Source(tune_model_path, fresh_opt))
    if jax.process_index() == 0:
        log.info("%s", ending.told(config_path, overrides))
    return ending.code


def train(
    config: Config,
    source: start.Source,
    observer: Observer | None = None,
    open_feed: Callable[[Session], Loader] = open_train_feed,
) -> Ending:
    """Join the other processes, if the environment names them, and train: in any process that is to train.

    Args:
        observer: told of steps, phases and metrics.
        open_feed: where the batches come from, if this process is not to read them itself.

    Raises:
        UserError, RunError: as `run`.
    """
    compiled = platforms.CompileCache()
    platforms.start_distributed()
    with Interrupt() as interrupt:
        session, observer = Session.open(config), observer or Observer()
        observer.phase("open", 0)
        config.check_devices(jax.device_count())
        ending = TrainingRun(session, source, interrupt, observer, open_feed(session)).train()
    log.info("%s", compiled)
    return ending


class Interrupt(StopSignals):
    """While active, SIGTERM and Ctrl-C ask the run to stop instead of ending the process.

    In a job of several processes any one's SIGTERM stops all of them, after the same step: JAX's coordination
    service agrees on it. A second Ctrl-C ends a single process at once. Processes may differ in `received`: use
    `exit_code` to agree on it.
    """

    def __init__(self) -> None:
        super().__init__("saving after this step")

    def __enter__(self) -> Self:
        if jax.process_count() == 1:
            super().__enter__()
        return self

    def exit_code(self, step: int) -> int | None:
        """128 + the signal if the run must save after `step` and leave, else None. Call at every step."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self.received = signal.SIGTERM
        return None if self.received is None else 128 + self.received


class TrainingRun:
    """One run of the loop, from its start or resume to its last step or an interruption."""

    def __init__(
        self, session: Session, source: start.Source, interrupt: Interrupt, observer: Observer, feed: Loader
    ):
        self.interrupt, self.observer = interrupt, observer
        self.session, self.config, self.source, self.feed = session, session.config, source, feed
        self.program = TrainProgram(session.placement, self.config)
        self.validation = Validation(session, self.program, self._stop_requested)
        self.evaluation = RunEvaluation(session, self._stop_requested)
        self.folder = self.config.checkpoint.model_dir
        self.is_first = jax.process_index() == 0
        self.lock: run_folder.RunLock | None = None
        self.next_plot = time.monotonic() + PLOT_EVERY_S

    def train(self) -> Ending:
        """Run to total_steps, or until interrupted.

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
            run_folder.check_shared(root)
            return self._train()

    @contextlib.contextmanager
    def _explain_disk_errors(self) -> Iterator[None]:
        """Errors inside that come of a full disk, or of a folder that is gone, become RunErrors that say so."""
        try:
            yield
        except (UserError, RunError):
            raise
        except Exception as error:
            self._check_folder()
            if not is_disk_full(error):
                raise
            steps = CheckpointStore(self.config.checkpoint.root, read_only=True).steps()
            last = (
                f"the newest whole checkpoint is step_{steps[-1]}" if steps else "there is no checkpoint yet"
            )
            raise RunError(
                f"{self.folder}: no space is left on the disk, or the quota is used up; {last}. Free some space and run "
                f"the same command again: it goes on from there"
            ) from error

    def _stop_requested(self) -> bool:
        return self.interrupt.received is not None

    def _check_folder(self) -> None:
        """Raises RunError if the folder of a local run has been deleted or moved away: there is nowhere to save."""
        local = not files.is_remote(self.config.checkpoint.root)
        if local and self.lock is not None and not self.lock.still_in_place():
            raise RunError(
                f"{self.folder} was deleted or moved away during the run, with its checkpoints and metrics: put it back and "
                f"run the same command again, or run it to begin anew"
            )

    def _train(self) -> Ending:
        settings, total = self.config.checkpoint, self.config.optimizer.total_steps
        log.info("%s", self.session.describe())
        self.store = store = CheckpointStore(
            settings.root,
            keep_every=settings.keep_every,
            keep_latest=settings.keep_latest,
            model=self.config.model,
            optimizer=self.config.optimizer,
        )
        try:
            start_point = start.resume_or_start(
                self.session, self.program, store, self.source, self._logged()
            )
            if start_point.loader_state is not None:
                self.feed.set_state(start_point.loader_state)
            with self._open_report(start_point) as report:
                self.observer.started(start_point.step, total, start_point.counters.steps_redone)
                code, step = self._loop(start_point, report)
        finally:
            # the save under way may wait for a process whose disk is full too: `close` would wait for it
            if jax.process_count() == 1 or not is_disk_full(sys.exception()):
                store.close()
        self._publish(last=True)
        newest = files.join(settings.root, f"step_{step}")
        return Ending(code, start_point.step, step, total, report.val_loss, newest)

    def _loop(self, start_point: start.StartPoint, report: MetricsReporter) -> tuple[int, int]:
        """The exit code, and the step after which the run ended."""
        total, data, state = self.config.optimizer.total_steps, self.config.data, start_point.state
        for step in range(start_point.step + 1, total + 1):
            self.observer.phase("data", step)
            tokens = self.session.place_batch(next(self.feed))
            # the first step's numbers are awaited when the second one has been dispatched
            self.observer.phase("step" if step > start_point.step + 2 else "compile", step)
            state, metrics = self.program.train_step(state, tokens)
            report.push(step, metrics)
            if step % data.val_every == 0 or step == total:
                self._validate(step, state, report)
            code = self.interrupt.exit_code(step)
            if step % self.config.checkpoint.ckpt_every == 0 or step == total or code is not None:
                self._save(step, state, start_point, report)
            if code is not None:
                self.observer.phase("finish", step)
                return code, step
        self.observer.phase("finish", total)  # what is still being written
        return 0, max(start_point.step, total)

    def _validate(self, step: int, state: TrainState, report: MetricsReporter) -> None:
        if not self.validation and not self.evaluation:
            return
        report.settle()
        self.observer.phase("validate", step)
        with report.pause():
            measured = {**self.validation.run(state.params, step), **self.evaluation.run(state.params)}
            report.add(measured)
        if self.is_first and measured:
            numbers = (f"{name} {value:.4f}" for name, value in measured.items())
            log.info("step %d: %s", step, "  ".join(numbers))

    def _save(
        self, step: int, state: TrainState, start_point: start.StartPoint, report: MetricsReporter
    ) -> None:
        """Save the state after `step`, once that step is known to be finite."""
        report.settle()
        self.observer.phase("save", step)
        self._check_folder()
        with report.pause():
            tokens = start_point.counters.tokens + (step - start_point.step) * self.session.tokens_per_step
            extra = {
                "loader": self.feed.get_state(),
                "counters": start_point.counters._replace(tokens=tokens)._asdict(),
                "config": self.config.model_dump(mode="json"),
            }
            self.store.save(step, state, extra)
            self._publish(last=False)

    def _open_report(self, start_point: start.StartPoint) -> MetricsReporter:
        optimizer, quiet = self.config.optimizer, not self.is_first or self.observer.shows_progress
        progress = Progress(
            "training", optimizer.total_steps, unit="step", done=start_point.step, quiet=quiet
        )
        sinks: list[logs.Sink] = []
        if self.is_first:
            whole = self.config.model_dump(mode="json")
            sinks = [*logs.open_sinks(self.config.logging, whole, self.folder, self.run_id), self.observer]
        redone, stop = start_point.counters.steps_redone, optimizer.nonfinite == "stop"
        return MetricsReporter(sinks, progress, self.session.tokens_per_step, redone, stop)

    def _logged(self) -> start.LoggedProgress:
        path = os.path.join(self.folder, run_folder.METRICS)
        if not self.is_first:
            return start.LoggedProgress()
        logs.cut_broken_end(path)
        last = next(reversed(logs.read_json_lines(path)), {"step": 0})
        return start.LoggedProgress(last["step"], int(last.get("train/steps_redone") or 0))

    def _plot(self) -> None:
        """Redraw the loss curve, which must neither stop the run nor take more than a twentieth of its time."""
        began = time.monotonic()
        try:
            plot_losses(self.folder)
        except Exception as error:  # noqa: BLE001  (a picture is not worth a run)
            if not is_disk_full(error):  # that ends the run in a moment, with a line of its own
                log.warning("the loss curve was not drawn: %s", error)
        now = time.monotonic()
        self.next_plot = now + max(PLOT_EVERY_S, 20 * (now - began))

    def _publish(self, *, last: bool) -> None:
        """Redraw the loss curve, not too often; for a run in a bucket, copy it and the metrics there."""
        if not self.is_first or not os.path.exists(os.path.join(self.folder, run_folder.METRICS)):
            return
        if last or time.monotonic() > self.next_plot:
            self._plot()
        run_folder.publish(self.config.checkpoint.root, self.folder)


class Validation:
    """Reads val_batches batches of every set, or one whole pass if it has fewer, from its beginning each time.

    Args:
        stop: asked before each batch whether to leave, in a job of one process: several cannot leave a batch apart.

    Raises:
        UserError: on construction, if a set cannot be read.
    """

    def __init__(self, session: Session, program: TrainProgram, stop: Callable[[], bool]):
        self._session, self._program, self._stop = session, program, stop
        data = session.config.data
        sources = data.val_set if data.val_batches else {}
        self._feeds = {name: open_val_feed(session, source) for name, source in sources.items()}

    def __bool__(self) -> bool:
        """Whether there is anything to validate on."""
        return bool(self._feeds)

    def run(self, params: Params, step: int) -> dict[str, float]:
        """{"val/loss_<set>": nats per token without z-loss, "val/accuracy_<set>": share of right predictions}.

        Sets that are not done when `stop()` says so are left out.
        """
        scalars = {}
        for name, feed in self._feeds.items():
            results = self._evaluate(name, feed, params, step)
            if not results:
                break
            for metric in ("loss", "accuracy"):
                scalars[f"val/{metric}_{name}"] = float(np.mean([result[metric] for result in results]))
        return scalars

    def _evaluate(
        self, name: str, batches: Iterable[np.ndarray], params: Params, step: int
    ) -> list[dict[str, float]]:
        n = self._session.config.data.val_batches
        quiet = jax.process_index() > 0
        progress = Progress(f"validating {name} after step {step}", n, unit="batch", leave=False, quiet=quiet)
        results = []
        for i, tokens in zip(range(1, n + 1), batches, strict=False):
            if jax.process_count() == 1 and self._stop():
                return []
            results.append(self._program.eval_step(params, self._session.place_eval(tokens)))
            jax.block_until_ready(results[-2:-1])  # one batch waits for the device, and what is told is done
            progress.update(i)
        progress.close()
        return jax.device_get(results)
