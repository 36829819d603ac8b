"""The group `mesh`: how the devices are laid out."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from mesh_transformer.errors import UserError
from mesh_transformer.fields import Derived, Devices, Group, Switch


class MeshShape(NamedTuple):
    """Sizes of the mesh axes."""

    dp: int
    fsdp: int
    tp: int

    @property
    def replicas(self) -> int:
        """Shards of the batch: dp * fsdp."""
        return self.dp * self.fsdp


class MeshConfig(Group):
    """How the devices are laid out."""

    dp: Annotated[Devices | None, Derived("devices / (fsdp * tp)")] = Field(
        None, description="data-parallel replicas, each with all the weights of its fsdp and tp group"
    )
    fsdp: Devices = Field(1, description="data-parallel shards that also split weights and moments (ZeRO-3)")
    tp: Devices = Field(
        1, description="tensor parallelism (Megatron): heads, feed-forward and vocabulary are split"
    )
    zero1: Switch = Field(
        False, description="shard the Adam moments over dp too, weights replicated (ZeRO-1)"
    )
    shard_activations: Switch = Field(
        False,
        description="between blocks, split the activations' sequence dimension over tp (sequence parallelism)",
    )
    gather_weights: Literal["per_layer", "per_step"] = Field(
        "per_layer",
        description="when fsdp gathers the weights: layer by layer (least memory) or once a step (classic early_collect)",
    )
    tpu_size: Devices | None = Field(
        None, description="cores of the slice that train.py --tpu creates; not used elsewhere"
    )

    def shape(self, n_devices: int) -> MeshShape:
        """The mesh for `n_devices` devices.

        Raises:
            UserError: the axes do not multiply to the number of devices.
        """
        model = self.fsdp * self.tp
        if self.dp is None and (n_devices < model or n_devices % model):
            raise UserError(
                f"mesh.fsdp {self.fsdp} x mesh.tp {self.tp} needs a multiple of {model} devices, found {n_devices}: "
                + _way_out(self, n_devices)
            )
        dp = self.dp if self.dp is not None else n_devices // model
        if dp * model != n_devices:
            raise UserError(
                f"mesh.dp {dp} x mesh.fsdp {self.fsdp} x mesh.tp {self.tp} = {dp * model} devices, found {n_devices}: "
                + _way_out(self, n_devices)
            )
        return MeshShape(dp, self.fsdp, self.tp)


def _way_out(mesh: MeshConfig, n_devices: int) -> str:
    changes = ["--set mesh.dp=null"] if mesh.dp is not None else []
    changes += [f"--set mesh.{axis}=1" for axis in ("fsdp", "tp") if getattr(mesh, axis) > 1]
    advice = f"{' '.join(changes)} runs it on what is here ({n_devices})"
    if n_devices == 1:
        advice += "; on a CPU, XLA_FLAGS=--xla_force_host_platform_device_count=8 makes eight devices"
    return advice
