"""Where the time of a step goes: a trace of a few steps, for TensorBoard's profile plugin and Perfetto, and the table
of the compiled step's operations."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import jax
from jax.experimental import multihost_utils

from mesh_transformer import accelerators
from mesh_transformer.config import Config
from mesh_transformer.estimate.op_table import write_op_table
from mesh_transformer.logs import log
from mesh_transformer.models.stack import LAYER_LOOP
from mesh_transformer.runtime.training import run_folder
from mesh_transformer.runtime.training.observer import Observer
from mesh_transformer.runtime.training.report import MetricsReporter
from mesh_transformer.train.step import TrainProgram, compile_step

OP_TABLE = "op_table.tsv"


class StepProfile:
    """A context manager that traces the steps `logging.profile_steps`, as far as this process computes them.

    Process 0 traces itself and its devices. The trace starts after the step before the first one has ended, and stops
    after the last step has ended, so that it has whole steps. If the run ends earlier, the trace ends with it. The
    files are in model_dir/profile/plugins/profile/TIME/, and also in the bucket of a run in a bucket.

    Args:
        computed: the steps that this process computes.
        report: waits for a step, and excludes the time of the trace's files from the time of a step.
        observer: gets the phase `save` while process 0 writes the trace.
        wait_for_save: returns when no checkpoint is being written.
    """

    def __init__(
        self,
        config: Config,
        computed: range,
        report: MetricsReporter,
        observer: Observer,
        wait_for_save: Callable[[], None],
    ):
        self._wait_for_save = wait_for_save
        self._settings, self._report, self._observer = config.checkpoint, report, observer
        self._is_first, self._running = jax.process_index() == 0, False
        self._folder = os.path.join(config.checkpoint.model_dir, run_folder.PROFILE)
        wanted = config.logging.profile_steps
        first, last = wanted or (1, 0)
        self._steps = range(max(first, computed.start), min(last + 1, computed.stop))
        # the newest step that the trace has
        self._last = 0
        if wanted and not self._steps:
            steps = f"steps {computed[0]} to {computed[-1]}" if computed else "no step"
            log.info("logging.profile_steps [%d, %d]: no trace, because this start computes %s", first, last, steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Write the trace if the run ended inside it."""
        if self._running:
            # after an error, the save may wait for a process that has failed
            self._write(beside_a_save=error is not None)

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Surrounds the wait for a batch and the dispatch of its step."""
        if step not in self._steps:
            yield
            return
        if step == self._steps[0] and self._is_first:
            self._start()
        self._last = step
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield
        if step == self._steps[-1]:
            self._stop(step)

    def _start(self) -> None:
        self._report.settle()
        with self._report.pause():
            jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
            self._running = True

    def _stop(self, step: int) -> None:
        """Wait for the step, and write the trace. All processes wait for process 0."""
        self._report.settle()
        self._observer.phase("save", step)
        with self._report.pause():
            if self._is_first:
                self._write()
            # the driver would take a wait inside the next step for a hang
            if jax.process_count() > 1:
                multihost_utils.sync_global_devices("mesh_transformer: trace written")

    def _write(self, *, beside_a_save: bool = False) -> None:
        self._running = False
        # JAX's profiler crashed a process when it stopped while threads of a save ended
        if not beside_a_save:
            self._wait_for_save()
        jax.profiler.stop_trace()
        run_folder.publish_profile(self._settings.root, self._settings.model_dir)
        log.info("trace of steps %d to %d written to %s", self._steps[0], self._last, self._folder)


def write_step_table(program: TrainProgram) -> None:
    """Write the operations of the training step to model_dir/profile/op_table.tsv (`estimate/op_table.py`).

    All processes compile the step; process 0 writes. The run then reads the program from the compile cache.
    """
    config, mesh = program.config, program.partition.mesh
    batch = config.microbatch(dict(mesh.shape))
    log.info("compiling: training step, for the table of its operations")
    compiled = compile_step(program, config.optimizer.gradient_accumulation_steps, batch)
    if jax.process_index() > 0:
        return
    settings = config.checkpoint
    path = Path(settings.model_dir, run_folder.PROFILE, OP_TABLE)
    path.parent.mkdir(parents=True, exist_ok=True)
    accelerator = accelerators.of_device(mesh.devices.flat[0].device_kind)
    trips = program.model.decoder.loop_trips(config.mesh.virtual_stages(dict(mesh.shape)))
    write_op_table(path, compiled.as_text() or "", accelerator, {LAYER_LOOP: trips})
    run_folder.publish_profile(settings.root, settings.model_dir)
    log.info("operations of the training step written to %s", path)
