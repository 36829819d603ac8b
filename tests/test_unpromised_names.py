"""Names of other packages that the package uses, and that these do not promise: private and experimental ones, and
classes that it extends. Each row says what is used of a name. It must hold with the oldest and with the newest version
that requirements.txt allows.

The kernels of attention and JAX's key of a compiled program have a fallback. Without another name, a command fails.
"""

import asyncio
import contextlib
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import orbax.checkpoint as ocp
import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from mesh_transformer.checkpoint import store
from mesh_transformer.ops.attend import kernels


class Name(NamedTuple):
    """A name of another package: its module, its path there, the arguments that a file of the package gives it, by
    name or in order, and the file."""

    module: str
    path: str
    arguments: tuple[str, ...]
    file: str

    @property
    def value(self) -> object:
        found: object = importlib.import_module(self.module)
        for part in self.path.split("."):
            found = getattr(found, part)
        return found


_PALLAS = "jax.experimental.pallas.ops.tpu"
_SPLASH = f"{_PALLAS}.splash_attention"
_CUDNN = "jax._src.cudnn.fused_attention_stablehlo"
_PROTOCOL = ("uvicorn.protocols.http.h11_impl", "H11Protocol")
_POLICY = "checkpoint_managers.preservation_policy"
_MULTIHOST = "jax.experimental.multihost_utils"
NAMES = [
    # `ops.attend.cudnn.unsupported` knows all their arguments
    Name(_CUDNN, "_dot_product_attention_fwd_p.bind", (), "ops/attend/cudnn.py"),
    Name(_CUDNN, "_dot_product_attention_bwd_p.bind", (), "ops/attend/cudnn.py"),
    Name(_CUDNN, "_dot_product_attention_fwd_cuda_lowering", ("scale", "is_training"), "ops/attend/cudnn.py"),
    Name(_CUDNN, "_dot_product_attention_bwd_cuda_lowering", ("scale",), "ops/attend/cudnn.py"),
    Name(_CUDNN, "MaskType.CAUSAL", (), "ops/attend/cudnn.py"),
    Name(_CUDNN, "AttentionLayout.BTNH.value", (), "ops/attend/cudnn.py"),
    # `ops.attend.splash.unsupported` knows all its arguments
    Name(f"{_SPLASH}.splash_attention_kernel", "_splash_attention_bwd", ("res", "do"), "ops/attend/splash.py"),
    Name(
        *(f"{_SPLASH}.splash_attention_kernel", "make_splash_mha"),
        (
            *("mask", "block_sizes", "attn_logits_soft_cap", "save_residuals", "head_shards", "q_seq_shards"),
            "interpret",
        ),
        "ops/attend/splash.py",
    ),
    Name(
        *(f"{_SPLASH}.splash_attention_kernel", "BlockSizes"),
        ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"),
        "ops/attend/splash.py",
    ),
    Name(f"{_SPLASH}.splash_attention_kernel", "SegmentIds", ("q", "kv"), "ops/attend/splash.py"),
    Name(f"{_SPLASH}.splash_attention_mask", "MultiHeadMask", ("masks",), "ops/attend/splash.py"),
    Name(f"{_SPLASH}.splash_attention_mask", "CausalMask", ("shape",), "ops/attend/splash.py"),
    Name(f"{_SPLASH}.splash_attention_mask", "FullMask", ("_shape",), "ops/attend/splash.py"),
    Name(f"{_SPLASH}.splash_attention_mask", "LocalMask", ("shape", "window_size", "offset"), "ops/attend/splash.py"),
    Name(
        *(f"{_PALLAS}.megablox.gmm", "gmm"),
        ("lhs", "rhs", "group_sizes", "preferred_element_type", "tiling", "transpose_rhs", "interpret"),
        "ops/experts/megablox.py",
    ),
    Name(
        *(f"{_PALLAS}.megablox.gmm", "tgmm"),
        ("lhs", "rhs", "group_sizes", "preferred_element_type", "tiling", "interpret"),
        "ops/experts/megablox.py",
    ),
    Name("jax._src.cache_key", "_hash_devices", ("hash_obj", "devices"), "platforms.py"),
    # `platforms` replaces it by `_hash_devices`
    Name("jax._src.cache_key", "_hash_accelerator_config", (), "platforms.py"),
    Name("jax.experimental.compilation_cache.compilation_cache", "reset_cache", (), "estimate/programs.py"),
    Name("jax.experimental.topologies", "get_topology_desc", ("topology_name", "platform"), "estimate/tpus.py"),
    Name(
        *("jax.experimental.mesh_utils", "create_device_mesh"),
        ("mesh_shape", "devices", "allow_split_physical_axes"),
        "parallel/mesh.py",
    ),
    Name("jax.experimental.layout", "with_layout_constraint", ("x", "layouts"), "ops/attend/storage.py"),
    Name("jax.experimental.layout", "Layout", ("major_to_minor",), "ops/attend/storage.py"),
    Name(_MULTIHOST, "broadcast_one_to_all", ("in_tree",), "checkpoint/store.py"),
    Name(_MULTIHOST, "sync_global_devices", ("name",), "checkpoint/store.py"),
    Name(_MULTIHOST, "process_allgather", ("in_tree",), "checkpoint/load.py"),
    Name(_MULTIHOST, "reached_preemption_sync_point", ("step_id",), "runtime/training/interrupt.py"),
    Name(
        "grain.experimental", "ThreadPrefetchIterDataset", ("parent", "prefetch_buffer_size"), "data/batches/loader.py"
    ),
    # `BoundedConnection` extends it
    Name(_PROTOCOL[0], f"{_PROTOCOL[1]}.connection_made", ("transport",), "runtime/serving/access.py"),
    Name(_PROTOCOL[0], f"{_PROTOCOL[1]}.data_received", ("data",), "runtime/serving/access.py"),
    Name(_PROTOCOL[0], f"{_PROTOCOL[1]}.pause_writing", (), "runtime/serving/access.py"),
    Name(_PROTOCOL[0], f"{_PROTOCOL[1]}.resume_writing", (), "runtime/serving/access.py"),
    Name(_PROTOCOL[0], f"{_PROTOCOL[1]}.connection_lost", ("exc",), "runtime/serving/access.py"),
    Name(_PROTOCOL[0], f"{_PROTOCOL[1]}.send_400_response", ("msg",), "runtime/serving/access.py"),
    Name("uvicorn", "Server.capture_signals", (), "runtime/serving/accept.py"),
    Name("uvicorn", "Server.startup", ("sockets",), "runtime/serving/accept.py"),
    Name("uvicorn", "Server.shutdown", ("sockets",), "runtime/serving/accept.py"),
    # `_Manager` extends it
    Name("orbax.checkpoint", "CheckpointManager.reached_preemption", ("step",), "checkpoint/store.py"),
    Name("orbax.checkpoint", f"{_POLICY}.LatestN", ("n",), "checkpoint/store.py"),
    Name("orbax.checkpoint", f"{_POLICY}.EveryNSteps", ("interval_steps",), "checkpoint/store.py"),
    Name("orbax.checkpoint", f"{_POLICY}.AnyPreservationPolicy", ("policies",), "checkpoint/store.py"),
    Name(
        *("orbax.checkpoint", "path.step.standard_name_format"),
        ("step_prefix", "single_host_load_and_broadcast"),
        "checkpoint/store.py",
    ),
    Name(
        *("orbax.checkpoint", "CheckpointManagerOptions"),
        (
            *("step_name_format", "preservation_policy", "single_host_load_and_broadcast", "save_root_metadata"),
            *("lightweight_initialize", "async_options"),
        ),
        "checkpoint/store.py",
    ),
    Name("orbax.checkpoint", "AsyncOptions", ("timeout_secs", "barrier_sync_fn"), "checkpoint/store.py"),
    Name("orbax.checkpoint", "future.CommitFutureAwaitingContractedSignals", ("coro", "name"), "checkpoint/store.py"),
    Name("orbax.checkpoint", "multihost.get_barrier_sync_fn", (), "checkpoint/store.py"),
    Name(
        *("orbax.checkpoint", "type_handlers.ArrayHandler"),
        ("min_slice_bytes_for_replica_parallel",),
        "checkpoint/store.py",
    ),
    Name("orbax.checkpoint", "type_handlers.create_type_handler_registry", (), "checkpoint/store.py"),
]
_PACKAGES = "jax|jaxlib|orbax|uvicorn|starlette|fastapi|ray|optax|haiku|grain|transformers"
# a name of another package with a private part, such as `jax._src.cache_key`
_PRIVATE = re.compile(rf"\b(?:{_PACKAGES})(?:\.\w+)*\._[a-z]\w+(?:\.\w+)*")


@pytest.mark.parametrize("name", NAMES, ids=lambda name: f"{name.module.partition('.')[0]}:{name.path}")
def test_a_name_takes_what_it_is_given(name: Name) -> None:
    if name.arguments:
        parameters = inspect.signature(name.value).parameters  # type: ignore[arg-type]
        assert set(name.arguments) <= set(parameters), list(parameters)
    else:
        assert name.value is not None


def test_the_function_for_keys_of_programs_takes_what_its_replacement_takes() -> None:
    """In a process of its own: `platforms.join_job` of another test replaces it."""
    code = (
        "import inspect; from jax._src import cache_key as key; "
        "print(*(len(inspect.signature(f).parameters) for f in (key._hash_accelerator_config, key._hash_devices)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "2 2\n"


def test_the_kernels_of_attention_work_with_the_installed_jax() -> None:
    assert [kernels.left_out(platform) for platform in ("tpu", "gpu")] == [[], []]


def test_what_a_connection_reads_of_uvicorn() -> None:
    config = uvicorn.Config(app=lambda scope: None)
    config.load()
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        made = H11Protocol(config, ServerState(), {}, loop)
    assert isinstance(made.connections, set)
    assert (made.cycle, made.transport) == (None, None)
    assert {"response_started", "response_complete"} <= set(RequestResponseCycle.__init__.__code__.co_names)
    assert isinstance(uvicorn.Server(config).server_state.connections, set)


def test_what_a_store_reads_of_orbax(tmp_path: Path) -> None:
    (tmp_path / "step_3").mkdir()
    (tmp_path / f"step_4{store.TEMPORARY}-7").mkdir()
    steps = ocp.path.step.standard_name_format(step_prefix="step", single_host_load_and_broadcast=True)
    assert [(step.step, Path(step.path).name) for step in steps.find_all(tmp_path)] == [(3, "step_3")]
    inspect.signature(ocp.multihost.get_barrier_sync_fn()).bind(key="step", timeout_ms=1)


def test_the_table_has_each_private_name_and_no_other(repo: Path) -> None:
    package, modules = repo / "mesh_transformer", {name.module for name in NAMES}
    for path in package.rglob("*.py"):
        text = re.sub(r"from (jax\.\S+) import (\w+)", r"\1.\2", path.read_text())
        for private in _PRIVATE.findall(text):
            assert any(private.startswith(module) for module in modules), f"{path}: {private} is not in the table"
    for name in NAMES:
        parts = re.sub("_(fwd|bwd)_", "_{phase}_", name.path).removesuffix(".bind").split(".")
        assert parts[-1] in (package / name.file).read_text(), name
