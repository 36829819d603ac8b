"""The whole configuration: its groups, and the checks that span them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, model_validator

from mesh_transformer.config.cluster import ClusterConfig
from mesh_transformer.config.compute import ComputeConfig
from mesh_transformer.config.divisibility import Sizes, check_sizes
from mesh_transformer.config.mesh import MeshConfig, MeshShape, mesh_shape, parts, training_rules
from mesh_transformer.config.run import CheckpointConfig, DataConfig, LoggingConfig
from mesh_transformer.config.variants import Variants
from mesh_transformer.errors import UserError
from mesh_transformer.families import FAMILIES
from mesh_transformer.families.base import ModelConfig
from mesh_transformer.fields import Group, Size
from mesh_transformer.optimizers import OPTIMIZERS, OptimizerConfig, adam

BYTES_VOCAB = 257  # the `bytes` tokenizer: every byte, and the end of a text


class Config(Group):
    """A whole run."""

    model: Annotated[ModelConfig, Variants("family", FAMILIES)]
    mesh: MeshConfig = Field(default_factory=lambda: MeshConfig())
    compute: ComputeConfig = Field(default_factory=lambda: ComputeConfig())
    optimizer: Annotated[OptimizerConfig, Variants("name", OPTIMIZERS)] = Field(
        default_factory=lambda: adam.Config()
    )
    data: DataConfig = Field(default_factory=lambda: DataConfig())
    checkpoint: CheckpointConfig = Field(default_factory=lambda: CheckpointConfig())
    logging: LoggingConfig = Field(default_factory=lambda: LoggingConfig())
    cluster: ClusterConfig = Field(default_factory=lambda: ClusterConfig())

    @model_validator(mode="after")
    def _check(self) -> Config:
        check_sizes(self.sizes, self.mesh, mesh_shape(**self.mesh.given))
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

    @property
    def seq(self) -> int:
        """Tokens of a training sequence."""
        return self.data.seq or self.model.seq

    @property
    def sizes(self) -> Sizes:
        """The named dimensions, with the fields that give their sizes."""
        batch, seq = self.data.batch_size, [Size("data.seq", self.seq)]
        batches = [Size("data.batch_size", batch)] if batch else []
        return {"batch": batches, "seq": seq, "block_seq": seq, **self.model.decoder().sizes}

    def microbatch(self, shape: MeshShape) -> int:
        """Sequences of one microbatch over the whole mesh.

        Raises:
            UserError: the axes that split the batch do not divide data.batch_size.
        """
        check_sizes({"batch": self.sizes["batch"]}, self.mesh, shape)
        replicas = parts(shape, training_rules(self.mesh), "batch")
        return self.data.batch_size or (self.data.per_replica_batch or 1) * replicas

    def check_devices(self, n_devices: int) -> MeshShape:
        """The mesh shape for `n_devices`, after every check that depends on it.

        Raises:
            UserError: the axes do not fit these devices, or do not divide a size.
        """
        shape = self.mesh.shape(n_devices)
        check_sizes(self.sizes, self.mesh, shape)
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
