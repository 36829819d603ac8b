"""A config on the available devices: the mesh, the model and the shardings of its arrays."""

import dataclasses
import functools
from typing import Any, Self

import jax
import numpy as np

from mesh_transformer.config import Config, MeshShape
from mesh_transformer.config.mesh import named
from mesh_transformer.errors import plural
from mesh_transformer.logs import log
from mesh_transformer.models.placement import Placement
from mesh_transformer.ops.attend.kernels import left_out
from mesh_transformer.parallel.mesh import process_rows
from mesh_transformer.sequences import Sequences


@dataclasses.dataclass(frozen=True)
class Session:
    """A config with its mesh and its model. It compiles and allocates nothing.

    Args:
        tokenizer_files: the folder of the tokenizer of the checkpoint that the run starts from, if there is one.
    """

    config: Config
    shape: MeshShape
    placement: Placement
    tokenizer_files: str | None = None

    @classmethod
    def open(cls, config: Config, tokenizer_files: str | None = None) -> Self:
        """Make the mesh of all devices, and place the model on it. `mesh.overlap_tp` "auto" is false:
        `runtime.training.session` decides it.

        Raises:
            UserError: the devices do not fit the mesh.
        """
        shape = config.mesh.shape(jax.device_count())
        if config.compute.attention == "auto":
            for reason in left_out(jax.devices()[0].platform):
                log.warning("compute.attention auto leaves out %s", reason)
        return cls(config, shape, Placement.of(config, jax.devices()), tokenizer_files)

    @functools.cached_property
    def whole_sequences(self) -> Placement:
        """The placement for sampling, serving and scoring, which split neither the positions of a sequence nor the
        layers."""
        placement, axes = self.placement.whole_sequences(), [axis for axis in ("pp", "cp") if self.shape[axis] > 1]
        if axes:
            as_before = self.placement.partition
            what = next((name for name in ("heads", "embed") if placement.size(name) > as_before.size(name)), None)
            split = {"heads": "heads, as mesh.tp does", "embed": "weights, as mesh.fsdp does", None: "nothing"}[what]
            log.info(
                "sampling and evaluation split neither layers nor positions: %s splits the %s",
                " x ".join(f"mesh.{axis} {self.shape[axis]}" for axis in axes),
                split,
            )
        return placement

    @property
    def tokenizer(self) -> str | None:
        """The tokenizer of texts, for `load_tokenizer`."""
        return self.config.data.tokenizer or self.tokenizer_files

    @property
    def microbatch(self) -> int:
        """Sequences in one microbatch, over the whole mesh."""
        return self.config.microbatch(self.shape)

    def rows(self, batch: int) -> tuple[int, ...]:
        """The indices of the sequences of a global batch that the devices of this process hold, ascending."""
        return process_rows(self._batch_sharding, batch, jax.process_index())

    def place_batch(self, sequences: Sequences) -> Sequences:
        """Make the global arrays of a training batch from this process's part, (A, rows, T + 1)."""
        sharding = self.placement.partition.sharding(None, "batch")

        def place(array: np.ndarray) -> jax.Array:
            shape = (len(array), self.microbatch, *array.shape[2:])
            return jax.make_array_from_process_local_data(sharding, array, shape)

        return sequences.map(place)

    def place_eval(self, sequences: Sequences) -> Sequences:
        """Make the global arrays of a validation batch from this process's part, (rows, T + 1)."""

        def place(array: np.ndarray) -> jax.Array:
            shape = (self.val_batch, *array.shape[1:])
            return jax.make_array_from_process_local_data(self._batch_sharding, array, shape)

        return sequences.map(place)

    @property
    def _batch_sharding(self) -> jax.sharding.NamedSharding:
        return self.placement.partition.sharding("batch")

    @property
    def val_batch(self) -> int:
        """Sequences in one validation batch, over the whole mesh."""
        return self.microbatch * self.config.data.val_batch_multiplier

    @property
    def sequences_per_step(self) -> int:
        """Sequences in one training step, over the whole mesh."""
        return self.microbatch * self.config.optimizer.gradient_accumulation_steps

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one training step, over the whole mesh."""
        return self.sequences_per_step * self.config.seq

    def describe(self) -> str:
        """A line with the number of parameters, the devices, the mesh, the dtype and the tokens per step."""
        device, model = jax.devices()[0].device_kind, self.placement.model
        trained, frozen = map(count_parameters, model.split(model.shapes))
        share = f" ({trained:,} trained, {trained / (trained + frozen):.2%}; {frozen:,} frozen)" if frozen else ""
        return (
            f"{trained + frozen:,} parameters{share}; {jax.device_count()} x {device} "
            f"in {plural(jax.process_count(), 'process', 'processes')}: {named(self.shape)}; {model.dtype}; "
            f"{plural(self.tokens_per_step, 'token')} per step"
        )


def count_parameters(params: Any) -> int:
    """The number of elements of all arrays of a tree. The arrays may be abstract."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))
