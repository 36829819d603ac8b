"""Attention kernels: which one is chosen, and that each computes attention, against the formula.

On a CPU the splash kernel is interpreted. `tests/parallel/test_tpu_kernels.py` compiles it for TPUs.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.builders import TINY
from support.covering import covering

from mesh_transformer.accelerators import CompileTarget
from mesh_transformer.config import ComputeConfig, MeshConfig, parse_config
from mesh_transformer.config.mesh import mesh_shape, training_rules
from mesh_transformer.errors import UserError
from mesh_transformer.models.placement import Placement
from mesh_transformer.ops.attend import context, cudnn, kernels, splash
from mesh_transformer.ops.attend.kernel import Case
from mesh_transformer.parallel.mesh import make_mesh
from mesh_transformer.parallel.sharding import Partition
from mesh_transformer.train.own import jit
from mesh_transformer.train.step import TrainProgram

GPTJ = Case(CompileTarget("tpu", "v5e"), 2048, 256, 256, "bfloat16")
H100, A100 = CompileTarget("gpu", "9.0"), CompileTarget("gpu", "8.0")
# on CPU, positions of a block: so that few positions are several blocks
BLOCK = 128
T = 2 * BLOCK
HEADS = {"8_of_8": (8, 8), "8_of_2": (8, 2)}
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 100},
    "softcap": {"softcap": 2.0},
    "segments": {"segments": True},
    "two_windows": {"window": np.int32(100), "windows": (30, 100, None)},
}


def test_the_config_names_the_kernels() -> None:
    allowed = get_args(ComputeConfig.model_fields["attention"].annotation)
    assert set(allowed) == {"auto", kernels.PLAIN, *kernels.KERNELS}


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ({}, "splash"),
        ({"target": CompileTarget("tpu", "v4"), "dtype": "float32"}, "splash"),
        ({"target": CompileTarget("tpu", "v3")}, "plain"),
        ({"target": CompileTarget("tpu", "")}, "plain"),
        ({"target": CompileTarget("cpu")}, "plain"),
        ({"head_dim": 96, "value_dim": 64}, "splash"),
        ({"head_dim": 100}, "plain"),
        ({"length": 2000}, "plain"),
        ({"segments": True, "softcap": True, "windows": (512, None)}, "splash"),
        ({"bias": True}, "plain"),
        ({"windows": None}, "plain"),
        ({"ring": "zigzag"}, "splash"),
        ({"ring": "zigzag", "windows": (512,)}, "plain"),
        ({"ring": "gather"}, "plain"),
        ({"target": H100}, "cudnn"),
        ({"target": CompileTarget("gpu", "12.0")}, "cudnn"),
        ({"target": A100}, "plain"),
        ({"target": A100, "head_dim": 128, "value_dim": 128}, "cudnn"),
        ({"target": CompileTarget("gpu", "7.5"), "head_dim": 128, "value_dim": 128}, "plain"),
        ({"target": CompileTarget("gpu")}, "plain"),
        ({"target": H100, "windows": (512,)}, "cudnn"),
        ({"target": H100, "windows": (512, None)}, "plain"),
        ({"target": H100, "dtype": "float32"}, "plain"),
        ({"target": H100, "softcap": True}, "plain"),
        ({"target": H100, "segments": True}, "plain"),
        ({"target": H100, "bias": True}, "plain"),
        ({"target": H100, "value_dim": 128}, "plain"),
        ({"target": H100, "ring": "ring"}, "plain"),
    ],
)
def test_a_kernel_is_chosen_by_what_it_can_compute(changes: dict[str, Any], chosen: str) -> None:
    case = dataclasses.replace(GPTJ, **changes)
    assert kernels.choose("auto", case) == chosen
    assert kernels.choose("plain", case) == "plain"
    for name in kernels.KERNELS:
        if name == chosen:
            assert kernels.choose(name, case) == name
        else:
            with pytest.raises(UserError, match=f"^compute.attention {name} .*: set compute.attention=auto"):
                kernels.choose(name, case)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("splash", "needs a TPU v4, v5e, v5p, v6e or v7x, and the device is a CPU"),
        ("cudnn", "needs a GPU of compute capability 8.0 or later, and the device is no GPU"),
    ],
)
def test_a_kernel_that_cannot_work_is_refused_with_the_mesh(name: str, why: str) -> None:
    config = parse_config(TINY, [f"compute.attention={name}"])
    with pytest.raises(UserError, match=why):
        Placement.of(config, jax.devices()[:1])


@pytest.mark.parametrize(
    ("module", "function"),
    [(splash, "_splash_attention_bwd"), (cudnn, "_dot_product_attention_fwd_cuda_lowering")],
    ids=["splash", "cudnn"],
)
def test_a_kernel_with_other_arguments_gives_way_to_the_next(
    monkeypatch: pytest.MonkeyPatch, module: Any, function: str
) -> None:
    case = dataclasses.replace(GPTJ, target=H100) if module is cudnn else GPTJ
    name = module.__name__.rpartition(".")[2]
    assert (kernels.choose("auto", case), kernels.left_out(case.target.platform)) == (name, [])

    def check(reason: str) -> None:
        assert kernels.choose("auto", case) == "plain"
        (left_out,) = kernels.left_out(case.target.platform)
        assert reason in left_out
        with pytest.raises(UserError, match="^compute.attention .*: set compute.attention=auto, or plain") as refusal:
            kernels.choose(name, case)
        assert reason in str(refusal.value)

    monkeypatch.setattr(module._library(), function, lambda ctx, query, *, fp8: None)
    check(f"{function} has other arguments: ctx, query, fp8")
    monkeypatch.delattr(module._library(), function)
    check(f"which has no {module._MODULE}.{function}")


def test_long_windows_are_none() -> None:
    assert kernels.without_long((512, 4096, None, 2048), 2048) == (512, None)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splash is taken wherever a TPU v4 would take it, with small blocks."""

    def choose(_: str, case: Case) -> str:
        return real("auto", dataclasses.replace(case, target=CompileTarget("tpu", "v4")))

    real = kernels.choose
    monkeypatch.setattr(kernels, "choose", choose)
    monkeypatch.setattr(splash, "_BLOCK", BLOCK)


def formula(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    segments: jax.Array | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Attention with repeated heads of keys."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    distance = jnp.arange(q.shape[1])[:, None] - jnp.arange(q.shape[1])[None]
    seen = ((distance >= 0) & (distance < (window or q.shape[1])))[None, None]
    if segments is not None:
        seen = seen & (segments[:, None, :, None] == segments[:, None, None])
    logits = jnp.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
    logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(jnp.where(seen, logits, -jnp.inf)), v)


def assert_attention(partition: Partition, arrays: Any, options: dict[str, Any], segments: jax.Array | None) -> None:
    """The output and the gradients equal the formula's.

    In float32 the largest difference is 1e-5 of the largest value. In bfloat16 the root of the mean square of the
    differences is 3.5e-3 of the values' own: to round the values alone is 1.6e-3, and weights, output and gradients are
    rounded one after the other. Attention as XLA compiles it has 2.2e-3 to 3.1e-3.
    """
    q, order = arrays[0], partition.sequence_order(arrays[0].shape[1])
    order = np.arange(q.shape[1]) if order is None else order
    back, windows = np.argsort(order), options.get("windows")
    options = {name: value for name, value in options.items() if name in ("window", "softcap")}

    def of(attend: Any, *arrays: jax.Array) -> list[jax.Array]:
        *given, dy = arrays
        y, pull = jax.vjp(attend, *given)
        return [y, *pull(dy)]

    def ours(*arrays: jax.Array) -> list[jax.Array]:
        attend = context.attention(None, None if segments is None else segments[:, order], windows)
        attend = functools.partial(attend, scale=q.shape[-1] ** -0.5, **options)
        found = of(attend, *(x[:, order] for x in arrays))
        return [x[:, back] for x in found]

    found = jit(partition, ours)(*arrays)
    exact = [x.astype(jnp.float32) for x in arrays]
    expected = jax.jit(functools.partial(of, functools.partial(formula, segments=segments, **options)))(*exact)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == q.dtype
        difference = np.asarray(one, np.float32) - other
        if q.dtype == jnp.float32:
            assert np.abs(difference).max() < 1e-5 * np.abs(other).max()
        else:
            assert np.square(difference).mean() < 3.5e-3**2 * np.square(other).mean()


def inputs(sequences: int, length: int, heads: int, key_heads: int, width: int, values: int, dtype: Any) -> Any:
    """q, k, v and the gradient of the output."""
    shapes = (heads, width), (key_heads, width), (key_heads, values), (heads, values)
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, (sequences, length, *shape), dtype) for key, shape in zip(keys, shapes, strict=True)]


def segments_of(sequences: int, length: int) -> jax.Array:
    starts = jax.random.bernoulli(jax.random.key(1), 0.02, (sequences, length))
    return jnp.cumsum(starts, axis=1, dtype=jnp.int32)


def partition_of(mode: str = "zigzag", **axes: int) -> Partition:
    shape = mesh_shape(**axes)
    devices = jax.devices()[: int(np.prod(list(shape.values())))]
    return Partition(make_mesh(shape, devices), training_rules(MeshConfig()), context_mode=mode)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("width", "heads", "options", "dtype"),
    covering((64, 128, 256), HEADS, OPTIONS, ("float32", "bfloat16")),
)
def test_splash_is_attention(width: int, heads: str, options: str, dtype: str) -> None:
    arrays = inputs(1, T, *HEADS[heads], width, width, dtype)
    segments = segments_of(1, T) if "segments" in options else None
    assert_attention(partition_of(dp=1), arrays, OPTIONS[options], segments)


# mesh axes, mode, and whether there are segments: sequences that are split, heads of keys that are repeated, rings of
# one and of two blocks of a device
MESHES: dict[str, tuple[dict[str, int], str, bool]] = {
    "tp2_dp2": ({"tp": 2, "dp": 2}, "zigzag", True),
    "tp4": ({"tp": 4}, "zigzag", False),
    "zigzag": ({"cp": 2, "tp": 2}, "zigzag", True),
    "ring": ({"cp": 2, "fsdp": 2}, "ring", False),
    "ulysses": ({"cp": 2, "dp": 2}, "ulysses", False),
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("mesh", covering(MESHES))
def test_splash_on_a_mesh_is_attention(mesh: str) -> None:
    axes, mode, with_segments = MESHES[mesh]
    length = BLOCK * (4 if mesh == "zigzag" else 2)
    arrays = inputs(2, length, 4, 2, 64, 64, jnp.float32)
    assert_attention(partition_of(mode, **axes), arrays, {}, segments_of(2, length) if with_segments else None)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("overrides", "forward"),
    [
        (["compute.remat=none"], 1),
        (["compute.remat=save_attn"], 1),
        (["compute.remat=save_matmuls"], 1),
        # it keeps the inputs of blocks only: the output of attention is computed again
        (["compute.remat=full"], 2),
        (["compute.remat=save_attn", "mesh.dcn=dp", "mesh.dp=2"], 1),
    ],
)
def test_the_forward_kernel_runs_once_where_its_output_is_kept(overrides: list[str], forward: int) -> None:
    text = str(traced_step(overrides))
    kernels = [len(re.findall(rf"name\w*=\w*splash_mha_{phase}", text)) for phase in ("fwd", "dq", "dkv")]
    assert kernels == [forward, 1, 1]


def traced_step(overrides: Sequence[str]) -> Any:
    """A training step with heads of 64 dims, as JAX traces it."""
    shape = ["model.d_model=128", "model.n_heads=2", "model.pe_rotary_dims=16", "model.seq=128"]
    config = parse_config(TINY, [*shape, *overrides])
    placement = Placement.of(config, jax.devices()[: config.mesh.dp or 1])
    # on a CPU a placement takes no kernel
    program = TrainProgram(placement.with_attention("auto"), config)
    batch = config.microbatch(config.check_devices(program.partition.mesh.size))
    tokens = jax.ShapeDtypeStruct((2, batch, config.seq + 1), jnp.int32)
    return jax.make_jaxpr(program._train_step)(program.abstract_state, tokens)


@pytest.mark.parametrize(("remat", "forward"), [("save_attn", 1), ("full", 2)])
def test_the_forward_kernel_of_cudnn_runs_once_too(monkeypatch: pytest.MonkeyPatch, remat: str, forward: int) -> None:
    monkeypatch.setattr(kernels, "choose", lambda *_: "cudnn")
    text = str(traced_step([f"compute.remat={remat}", "compute.dtype=bfloat16"]))
    assert [len(re.findall(rf" = dot_product_attention_{phase}\b", text)) for phase in ("fwd", "bwd")] == [forward, 1]


@pytest.mark.parametrize("window", [None, 100])
def test_cudnn_lowers_to_one_kernel_each_way(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """What the kernels compute is seen on a GPU only: `benchmarks/gpu.py`."""
    monkeypatch.setattr(kernels, "choose", lambda *_: "cudnn")

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array) -> Any:
        y, pull = jax.vjp(functools.partial(context.attention(), scale=0.1, window=window), q, k, v)
        return y, pull(dy)

    arrays = inputs(2, T, 4, 2, 128, 128, jnp.bfloat16)
    traced = jit(partition_of(tp=2), gradients).trace(*arrays)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert sorted(re.findall(r"@(__cudnn\$\w+)\(", text)) == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    quoted = re.findall(r'backend_config = "(.*?)"[,}]', text)
    configs = [json.loads(re.sub(r"\\([0-9A-F]{2})", lambda code: chr(int(code[1], 16)), one)) for one in quoted]
    assert len(configs) == 2
    for one in (config["cudnn_fmha_backend_config"] for config in configs):
        assert (one["mask_type"], one["fmha_scale"], one["sliding_window_length"]) == ("CAUSAL", 0.1, window or 0)
        # two of four heads, on each device
        assert one["intermediate_tensor_shape"]["dimensions"] == ["2", "2", str(T), str(T)]
