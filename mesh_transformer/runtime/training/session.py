"""The session of a training run."""

import dataclasses

import jax

from mesh_transformer.config import Config
from mesh_transformer.estimate import overlap
from mesh_transformer.logs import log
from mesh_transformer.models.placement import Placement
from mesh_transformer.parallel.pipeline import Ticks
from mesh_transformer.runtime.session.session import Session


def open_session(config: Config, tokenizer_files: str | None = None) -> Session:
    """`Session.open` with `mesh.overlap_tp` "auto" decided for the training step.

    Raises:
        UserError: the devices do not fit the mesh.
    """
    session = Session.open(config, tokenizer_files)
    resolved = overlap.resolve_for(config, jax.devices())
    if config.mesh.overlap_tp != "auto" or not resolved.mesh.overlap_tp:
        return session
    log.info("mesh.overlap_tp auto is true: the closed form of preflight estimates a shorter step")
    return dataclasses.replace(session, placement=Placement.of(resolved, jax.devices()))


def warn_of_idle_stages(session: Session) -> None:
    """Log a warning if the stages of mesh.pp wait for most of the time, because a step has few microbatches."""
    microbatches, stages = session.config.optimizer.gradient_accumulation_steps, session.shape["pp"]
    ticks = Ticks(stages, session.config.mesh.rounds_of_layers, microbatches)
    if jax.process_index() == 0 and microbatches < stages:
        log.warning(
            "optimizer.gradient_accumulation_steps %d is less than mesh.pp %d: a stage waits for %.0f%% of the time; "
            "set it to %d or more",
            microbatches,
            stages,
            100 * ticks.bubble,
            4 * stages,
        )
