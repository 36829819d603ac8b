"""Compile GPT-J-6B with FSDP for a slice that is not attached, and write what chapter 4 of the guide reads.

    pip install -e '.[tpu]'
    python docs/guide/results/04_fsdp.py

It writes 04_fsdp.json: the result of preflight.py and the longest operations of the program, and the collectives of a
`psum_scatter` on two slices. This takes some minutes of CPU time.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from preflight_result import compiled, write

from mesh_transformer.estimate.hlo import collectives
from mesh_transformer.estimate.tpus import slice_devices

COMMAND = (
    "preflight.py --config configs/6B_finetune_v3-8.json --tpu v5e-16 --set mesh.tp=1 --set mesh.fsdp=16"
    " --set data.per_replica_batch=2 --set optimizer.gradient_accumulation_steps=1 --set compute.remat=save_attn"
)


def scattered(slice_name: str) -> list[str]:
    """The collectives that the compiler makes of a scatter over all chips of a slice, written by hand."""
    devices = slice_devices(slice_name)
    mesh = jax.make_mesh((len(devices),), ("fsdp",), devices=devices, axis_types=(AxisType.Auto,))
    rows = jax.ShapeDtypeStruct((len(devices) * 4096, 4096), jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp")))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"))
    def scatter(x: jax.Array) -> jax.Array:
        return jax.lax.psum_scatter(x.T @ x, "fsdp", tiled=True)

    return [one.kind for one in collectives(scatter.lower(rows).compile().as_text())]


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    write(__file__, compiled(COMMAND) | {"psum_scatter": {name: scattered(name) for name in ("v5e-8", "v5e-16")}})
