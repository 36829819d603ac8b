"""Tokens per second of the trainer's own step, compared with the same model of Hugging Face transformers in torch, in
turn.

    python benchmarks/train_step.py                                   # configs/70M.json on this machine, 5 rounds
    python benchmarks/train_step.py --config configs/llama_70M.json   # a model of another family
    python benchmarks/train_step.py --peer none --config C --set k=v  # without a peer, such as on a GPU

Each run is a process of its own: two warm-up steps, then timed steps. The peer is the class of transformers that the
export names, with the fused AdamW and without dropout, eager and compiled; the ratio is to the faster of the two. The
matrix rate is the peak of the device, or where no peak is known, the rate of the fastest of several large float32
products.
"""

import argparse
import contextlib
import functools
from typing import Any

import common
import numpy as np
from checkpoint import random_torch


def main() -> None:
    made = common.parser(__doc__)
    made.add_argument("--peer", choices=["torch", "none"], default="torch")
    made.add_argument("--steps", type=int, default=4, help="timed steps per run (default: %(default)s)")
    made.add_argument(
        "--peak-tflops",
        type=float,
        help="peak rate of a device, to compute the share of it (default: that in mesh_transformer/accelerators.py, "
        "or else the measured rate of matrix products)",
    )
    arguments = common.parse(made)
    peers = [] if arguments.peer == "none" else ["torch_eager", "torch_compiled"]
    runs = common.in_turn(arguments, {name: {"worker": name} for name in ["ours", *peers, "matmul"]})
    common.report(summary(runs, peers, arguments))


def summary(runs: dict[str, list[dict[str, Any]]], peers: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds, and the ratios."""
    result: dict[str, Any] = {"config": arguments.config, "set": arguments.overrides}
    for name, records in runs.items():
        result[name] = common.medians(records)
        result[name]["runs"] = [round(next(iter(record.values())), 1) for record in records]
    ours = result["ours"]
    peak_tflops = arguments.peak_tflops or ours["peak_tflops"]
    rate = 1e12 * peak_tflops if peak_tflops else 1e9 * result["matmul"]["gflops"]
    ours["share_of_matrix_rate"] = round(ours["tokens_per_s"] * ours["flops_per_token"] / rate, 3)
    if peers:
        best = max(peers, key=lambda name: result[name]["tokens_per_s"])
        result["peer"] = best
        share = result[best]["tokens_per_s"] * ours["flops_per_token"] / rate
        result[best]["share_of_matrix_rate"] = round(share, 3)
        result["speed_ratio"] = round(ours["tokens_per_s"] / result[best]["tokens_per_s"], 3)
        result["memory_ratio"] = round(ours["peak_memory_mib"] / result[best]["peak_memory_mib"], 3)
    return result


def ours(arguments: argparse.Namespace) -> dict[str, float]:
    """Our step, as the trainer builds it."""
    import jax

    from mesh_transformer import accelerators, platforms
    from mesh_transformer.runtime.session.session import count_parameters
    from mesh_transformer.spec.flops import flops_per_token

    config = common.config_of(arguments)
    platforms.CompileCache()
    step = common.OwnStep(config)
    seconds = common.median_seconds(step, arguments.steps)
    accelerator = accelerators.of_device(jax.devices()[0].device_kind)
    return {
        "tokens_per_s": step.session.tokens_per_step / seconds / jax.device_count(),
        "peak_memory_mib": common.own_peak_memory_mib(),
        "parameters": count_parameters(step.state.params) + count_parameters(step.state.frozen),
        "flops_per_token": flops_per_token(config.decoder, config.seq),
        # 0: unknown
        "peak_tflops": accelerator.peak_tflops if accelerator else 0,
    }


def torch_step(arguments: argparse.Namespace, compiled: bool) -> dict[str, float]:
    """The same model and batch in transformers, with the loss of transformers. On a GPU: products in bfloat16 of
    parameters in float32, as ours, and the flash kernel of torch. `arguments.recompute`: gradient checkpointing."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    config = common.config_of(arguments)
    on_gpu = torch.cuda.is_available()
    model = random_torch(config, torch.float32, use_cache=False).train()
    if getattr(arguments, "recompute", False):
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = torch.compile(model) if compiled else model
    batch = config.microbatch(config.mesh.shape(1))
    tokens = torch.from_numpy(common.random_tokens(config, 1, batch)[0, :, : config.seq].astype(np.int64))
    tokens = tokens.to(model.device)

    def step() -> None:
        with contextlib.ExitStack() as stack:
            if on_gpu:
                stack.enter_context(torch.autocast("cuda", torch.bfloat16))
                stack.enter_context(sdpa_kernel(SDPBackend.FLASH_ATTENTION))
            loss = run(input_ids=tokens, labels=tokens).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()

    seconds = common.median_seconds(step, arguments.steps)
    peak = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else common.peak_memory_mib()
    return {"tokens_per_s": tokens.numel() / seconds, "peak_memory_mib": peak}


torch_eager = functools.partial(torch_step, compiled=False)
torch_compiled = functools.partial(torch_step, compiled=True)


def matmul(arguments: argparse.Namespace) -> dict[str, float]:
    """The rate of large float32 matrix products: the fastest of several shapes and layouts."""
    import jax
    import jax.numpy as jnp

    rates = []
    for rows, inner, columns in [(2048, 2048, 2048), (2048, 512, 2048), (512, 512, 50432)]:
        left = jnp.ones((rows, inner))
        for shape, spec in [((inner, columns), "mk,kn->mn"), ((columns, inner), "mk,nk->mn")]:
            right = jnp.ones(shape)
            product = jax.jit(lambda a, b, spec=spec: jnp.einsum(spec, a, b))
            seconds = common.median_seconds(lambda p=product, a=left, b=right: jax.block_until_ready(p(a, b)), 9)
            rates.append(2 * rows * inner * columns / seconds / 1e9)
    return {"gflops": max(rates)}


if __name__ == "__main__":
    main()
