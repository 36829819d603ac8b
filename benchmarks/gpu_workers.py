"""What one process of benchmarks/gpu.py measures. Each function returns the figures of a case.

`benchmarks/gpu.py` starts this file with --worker.
"""

import argparse
import contextlib
import subprocess
from collections.abc import Callable
from typing import Any

import common
import generate
import train_step

from mesh_transformer import accelerators

GIB = 2**30


def device(_: argparse.Namespace) -> dict[str, Any]:
    """The first device: its kind, its platform, the memory that JAX may use (None: not known), and the versions."""
    import jax

    first = jax.devices()[0]
    limit = (first.memory_stats() or {}).get("bytes_limit")
    versions = common.machine()["versions"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "rev-parse", "--short", "HEAD"]
        versions["commit"] = subprocess.run(
            command, cwd=common.REPO, capture_output=True, check=True, text=True
        ).stdout.strip()
    return {
        "kind": first.device_kind,
        "platform": first.platform,
        "gib": None if limit is None or first.platform == "cpu" else limit / GIB,
        "versions": versions,
    }


def rates(arguments: argparse.Namespace) -> dict[str, Any]:
    """The rate of products in bfloat16, the fastest of three shapes; the rates of the memory: a sum, a copy, and the
    product of one row with a matrix. `arguments.size`: rows of the largest matrix."""
    import jax.numpy as jnp

    size = arguments.size
    products = []
    for rows, inner, columns in [(size // 2,) * 3, (size, size // 4, size), (size, size, size // 4)]:
        left, right = jnp.ones((rows, inner), jnp.bfloat16), jnp.ones((inner, columns), jnp.bfloat16)
        products.append(2e-12 * rows * inner * columns / _seconds(jnp.matmul, left, right))
    values, matrix = jnp.ones(4 * size * size, jnp.bfloat16), jnp.ones((size, size), jnp.bfloat16)
    measured = {
        "product_tflops": max(products),
        "read_gb_s": values.nbytes / _seconds(lambda x: x.astype(jnp.float32).sum(), values) / 1e9,
        "copy_gb_s": 2 * values.nbytes / _seconds(lambda x: -x, values) / 1e9,
        "row_product_gb_s": matrix.nbytes / _seconds(jnp.matmul, matrix[:1], matrix) / 1e9,
    }
    known = accelerators.of_device(arguments.device_kind)
    if known:
        measured["share_of_peak"] = measured["product_tflops"] / known.peak_tflops
        measured["share_of_memory_rate"] = measured["read_gb_s"] / known.memory_gb_s
    return _rounded(measured)


def attention(arguments: argparse.Namespace) -> dict[str, Any]:
    """Causal attention in bfloat16, forward alone, and forward with backward. FLOPs count the pairs of a causal mask:
    two products forward, five backward. The difference of a kernel's output from the plain one is of one sequence."""
    import jax
    import jax.numpy as jnp

    from mesh_transformer.ops.attend.causal import Causal

    seq, dims = arguments.seq, arguments.head_dim
    shape = max(1, arguments.tokens // seq), seq, max(1, arguments.width // dims), dims
    q, k, v, dy = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(4))
    scale = dims**-0.5

    def plain(q: Any, k: Any, v: Any) -> Any:
        return Causal()(q, k, v, scale=scale)

    def cudnn(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=True, implementation="cudnn")

    attend = {"plain": plain, "cudnn": cudnn}[arguments.kind]

    def both(q: Any, k: Any, v: Any, dy: Any) -> Any:
        y, pull = jax.vjp(attend, q, k, v)
        return y, pull(dy)

    forward_s, both_s = _seconds(attend, q, k, v), _seconds(both, q, k, v, dy)
    sequences, _, heads, _ = shape
    product = 2 * sequences * heads * dims * seq * seq / 2
    measured = {
        "forward_ms": 1e3 * forward_s,
        "both_ms": 1e3 * both_s,
        "forward_tflops": 2e-12 * product / forward_s,
        "both_tflops": 7e-12 * product / both_s,
    }
    if attend is not plain:
        theirs, ours = (jax.jit(one)(q[:1], k[:1], v[:1]).astype(jnp.float32) for one in (attend, plain))
        measured["difference"] = float(jnp.abs(theirs - ours).max())
    return _rounded(measured)


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    """The trainer's own step."""
    return _trained(train_step.ours(arguments), arguments)


def torch_train(arguments: argparse.Namespace) -> dict[str, Any]:
    """The same step in torch."""
    return _trained(train_step.torch_step(arguments, arguments.compiled), arguments)


def decode(arguments: argparse.Namespace) -> dict[str, Any]:
    """Our engine with random weights, as the server runs it; with `arguments.by_layer`, "blocks" is a tuple of
    layers."""
    import jax

    from mesh_transformer import platforms
    from mesh_transformer.infer.cpu.packed import PackedLayer
    from mesh_transformer.runtime.session.engine import ServingEngine
    from mesh_transformer.runtime.session.session import Session

    platforms.CompileCache()
    config = common.config_of(arguments)
    placement = Session.open(config).whole_sequences.for_decoding()
    model = placement.model
    init = jax.jit(lambda key: placement.cast(model.init(key)), out_shardings=placement.shardings)
    params = init(jax.random.key(0))
    if arguments.by_layer:
        stacks = params["blocks"]
        layers = (
            {module: jax.tree.map(lambda x, at=row: x[at], stacks[name]) for module, (name, row) in layer.items()}
            for layer in model.rows_by_layer
        )
        # the arrays as they are: nothing is transposed or joined
        params["blocks"] = tuple(PackedLayer(layer, joined=(), names=(), sizes=()) for layer in layers)
        del stacks
    engine = ServingEngine(placement, params, slots=arguments.batch, context=arguments.context)
    del params
    rate = generate.decoded(engine, arguments.batch, arguments.repeats)
    # each step reads the positions that are written, on average to the middle of the new tokens
    cache = engine.cache_bytes / engine.context * (generate.PROMPT + generate.NEW / 2)
    return _decoded(rate, arguments, generate.weight_bytes(config) + cache)


def torch_decode(arguments: argparse.Namespace) -> dict[str, Any]:
    """`generate` of transformers with its static cache, compiled if `arguments.compiled`."""
    import torch

    worker = generate.transformers_compiled if arguments.compiled else generate.transformers_static
    rate = worker(arguments)
    if torch.cuda.is_available():
        rate["peak_memory_mib"] = torch.cuda.max_memory_allocated() / 2**20
    return _decoded(rate, arguments, None)


def preflight(arguments: argparse.Namespace) -> dict[str, Any]:
    """What preflight.py --gpu says of the training step. It compiles on the CPU."""
    from mesh_transformer.estimate.prediction import predict_training
    from mesh_transformer.estimate.programs import default_folder
    from mesh_transformer.estimate.target import gpu_target

    found = predict_training(common.config_of(arguments), gpu_target(arguments.gpu), (), default_folder())
    figures = {"peak_gib": found.peak_gib, "step_s": found.step_s, "mfu": found.mfu}
    return {"fits": found.fits, **_rounded({name: value for name, value in figures.items() if value is not None})}


def _trained(measured: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    from mesh_transformer.spec.flops import flops_per_token

    config, known = common.config_of(arguments), accelerators.of_device(arguments.device_kind)
    figures = {"tokens_per_s": measured["tokens_per_s"], "peak_gib": measured["peak_memory_mib"] / 1024}
    if known:
        flops = measured["tokens_per_s"] * flops_per_token(config.decoder, config.seq)
        figures["mfu"] = flops / (1e12 * known.peak_tflops)
    return _rounded(figures)


def _decoded(rate: dict[str, Any], arguments: argparse.Namespace, read: float | None) -> dict[str, Any]:
    """The figures of a decode. `read`: bytes that a step reads; None: not known."""
    known = accelerators.of_device(arguments.device_kind)
    seconds = arguments.batch / rate["decode_tokens_per_s"]
    figures = {
        "ms_a_token": 1e3 * seconds,
        "tokens_per_s": rate["decode_tokens_per_s"],
        "prefill_tokens_per_s": rate["prefill_tokens_per_s"],
        "peak_gib": rate["peak_memory_mib"] / 1024,
    }
    if read is not None:
        figures["gb_s"] = read / seconds / 1e9
        if known:
            figures["share_of_memory_rate"] = figures["gb_s"] / known.memory_gb_s
    return _rounded(figures)


def _seconds(function: Callable[..., Any], *arrays: Any) -> float:
    """Seconds of one call of a compiled function: the median of nine groups of calls, which begin while others run."""
    import jax

    compiled, calls = jax.jit(function), 4

    def group() -> None:
        jax.block_until_ready([compiled(*arrays) for _ in range(calls)])

    return common.median_seconds(group, 9) / calls


def _rounded(figures: dict[str, Any]) -> dict[str, Any]:
    """Four significant digits."""
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


if __name__ == "__main__":
    common.parse(common.parser(__doc__, config=None, rounds=None))
