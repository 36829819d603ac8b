"""Write tests/estimate/programs/*.hlo.gz: programs as libtpu compiles them, without what no test reads.

Three are training steps of GPT-J-6B, one is a small model with experts in a pipeline, and one has kernels of attention
and of experts alone.

    python scripts/tpu_programs.py                   # all programs
    python scripts/tpu_programs.py v5e-8-kernels     # some

It needs jax[tpu], but no TPU. Run it after a change of the training step or of libtpu that changes their time, and
update the expected figures in tests/estimate/test_recorded.py.
"""

import functools
import gzip
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mesh_transformer.config import load_config
from mesh_transformer.estimate.hlo import BREAK, Module
from mesh_transformer.estimate.target import tpu_target
from mesh_transformer.models.placement import Placement
from mesh_transformer.train.step import TrainProgram, compile_step

ROOT = Path(__file__).resolve().parents[1]
ACCUMULATION = 16
# 4 layers in 2 stages, 2 steps of accumulation of 8 sequences
PIPELINE = (
    "model.layers=4",
    "mesh.pp=2",
    "mesh.dp=1",
    "mesh.fsdp=2",
    "compute.remat=full",
    "data.per_replica_batch=4",
    "optimizer.gradient_accumulation_steps=2",
)
# positions, dims of a head, heads of queries and of keys of all devices
LENGTH, WIDTH, HEADS, KEY_HEADS = 2048, 128, 16, 4
# rows of a device, matrices of experts, input and output dims
ROWS, EXPERTS, INPUT, OUTPUT = 16384, 8, 1024, 512
WINDOW, BLOCK = 600, 512


def main() -> None:
    """Compile and write the programs."""
    jax.config.update("jax_platforms", "cpu")
    for name in sys.argv[1:] or PROGRAMS:
        text = stripped(PROGRAMS[name](name).as_text() or "")
        (ROOT / f"tests/estimate/programs/{name}.hlo.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def step(name: str, *, tp: int) -> jax.stages.Compiled:
    """The training step of GPT-J-6B on a slice, with `tp` devices of a replica."""
    config = load_config(str(ROOT / "configs/6B_finetune_v3-8.json"), [f"mesh.tp={tp}"])
    program = TrainProgram(Placement.of(config, tpu_target(name).devices()), config)
    return compile_step(program, ACCUMULATION, 1)


def pipeline(name: str) -> jax.stages.Compiled:
    """The training step of a model with experts in two stages."""
    target = tpu_target(name.removesuffix("-pipeline"))
    config = load_config(str(ROOT / "configs/moe_1B_A300M.json"), PIPELINE)
    program = TrainProgram(Placement.of(config, target.devices()), config)
    batch = config.microbatch(config.check_devices(target.n_devices))
    return compile_step(program, config.optimizer.gradient_accumulation_steps, batch)


def kernels(name: str) -> jax.stages.Compiled:
    """The gradients of JAX's splash attention, causal and with windows, and of megablox's grouped product."""
    devices = tpu_target(name.removesuffix("-kernels")).devices()
    mesh = Mesh(np.array(devices).reshape(4, 2), ("fsdp", "tp"))
    heads, rows = P("fsdp", "tp"), P(("fsdp", "tp"))

    def loss(*arrays: jax.Array) -> jax.Array:
        return jax.shard_map(
            _loss, mesh=mesh, in_specs=(heads, heads, heads, rows, P(), rows), out_specs=rows, check_vma=False
        )(*arrays).sum()

    def given(spec: P, *shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    keys = given(heads, 8, KEY_HEADS, LENGTH, WIDTH)
    arrays = given(heads, 8, HEADS, LENGTH, WIDTH), keys, keys
    grouped = (
        given(rows, 8 * ROWS, INPUT),
        given(P(), EXPERTS, INPUT, OUTPUT),
        given(rows, 8 * EXPERTS, dtype=jnp.int32),
    )
    return jax.jit(jax.grad(loss, argnums=range(5))).lower(*arrays, *grouped).compile()


def _loss(q: jax.Array, k: jax.Array, v: jax.Array, x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox import ops
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    causal = masks.CausalMask((LENGTH, LENGTH))
    local = masks.LocalMask((LENGTH, LENGTH), (WINDOW - 1, 0), 0)
    with jax.named_scope("blocks"):
        with jax.named_scope("attention"):
            mixed = _splash(causal, fused=True)(q, k, v)
            with jax.named_scope("window"):
                mixed += _splash(local, fused=False)(q, k, v)
            # the blocks of queries see 1, 2, 3 and 3 blocks of keys
            with jax.named_scope("mask_9_of_16"):
                mixed += _splash(local, fused=True)(q, k, v)
        with jax.named_scope("experts"):
            product = ops.gmm(x, w, sizes, preferred_element_type=jnp.bfloat16)
    return mixed.astype(jnp.float32).sum()[None] + product.astype(jnp.float32).sum()[None]


def _splash(mask: Any, *, fused: bool) -> Callable[..., jax.Array]:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    sizes = dict.fromkeys(("block_q", "block_kv", "block_kv_compute"), BLOCK)
    sizes |= dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"), BLOCK)
    sizes |= {} if fused else dict.fromkeys(("block_q_dq", "block_kv_dq"), BLOCK)
    every = splash.make_splash_mha(
        _many(mask, HEADS // 2),
        block_sizes=splash.BlockSizes(**sizes, use_fused_bwd_kernel=fused),
        head_shards=1,
        q_seq_shards=1,
    )
    return jax.vmap(every)


def _many(mask: Any, heads: int) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    return masks.MultiHeadMask([mask] * heads)


def stripped(hlo: str) -> str:
    """The computations of a program without layouts, places in source files and settings of the compiler."""
    names = Module(hlo).computations
    lines, inside = [], False
    for line in BREAK.sub("", hlo).splitlines():
        inside |= line.endswith("{") and any(name in line for name in names)
        told = re.findall(r'"estimated_cycles":"\d+"|"cost_estimate":\{[^}]*\}', line)
        line = re.sub(r", backend_config=.*| stack_frame_id=\d+|\{[\d,]*:[^}]*\}|/\*index=\d+\*/", "", line)
        lines += [line + (f", backend_config={{{','.join(told)}}}" if told else "")] if inside else []
    return "\n".join(lines) + "\n"


PROGRAMS: dict[str, Callable[[str], jax.stages.Compiled]] = {
    "v3-8": functools.partial(step, tp=8),
    "v4-8": functools.partial(step, tp=4),
    "v5e-8": functools.partial(step, tp=8),
    "v4-8-pipeline": pipeline,
    "v5e-8-kernels": kernels,
}

if __name__ == "__main__":
    main()
