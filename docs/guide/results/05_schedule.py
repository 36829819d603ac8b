"""Compile the feed-forward network of chapter 5 for a v5e-8 in three ways, and write what the chapter reads.

    python docs/guide/results/05_schedule.py

writes 05_schedule.json. It needs libtpu (pip install -e '.[tpu]'), but no TPU, and less than a minute of CPU time.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from mesh_transformer.estimate.collectives import collective_seconds, device_group
from mesh_transformer.estimate.hlo import Module
from mesh_transformer.estimate.programs import compile_for, default_folder
from mesh_transformer.estimate.target import Target, tpu_target
from mesh_transformer.estimate.timeline import Timeline
from mesh_transformer.ops import column, row
from mesh_transformer.parallel import Partition, constrain, dimension_rules, make_mesh, mesh_shape
from mesh_transformer.train import jit

SLICE = "v5e-8"
# the widths of GPT-J-6B
SEQUENCES, POSITIONS, WIDTH, HIDDEN = 4, 2048, 4096, 16384
# shard_activations, overlap_tp
WAYS = {"whole activations": (False, False), "split activations": (True, False), "rings": (True, True)}
NAMES = ("batch", "block_seq", "act_embed"), ("embed", "mlp"), ("mlp", "embed")


def feed_forward(x: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
    """The model of the chapter."""
    x = constrain(x, *NAMES[0])
    (hidden,) = column(x, [w_in], ["mlp"])
    y = row([jax.nn.gelu(constrain(hidden, "batch", "seq", "mlp"))], [w_out])
    return constrain(y, *NAMES[0])


def compiled_text(target: Target, shard_activations: bool, overlap_tp: bool) -> str:
    """The optimized program for all devices of a slice."""
    mesh = make_mesh(mesh_shape(tp=target.n_devices), target.devices())
    partition = Partition(mesh, dimension_rules(shard_activations=shard_activations), overlap_tp=overlap_tp)
    shapes = (SEQUENCES, POSITIONS, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH)
    arrays = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=partition.sharding(*names))
        for shape, names in zip(shapes, NAMES, strict=True)
    ]
    return compile_for(jit(partition, feed_forward).lower(*arrays), target, default_folder()).hlo


def schedule(timeline: Timeline) -> list[dict[str, object]]:
    """What a device does: operations of the core one after the other, and transfers beside them; in microseconds."""
    module, spent = timeline.module, timeline.estimate().spent
    events: list[dict[str, object]] = []

    def play(computation: str, now: float) -> float:
        for one in module.computations[computation]:
            if one.opcode == "while":
                for _ in range(module.trips(one) or 1):
                    now = play(one.attribute("body") or "", now)
            if one.kind and one.opcode.endswith("-start"):
                nbytes = max(array.nbytes for array in one.arrays)
                seconds = collective_seconds(one.kind, nbytes, device_group(one.rest), timeline.accelerator)
                events.append({"what": one.kind, "on": "links", "begin": now, "end": now + 1e6 * seconds})
            if (time := spent.get(one.name)) is not None:
                what = "products" if timeline.flops(one) else "element-wise"
                what = time.part if time.part in ("collectives", "waiting") else what
                end = now + 1e6 * time.seconds / time.runs
                where = {"opcode": one.opcode, "source": one.op_name}
                events.append({"what": what, "on": "core", "begin": now, "end": end, **where})
                now = end
        return now

    play(module.entry, 0.0)
    return events


def main() -> None:
    """Compile, read and write."""
    jax.config.update("jax_platforms", "cpu")
    target, found = tpu_target(SLICE), {}
    for way, settings in WAYS.items():
        hlo = compiled_text(target, *settings)
        found[way] = schedule(Timeline(hlo, target.accelerator))
        kinds = [one.opcode for one in Module(hlo).instructions.values() if one.kind]
        sys.stderr.write(f"{way}: {found[way][-1]['end']:.0f} microseconds, {kinds}\n")
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
