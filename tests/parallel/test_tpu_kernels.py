"""The splash kernel compiled for TPU slices without a TPU. The tests need libtpu and are skipped without it."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support.builders import TINY

from mesh_transformer.config import MeshConfig, parse_config
from mesh_transformer.config.mesh import mesh_shape, training_rules
from mesh_transformer.estimate.tpus import slice_devices
from mesh_transformer.models.placement import Placement
from mesh_transformer.ops.attend import context
from mesh_transformer.parallel.mesh import make_mesh
from mesh_transformer.parallel.sharding import Partition
from mesh_transformer.train.own import jit
from mesh_transformer.train.step import TrainProgram, compile_step

pytestmark = [pytest.mark.tpu, pytest.mark.usefixtures("libtpu")]
KERNEL = re.compile(r"%splash_mha_(fwd|dq|dkv)\w*(?:\.\d+)? = .*custom-call\(")
SMALL = ("model.d_model=256", "model.n_heads=4", "model.seq=256", "mesh.fsdp=2", "mesh.tp=2")
LENGTH = 1024
# slice, heads, heads of keys, dims of queries and values, dtype, and the options of the attention
CASES: dict[str, tuple[str, int, int, int, int, str, dict[str, Any]]] = {
    "v4": ("v4-8", 2, 2, 256, 256, "bfloat16", {}),
    "v4_latent": ("v4-8", 2, 2, 96, 64, "bfloat16", {}),
    "v5e_windows": ("v5e-4", 4, 1, 128, 128, "bfloat16", {"windows": (100, None)}),
    "v5e_float32": ("v5e-4", 2, 2, 256, 256, "float32", {"softcap": 30.0}),
    "v5p": ("v5p-8", 8, 2, 128, 128, "bfloat16", {"window": 300}),
    "v6e_segments": ("v6e-4", 8, 2, 64, 64, "bfloat16", {"segments": True}),
}


def kernels(text: str) -> dict[str, int]:
    """The number of kernels of each kind in a compiled program."""
    found = KERNEL.findall(text)
    return {phase: found.count(phase) for phase in ("fwd", "dq", "dkv")}


@pytest.mark.parametrize("case", CASES)
def test_splash_compiles(case: str) -> None:
    name, heads, key_heads, width, values, dtype, options = CASES[case]
    partition = Partition(make_mesh(mesh_shape(), slice_devices(name)[:1]), training_rules(MeshConfig()))
    windows = options.get("windows")
    fixed = {name: value for name, value in options.items() if name in ("window", "softcap")}

    def gradients(q: Any, k: Any, v: Any, dy: Any, window: Any, segments: Any) -> Any:
        attend = context.attention(None, segments if "segments" in options else None, windows)
        given = {"window": window} if windows else fixed
        y, pull = jax.vjp(lambda q, k, v: attend(q, k, v, scale=0.1, **given), q, k, v)
        return y, pull(dy)

    def array(*shape: int, dtype: str = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=partition.sharding())

    arrays = [
        array(2, LENGTH, *shape) for shape in ((heads, width), (key_heads, width), (key_heads, values), (heads, values))
    ]
    data = array(dtype="int32"), array(2, LENGTH, dtype="int32")
    compiled = jit(partition, gradients).lower(*arrays, *data).compile()
    each = len(windows or (None,))
    assert kernels(compiled.as_text()) == {"fwd": each, "dq": each, "dkv": each}
    for phase in ("fwd", "dq", "dkv"):
        # the estimate reads from the scope how many blocks of the mask are computed
        assert re.search(rf"mask_\d+_of_4/[^\"]*splash_mha_{phase}", compiled.as_text())


@pytest.mark.parametrize(
    ("remat", "forward"),
    # full keeps the inputs of blocks only: the output of attention is computed again
    [
        *(pytest.param(name, 1, marks=pytest.mark.nightly) for name in ("none", "save_matmuls")),
        ("save_attn", 1),
        ("full", 2),
    ],
)
def test_a_layer_of_a_training_step_has_one_forward_kernel(remat: str, forward: int) -> None:
    config = parse_config(TINY, [*SMALL, f"compute.remat={remat}"])
    program = TrainProgram(Placement.of(config, slice_devices("v5e-4")), config)
    compiled = compile_step(program, 2, config.microbatch(config.check_devices(4)))
    assert kernels(compiled.as_text()) == {"fwd": forward, "dq": 1, "dkv": 1}


def test_v3_has_no_kernel() -> None:
    config = parse_config(TINY, [*SMALL, "mesh.tp=4"])
    assert set(Placement.of(config, slice_devices("v3-8")).kernels(config.seq).values()) == {"plain"}
    assert set(Placement.of(config, slice_devices("v5e-8")).kernels(config.seq).values()) == {"splash"}


def test_a_step_without_a_kernel_is_found() -> None:
    """The count can fail."""
    config = parse_config(TINY, [*SMALL, "compute.attention=plain"])
    program = TrainProgram(Placement.of(config, slice_devices("v5e-4")), config)
    tokens = jax.ShapeDtypeStruct((1, config.microbatch(config.check_devices(4)), config.seq + 1), jnp.int32)
    assert "splash" not in program.train_step.lower(program.abstract_state, tokens).as_text()
