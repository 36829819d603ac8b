"""The cases of benchmarks/gpu.py in their order: what a process of each measures, and for how long at most."""

import functools
import importlib.util
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from common import REPO

from mesh_transformer import accelerators, platforms
from mesh_transformer.config import load_config
from mesh_transformer.estimate.closed_form import step_gib
from mesh_transformer.estimate.prediction import FORMULA_MEMORY

SMALL = "125M"
# the first that fits is the large train step
LARGE = ("6B", "2.7B")
CONFIGS = {"125M": "configs/125M.json", "2.7B": "configs/2.7B.json", "6B": "configs/6B_finetune_v3-8.json"}
SEQUENCES = 8
ATTENTION, REMAT, ACCUMULATION = ("plain", "cudnn"), ("save_attn", "save_matmuls"), (1, 2)
HEAD_DIMS, LENGTHS, BATCHES = (64, 128, 256), (2048, 8192), (1, 8, 64)
CONTEXT = 512
# alternations of ours and a peer
ROUNDS = 2
# decoding keeps its loop in one CUDA graph
GRAPHS = (
    "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,WHILE,CONDITIONAL,DYNAMIC_SLICE_FUSION "
    "--xla_gpu_graph_min_graph_size=1"
)
# a process whose GPU is torch's, or that compiles for a GPU that is not attached
JAX_ON_CPU = {"JAX_PLATFORMS": "cpu"}
TOY = ("layers=1", "d_model=32", "n_heads=2", "n_vocab=256", "pe_rotary_dims=8")
Row = Mapping[str, Any]


class Device(NamedTuple):
    """What `gpu_workers.device` reports."""

    kind: str
    platform: str
    gib: float | None
    versions: dict[str, str]


@dataclass(frozen=True)
class Case:
    """One measurement.

    Args:
        worker: the function of `program` that a process calls with `arguments`.
        limit: seconds that it may take.
        instead: what the file says of a case that cannot run here; None: it can.
        environment: variables of the process.
    """

    name: str
    worker: str
    arguments: dict[str, Any] = field(default_factory=dict)
    limit: float = 120.0
    instead: Row | None = None
    environment: dict[str, str] = field(default_factory=dict)
    program: Path = REPO / "benchmarks" / "gpu_workers.py"


def plan(device: Device, rows: Sequence[Row], *, tiny: bool = False) -> list[Case]:
    """All cases for a device. `rows`: what was measured on it; a peer's counterpart is the fastest of our steps."""
    size = _large(device, tiny)
    trained = [] if size is None else [SMALL, size]
    cases = [
        Case("rates", "rates", {"size": 64 if tiny else 16384}),
        *_attention(device, tiny),
        *_train(SMALL, device, tiny),
        *_decode(device, tiny),
        *_too_large(device, tiny),
        *(_train(size, device, tiny) if size else ()),
        *_train_peers(trained, rows, tiny),
        *_decode_peers(device, tiny),
        *(case for one in trained for case in _preflight(one, device, tiny)),
    ]
    for case in cases:
        case.arguments["device_kind"] = device.kind
    return cases


def _attention(device: Device, tiny: bool) -> Iterator[Case]:
    for dims, length, kind in itertools.product(HEAD_DIMS, LENGTHS, ATTENTION):
        sizes = {"seq": length // 64, "tokens": 256, "width": 256} if tiny else {"seq": length}
        sizes = {"tokens": 8 * min(LENGTHS), "width": 4096, **sizes}
        arguments = {"kind": kind, "head_dim": dims, **sizes}
        yield Case(f"attention {dims} {length} {kind}", "attention", arguments, instead=_no_kernel(device, kind))


def _train(size: str, device: Device, tiny: bool) -> Iterator[Case]:
    for accumulation, remat, kind in itertools.product(ACCUMULATION, REMAT, ATTENTION):
        run = _step(size, kind, remat, accumulation, tiny)
        lacks = _no_kernel(device, kind) or _no_room(run, device)
        name = f"train {size} {kind} {remat} {accumulation} x {SEQUENCES}"
        yield Case(name, "train", run, _train_limit(size), lacks)


def _too_large(device: Device, tiny: bool) -> Iterator[Case]:
    """The sizes that do not fit, with their least need."""
    for size in LARGE:
        run = _least(size, tiny)
        if lacks := _no_room(run, device):
            yield Case(f"train {size}", "train", run, instead=lacks)


def _decode(device: Device, tiny: bool) -> Iterator[Case]:
    size = _decoded_size(device)
    for batch in BATCHES:
        yield _decode_case(f"decode {size} {batch}", size, batch, tiny)
    for name, flags in (("by layer", ""), ("by layer, graphs", GRAPHS)):
        case = _decode_case(f"decode {size} 1 {name}", size, 1, tiny)
        case.arguments["by_layer"] = True
        case.environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
        yield case


def _train_peers(sizes: Sequence[str], rows: Sequence[Row], tiny: bool) -> Iterator[Case]:
    lacks = _absent("torch", "transformers")
    for size, number in itertools.product(sizes, range(1, ROUNDS + 1)):
        ours = _step(size, *_fastest(size, rows), 1, tiny)
        theirs = {**_step(size, None, "full", 1, tiny), "compiled": not tiny, "recompute": size != SMALL}
        yield Case(f"peers train {size} {number} ours", "train", ours, _train_limit(size), lacks)
        name = f"peers train {size} {number} torch"
        yield Case(name, "torch_train", theirs, _train_limit(size), lacks, JAX_ON_CPU)


def _decode_peers(device: Device, tiny: bool) -> Iterator[Case]:
    lacks, size = _absent("torch", "transformers"), _decoded_size(device)
    for batch, number in itertools.product(BATCHES, range(1, ROUNDS + 1)):
        for worker, who in (("decode", "ours"), ("torch_decode", "transformers")):
            case = _decode_case(f"peers decode {size} {batch} {number} {who}", size, batch, tiny, worker, lacks)
            case.arguments.update(compiled=not tiny, folder=None)
            case.environment.update(JAX_ON_CPU if worker == "torch_decode" else {})
            yield case


def _preflight(size: str, device: Device, tiny: bool) -> Iterator[Case]:
    known = accelerators.of_device(device.kind)
    name = known.name if known else "h100"
    lacks = _absent("jax_cuda12_plugin", "jax_cuda13_plugin", enough=1)
    if known is None and device.platform == "gpu":
        lacks = {"absent": True, "reason": f"{device.kind} is not in mesh_transformer/accelerators.py"}
    for case in _train(size, device, tiny):
        arguments = {**case.arguments, "gpu": name}
        # a step that does not fit here by the formula may still be compiled, but tells nothing more
        yield Case(f"preflight {case.name}", "preflight", arguments, 240.0, case.instead or lacks, JAX_ON_CPU)


def _decode_case(
    name: str, size: str, batch: int, tiny: bool, worker: str = "decode", instead: Row | None = None
) -> Case:
    changes = ["mesh.fsdp=1", "mesh.tp=1", *([f"model.{one}" for one in (*TOY, "seq=256")] if tiny else [])]
    arguments = {
        "config": CONFIGS[size],
        "overrides": changes,
        "batch": min(batch, 4) if tiny else batch,
        "context": CONTEXT,
        "by_layer": False,
        "repeats": 1 if tiny else 5,
    }
    return Case(name, worker, arguments, 150.0, instead)


def _step(size: str, attention: str | None, remat: str, accumulation: int, tiny: bool) -> dict[str, Any]:
    """The arguments of a train step."""
    changes = [
        *("mesh.fsdp=1", "mesh.tp=1", f"data.per_replica_batch={1 if tiny else SEQUENCES}"),
        *(f"optimizer.gradient_accumulation_steps={accumulation}", f"compute.remat={remat}"),
        *([f"compute.attention={attention}"] if attention else []),
        *([f"model.{one}" for one in (*TOY, "seq=32")] if tiny else []),
    ]
    return {"config": CONFIGS[size], "overrides": changes, "steps": 1 if tiny else 4}


def _least(size: str, tiny: bool) -> dict[str, Any]:
    """The step of a size that needs the least memory."""
    return _step(size, ATTENTION[0], REMAT[0], ACCUMULATION[0], tiny)


def _large(device: Device, tiny: bool) -> str | None:
    return next((size for size in LARGE if _no_room(_least(size, tiny), device) is None), None)


def _decoded_size(device: Device) -> str:
    """12 GB of weights, and 15 GB of cache at batch 64."""
    return LARGE[0] if device.gib is None or device.gib > 36 else LARGE[1]


def _train_limit(size: str) -> float:
    return 120.0 if size == SMALL else 300.0


def _fastest(size: str, rows: Sequence[Row]) -> tuple[str, str]:
    """Attention and recomputation of the fastest measured step of a size, with one microbatch."""
    rate = {row["case"]: row["figure"]["tokens_per_s"] for row in rows if "tokens_per_s" in row.get("figure", {})}
    kinds = list(itertools.product(ATTENTION, REMAT))
    return max(kinds, key=lambda one: rate.get(f"train {size} {one[0]} {one[1]} 1 x {SEQUENCES}", 0.0))


def _no_room(run: Row, device: Device) -> Row | None:
    """What the file says of a step that needs more than the memory of the card by the formula of preflight, even if the
    formula says too much by its largest error."""
    if device.gib is None:
        return None
    parts = _gib(run["config"], tuple(run["overrides"]))
    if sum(parts.values()) <= (1 + FORMULA_MEMORY) * device.gib:
        return None
    listed = ", ".join(f"{name} {gib:.1f}" for name, gib in parts.items())
    return {"skipped": f"needs {sum(parts.values()):.1f} GiB ({listed}); the card has {device.gib:.1f}"}


@functools.lru_cache
def _gib(path: str, changes: tuple[str, ...]) -> dict[str, float]:
    config = load_config(str(REPO / path), changes)
    compute = platforms.resolve(config.compute, "gpu")
    return step_gib(config.model_copy(update={"compute": compute}), 1)


def _no_kernel(device: Device, kind: str) -> Row | None:
    if kind == "plain" or device.platform == "gpu":
        return None
    return {"absent": True, "reason": "cuDNN needs a GPU"}


def _absent(*modules: str, enough: int | None = None) -> Row | None:
    """What the file says of a case that needs these modules, or `enough` of them."""
    found = [name for name in modules if importlib.util.find_spec(name)]
    if len(found) >= (enough or len(modules)):
        return None
    missing = ", ".join(name for name in modules if name not in found)
    return {"absent": True, "reason": f"not installed: {missing}"}
