"""The training job: the same for one process, several processes and the workers of a pod."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import jax

from mesh_transformer import logs, platforms
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.config import Config, load_config
from mesh_transformer.data.loader import Loader
from mesh_transformer.errors import UserError
from mesh_transformer.logs import Progress, log
from mesh_transformer.runtime import start
from mesh_transformer.runtime.evals.in_training import Evaluation
from mesh_transformer.runtime.feeds import open_train_feed
from mesh_transformer.runtime.interrupt import Interrupt
from mesh_transformer.runtime.observer import Observer, ObserverSink
from mesh_transformer.runtime.report import Report, plot_losses
from mesh_transformer.runtime.run_folder import METRICS, publish, take_up
from mesh_transformer.runtime.session import Session
from mesh_transformer.runtime.shared_folder import check_shared
from mesh_transformer.runtime.validation import Validation
from mesh_transformer.train.step import TrainState

DRAW_EVERY_S = 30.0


def run(config_path: str, overrides: Sequence[str], tune_model_path: str | None, fresh_opt: bool) -> int:
    """Train as device_train.py's arguments say. Returns the process's exit code.

    Raises:
        UserError: the config, the devices, the data or a checkpoint cannot be used.
        RunError: the loss or a gradient is not finite.
    """
    logs.set_up()
    config = load_config(config_path, overrides)
    if fresh_opt and not tune_model_path:
        raise UserError("--fresh-opt drops the Adam moments of --tune-model-path: give that too")
    return train(config, start.Source(tune_model_path, fresh_opt))


def train(
    config: Config,
    source: start.Source,
    observer: Observer | None = None,
    open_feed: Callable[[Session], Loader] = open_train_feed,
) -> int:
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
        code = TrainingRun(session, source, interrupt, observer, open_feed).train()
    log.info("%s", compiled)
    return code


class TrainingRun:
    """One run of the loop, from its start or resume to its last step or an interruption."""

    def __init__(
        self,
        session: Session,
        source: start.Source,
        interrupt: Interrupt,
        observer: Observer,
        open_feed: Callable[[Session], Loader],
    ):
        self.interrupt, self.observer = interrupt, observer
        self.session, self.config, self.source = session, session.config, source
        self.config.check_devices(jax.device_count())
        self.feed = open_feed(session)
        self.validation = Validation(session)
        self.evaluation = Evaluation(session, lambda: interrupt.noted)
        self.folder = self.config.checkpoint.model_dir
        self.is_first = jax.process_index() == 0
        self.draw_at = time.monotonic() + DRAW_EVERY_S
        if self.is_first:
            self.run_id = take_up(self.config.checkpoint.root, self.folder)
        check_shared(self.config.checkpoint.root)

    def train(self) -> int:
        """Run to total_steps, or until interrupted. Returns the exit code: 0, or 128 + the signal."""
        settings = self.config.checkpoint
        log.info("%s", self.session.describe())
        store = CheckpointStore(
            settings.root,
            keep_every=settings.keep_every,
            keep_latest=settings.keep_latest,
            model=self.config.model,
        )
        try:
            begun = start.begin(self.session, store, self.source, self._logged())
            if begun.loader_state is not None:
                self.feed.set_state(begun.loader_state)
            with self._open_report(begun) as report:
                self.observer.begun(
                    begun.step, self.config.optimizer.total_steps, begun.counters.steps_redone
                )
                code = self._loop(begun, store, report)
        finally:
            store.close()
        self._publish(last=True)
        return code

    def _loop(self, begun: start.Begun, store: CheckpointStore, report: Report) -> int:
        total, data, state = self.config.optimizer.total_steps, self.config.data, begun.state
        if begun.step >= total:
            log.info("the run is complete: %d of %d steps", begun.step, total)
        for step in range(begun.step + 1, total + 1):
            self.observer.phase("data", step)
            tokens = self.session.place_batch(next(self.feed))
            # the first step's numbers are awaited when the second one has been dispatched
            self.observer.phase("step" if step > begun.step + 2 else "compile", step)
            state, metrics = self.session.program.train_step(state, tokens)
            report.push(step, metrics)
            if step % data.val_every == 0 or step == total:
                self._validate(step, state, report)
            code = self.interrupt.exit_code(step)
            if step % self.config.checkpoint.ckpt_every == 0 or step == total or code is not None:
                self._save(step, state, begun, store, report)
            if code is not None:
                self.observer.phase("leave", step)
                log.info("saved after step %d; the same command goes on from there", step)
                return code
        self.observer.phase("leave", total)  # what is still being written
        return 0

    def _validate(self, step: int, state: TrainState, report: Report) -> None:
        if not self.validation and not self.evaluation:
            return
        report.settle()
        self.observer.phase("validate", step)
        with report.pause():
            report.add(self.validation.run(state.params, step, lambda: self.interrupt.noted))
            report.add(self.evaluation.run(state.params))

    def _save(
        self, step: int, state: TrainState, begun: start.Begun, store: CheckpointStore, report: Report
    ) -> None:
        """Save the state after `step`, once that step is known to be finite."""
        report.settle()
        self.observer.phase("save", step)
        with report.pause():
            tokens = begun.counters.tokens + (step - begun.step) * self.session.tokens_per_step
            extra = {
                "loader": self.feed.get_state(),
                "counters": begun.counters._replace(tokens=tokens)._asdict(),
                "config": self.config.model_dump(mode="json"),
            }
            store.save(step, state, extra)
            self._publish(last=False)

    def _open_report(self, begun: start.Begun) -> Report:
        optimizer = self.config.optimizer
        progress = Progress(
            "training",
            optimizer.total_steps,
            unit="step",
            done=begun.step,
            quiet=not self.is_first or self.observer.shows_progress,
        )
        sinks: list[logs.Sink] = []
        if self.is_first:
            whole = self.config.model_dump(mode="json")
            sinks = logs.open_sinks(self.config.logging, whole, self.folder, self.run_id)
            sinks.append(ObserverSink(self.observer))
        report = Report(sinks, progress, self.session.tokens_per_step, optimizer.nonfinite == "stop")
        report.constant["train/steps_redone"] = begun.counters.steps_redone
        return report

    def _logged(self) -> start.Logged:
        if not self.is_first:
            return start.Logged()
        path = os.path.join(self.folder, METRICS)
        logs.cut_broken_end(path)
        records = logs.read_json_lines(path)
        if not records:
            return start.Logged()
        return start.Logged(records[-1]["step"], int(records[-1].get("train/steps_redone") or 0))

    def _draw(self) -> None:
        """Redraw the loss curve, which must neither stop the run nor take more than a twentieth of its time."""
        began = time.monotonic()
        try:
            plot_losses(self.folder)
        except Exception as error:  # noqa: BLE001  (a picture is not worth a run)
            log.warning("the loss curve was not drawn: %s", error)
        now = time.monotonic()
        self.draw_at = now + max(DRAW_EVERY_S, 20 * (now - began))

    def _publish(self, *, last: bool) -> None:
        """Redraw the loss curve, not too often; for a run in a bucket, copy it and the metrics there."""
        if not self.is_first or not os.path.exists(os.path.join(self.folder, METRICS)):
            return
        if last or time.monotonic() > self.draw_at:
            self._draw()
        publish(self.config.checkpoint.root, self.folder)
