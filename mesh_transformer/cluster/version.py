"""--version: 1 splits matrices over the cores of a replica (tp), 2 splits weights and optimizer state over them (fsdp)."""

from __future__ import annotations

from mesh_transformer.config import Config, parse_config
from mesh_transformer.errors import UserError


def as_version(config: Config, version: int) -> Config:
    """The same run with the mesh of `version`. A step trains on as many sequences as before.

    In version 2 each core takes whole sequences, so microbatches grow and there are fewer of them.

    Raises:
        UserError: the sequences of a step do not divide over the cores.
    """
    cores = config.mesh.tp
    if version == 1 or cores == 1:
        return config
    raw = config.model_dump(mode="json")
    raw["mesh"] |= {"fsdp": config.mesh.fsdp * cores, "tp": 1}
    if config.data.batch_size is None:
        each, microbatches = config.data.per_replica_batch or 1, config.optimizer.gradient_accumulation_steps
        core_batch = each // cores if each % cores == 0 else 1
        if each * microbatches % (cores * core_batch):
            raise UserError(
                f"--version 2 gives each of {cores} cores sequences of its own, and a step of {each} (data."
                f"per_replica_batch) x {microbatches} (optimizer.gradient_accumulation_steps) does not divide by {cores}"
            )
        raw["data"]["per_replica_batch"] = core_batch
        raw["optimizer"]["gradient_accumulation_steps"] = each * microbatches // (cores * core_batch)
    return parse_config(raw)
