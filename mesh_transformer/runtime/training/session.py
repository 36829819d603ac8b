"""The session of a training run."""

import dataclasses

import jax

from mesh_transformer.accelerators import of_device
from mesh_transformer.config import Config
from mesh_transformer.environment import command
from mesh_transformer.errors import set_options
from mesh_transformer.estimate import overlap
from mesh_transformer.estimate.search import faster
from mesh_transformer.logs import log
from mesh_transformer.models.placement import Placement
from mesh_transformer.parallel.pipeline import Ticks
from mesh_transformer.platforms import by_slice
from mesh_transformer.runtime.session.session import Session
from mesh_transformer.runtime.training.provenance import PACKING, Provenance, keep_resolved, resolved
from mesh_transformer.sequences import Sequences


def open_session(config: Config, tokenizer_files: str | None = None, before: Provenance | None = None) -> Session:
    """`Session.open` with `mesh.overlap_tp` "auto" decided for the training step.

    Args:
        before: the provenance of the checkpoint from which the run resumes: see `keep_resolved`.

    Raises:
        UserError: the devices do not fit the mesh.
    """
    session = Session.open(config, tokenizer_files)
    decided = overlap.resolve_for(config, jax.devices())
    if config.mesh.overlap_tp == "auto" and decided.mesh.overlap_tp:
        session = dataclasses.replace(session, placement=Placement.of(decided, jax.devices()))
    session = keep_resolved(session, decided, before)
    if config.mesh.overlap_tp == "auto" and session.placement.partition.overlap_tp:
        log.info("mesh.overlap_tp auto is true: the closed form of preflight estimates a shorter step")
    return session


def suggest_a_faster_step(session: Session) -> None:
    """On a TPU slice, log the overrides of `preflight.py --search` if the closed form estimates a faster step."""
    devices = jax.devices()
    accelerator = of_device(devices[0].device_kind)
    if jax.process_index() or accelerator is None or not accelerator.is_tpu or len(by_slice(devices)) > 1:
        return
    suggestion = faster(session.config, len(devices), accelerator)
    if suggestion is not None:
        best, times = suggestion
        log.info(
            "a step is estimated to run %.1f times faster with %s; %s --search compiles it",
            times,
            set_options(*best.overrides),
            command("preflight"),
        )


def note_first_batch(session: Session, sequences: Sequences, before: Provenance | None) -> None:
    """Log that a run has no noise scale, if some targets of its batches do not count in the loss or stages have the
    gradients, and that `data.packing` "auto" follows records of another kind than before a resume."""
    if jax.process_index():
        return
    packing = None if before is None else before.resolved.get(PACKING)
    now = resolved(session, documents=sequences.documents is not None).get(PACKING)
    if packing is not None and now is not None and packing != now:
        log.info("data.packing auto is %s, as the records call for; before the resume it was %s", now, packing)
    if session.shape["pp"] > 1:
        log.info(
            "no noise scale (noise/*) and no train/grad_norm_micro are computed with mesh.pp: the stages would have to "
            "sum the gradient of the head in each microbatch"
        )
    elif sequences.weighted:
        log.info(
            "no noise scale (noise/*) is computed: with documents or loss masks in the records, sequences have "
            "different numbers of learned tokens"
        )


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
