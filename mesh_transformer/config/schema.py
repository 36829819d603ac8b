"""The whole configuration: its groups, and the checks that span them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, model_validator

from mesh_transformer.config.cluster import ClusterConfig
from mesh_transformer.config.mesh import MeshConfig, MeshShape
from mesh_transformer.config.model import ModelConfig
from mesh_transformer.config.run import CheckpointConfig, DataConfig, LoggingConfig
from mesh_transformer.config.variants import Variants
from mesh_transformer.errors import UserError
from mesh_transformer.fields import Group, check_divides
from mesh_transformer.optimizers import OPTIMIZERS, OptimizerConfig, adam

BYTES_VOCAB = 257  # the `bytes` tokenizer: every byte, and the end of a text


class Config(Group):
    """A whole run."""

    model: ModelConfig
    mesh: MeshConfig = Field(default_factory=lambda: MeshConfig())
    optimizer: Annotated[OptimizerConfig, Variants("name", OPTIMIZERS)] = Field(
        default_factory=lambda: adam.Config()
    )
    data: DataConfig = Field(default_factory=lambda: DataConfig())
    checkpoint: CheckpointConfig = Field(default_factory=lambda: CheckpointConfig())
    logging: LoggingConfig = Field(default_factory=lambda: LoggingConfig())
    cluster: ClusterConfig = Field(default_factory=lambda: ClusterConfig())

    @model_validator(mode="after")
    def _check(self) -> Config:
        self._check_sharded_sizes()
        if self.seq > self.model.seq:
            raise UserError(
                f"data.seq {self.seq} is over the model's limit model.seq {self.model.seq}: "
                f"lower data.seq or raise model.seq"
            )
        if self.data.tokenizer == "bytes" and self.model.n_vocab < BYTES_VOCAB:
            raise UserError(
                f"model.n_vocab {self.model.n_vocab} is under the {BYTES_VOCAB} tokens of data.tokenizer bytes: "
                f"set model.n_vocab to {BYTES_VOCAB} or more"
            )
        return self

    def _check_sharded_sizes(self) -> None:
        model, mesh = self.model, self.mesh
        check_divides("model.n_heads", model.n_heads, "mesh.tp", mesh.tp)
        check_divides("model.d_ff", model.d_ff, "mesh.tp", mesh.tp)
        check_divides("model.d_model", model.d_model, "mesh.fsdp", mesh.fsdp)
        if model.padded_vocab % mesh.tp:
            raise UserError(
                f"the padded vocabulary {model.padded_vocab} (model.n_vocab {model.n_vocab} rounded up to "
                f"model.vocab_multiple {model.vocab_multiple}) is not divisible by mesh.tp {mesh.tp}: "
                f"set model.vocab_multiple to {math.lcm(model.vocab_multiple, mesh.tp)}, or change mesh.tp"
            )
        if mesh.shard_activations:
            also = "mesh.shard_activations=false"
            check_divides("the sequence length data.seq", self.seq, "mesh.tp", mesh.tp, also)
        if self.data.batch_size is not None:
            replicas = (mesh.dp or 1) * mesh.fsdp
            check_divides("data.batch_size", self.data.batch_size, "mesh.dp x mesh.fsdp", replicas)

    @property
    def seq(self) -> int:
        """Tokens of a training sequence."""
        return self.data.seq or self.model.seq

    def microbatch(self, shape: MeshShape) -> int:
        """Sequences of one microbatch over the whole mesh.

        Raises:
            UserError: data.batch_size does not divide over dp x fsdp.
        """
        if self.data.batch_size is None:
            return (self.data.per_replica_batch or 1) * shape.replicas
        check_divides("data.batch_size", self.data.batch_size, "mesh.dp x mesh.fsdp", shape.replicas)
        return self.data.batch_size

    def check_devices(self, n_devices: int) -> MeshShape:
        """The mesh shape for `n_devices`, after every check that depends on it.

        Raises:
            UserError: the axes, the batch or ZeRO-1 do not fit these devices.
        """
        shape = self.mesh.shape(n_devices)
        self.microbatch(shape)
        if self.mesh.zero1:
            also = "mesh.zero1=false"
            check_divides("model.d_model", self.model.d_model, "mesh.dp x mesh.fsdp", shape.replicas, also)
        return shape


VARIANTS: dict[str, Variants] = {
    name: mark
    for name, field in Config.model_fields.items()
    for mark in field.metadata
    if isinstance(mark, Variants)
}
"""The groups whose class one of their fields chooses."""

GROUPS: dict[str, Any] = {
    name: VARIANTS[name].merged if name in VARIANTS else field.annotation
    for name, field in Config.model_fields.items()
}
"""Every group, a subclass of `Group` with all fields that may stand in it."""


def class_at(place: Sequence[str]) -> tuple[type[Group], list[str]]:
    """The class of the group that a validation error is in, and the place inside it: pydantic names the variant too."""
    group, *inside = place
    if group not in VARIANTS:
        return GROUPS[group], inside
    variant, *inside = inside or [VARIANTS[group].chosen({})]
    return VARIANTS[group].classes[variant], inside
