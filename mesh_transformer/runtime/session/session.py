"""A config brought to the devices at hand: the mesh, the model and where its arrays lie."""

import dataclasses
from typing import Any, Self

import jax
import numpy as np

from mesh_transformer.config import Config, MeshShape
from mesh_transformer.models.model import Placement
from mesh_transformer.parallel.mesh import process_rows


@dataclasses.dataclass(frozen=True)
class Session:
    """What a job needs to compute: nothing is compiled or allocated yet."""

    config: Config
    shape: MeshShape
    placement: Placement

    @classmethod
    def open(cls, config: Config) -> Self:
        """Lay the mesh over all devices, and the model over the mesh.

        Raises:
            UserError: the devices do not fit the mesh.
        """
        return cls(config, config.mesh.shape(jax.device_count()), Placement.of(config, jax.devices()))

    @property
    def microbatch(self) -> int:
        """Sequences of one microbatch over the whole mesh."""
        return self.config.microbatch(self.shape)

    def rows(self, batch: int) -> tuple[int, ...]:
        """The sequences of a global batch that this process's devices hold, ascending."""
        return process_rows(self._batch_sharding, batch, jax.process_index())

    def place_batch(self, tokens: np.ndarray) -> jax.Array:
        """This process's (A, rows, T + 1) of a training batch, as part of the global array."""
        shape = (len(tokens), self.microbatch, tokens.shape[-1])
        sharding = self.placement.partition.sharding(None, "batch", None)
        return jax.make_array_from_process_local_data(sharding, tokens, shape)

    def place_eval(self, tokens: np.ndarray) -> jax.Array:
        """This process's (rows, T + 1) of a validation batch, as part of the global array."""
        shape = (self.val_batch, tokens.shape[-1])
        return jax.make_array_from_process_local_data(self._batch_sharding, tokens, shape)

    @property
    def _batch_sharding(self) -> jax.sharding.NamedSharding:
        return self.placement.partition.sharding("batch", None)

    @property
    def val_batch(self) -> int:
        """Sequences of one validation batch over the whole mesh."""
        return self.microbatch * self.config.data.val_batch_multiplier

    @property
    def sequences_per_step(self) -> int:
        """Sequences that one step trains on, over the whole mesh."""
        return self.microbatch * self.config.optimizer.gradient_accumulation_steps

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one step trains on, over the whole mesh."""
        return self.sequences_per_step * self.config.seq

    def describe(self) -> str:
        """One line: size, devices, mesh, tokens a step."""
        axes = " x ".join(f"{name} {size}" for name, size in self.shape.items())
        device, model = jax.devices()[0].device_kind, self.placement.model
        return (
            f"{count_parameters(self.placement.abstract(model.dtype)):,} parameters; {jax.device_count()} x {device} "
            f"in {jax.process_count()} process(es): {axes}; {model.dtype}; "
            f"{self.tokens_per_step:,} tokens a step"
        )


def count_parameters(params: Any) -> int:
    """Elements of all arrays of a tree, abstract or not."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))
