"""Replicas of devices that split activations over tp, and what they send."""

from mesh_transformer.estimate.hlo import Module

# four replicas of two devices, and the sequences of each
REPLICAS = {
    "fsdp4_tp2": ["mesh.fsdp=4", "mesh.tp=2"],
    "dp4_tp2": ["mesh.dp=4", "mesh.tp=2"],
    "dp2_fsdp2_tp2": ["mesh.dp=2", "mesh.fsdp=2", "mesh.tp=2"],
}
OWN = 4


def sequences_over_tp(hlo: str) -> dict[str, set[int]]:
    """The sequences of the activations that a step gathers and scatters around its products, by kind of collective."""
    found: dict[str, set[int]] = {}
    for one in Module(hlo).instructions.values():
        if one.kind in ("all-gather", "reduce-scatter") and "shard_map" in one.op_name:
            # sequences, parts, positions, width
            found.setdefault(one.kind, set()).update(array.shape[0] for array in one.arrays if len(array.shape) == 4)
    return found
