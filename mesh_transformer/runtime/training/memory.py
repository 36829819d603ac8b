"""Refuses a training run that does not fit the memory of its devices, before the first array is allocated."""

import jax

from mesh_transformer.accelerators import of_device
from mesh_transformer.estimate import closed_form
from mesh_transformer.logs import log
from mesh_transformer.runtime.session import memory
from mesh_transformer.runtime.session.session import Session
from mesh_transformer.train.memory import training_arrays
from mesh_transformer.train.step import TrainProgram


def check_training(session: Session, program: TrainProgram) -> None:
    """Refuse a run whose state and gradients do not fit, and warn of one whose estimated step does not. All processes
    must call this function.

    Raises:
        UserError: the arrays that must exist do not fit.
    """
    arrays = training_arrays(program)
    advice = "use a smaller model, or split it over more memory (mesh.fsdp)"
    if 2 * arrays["moments"] > arrays["parameters"]:
        advice += ", or store less for each parameter (optimizer.name=adafactor)"
    room = memory.check(session, "training", arrays, advice)
    if room is None or jax.process_index() > 0 or closed_form.unmodelled(session.config):
        return
    resolved = session.config.model_copy(update={"compute": program.model.compute})
    devices = program.partition.devices.flat
    uses = closed_form.step_gib(resolved, len(devices), of_device(devices[0].device_kind))
    needed = room.gib_of(uses)
    if needed > room.gib:
        log.warning(
            "a step may not fit: it needs about %.1f GiB by the closed form of preflight (%s), and %s has %.1f GiB "
            "left; if it does not fit, use a smaller batch with more optimizer.gradient_accumulation_steps, or "
            "compute.remat=full",
            *(needed, room.listed(uses), room.limit, room.gib),
        )
