"""Speed of prefill and decode, compared with Hugging Face transformers (torch) and CTranslate2, with the same weights,
in turn.

    pip install torch==2.13.0 ctranslate2
    python benchmarks/generate.py                # configs/70M.json, float32, batch 1 and 8, 128 + 64 tokens, 5 rounds
    python benchmarks/generate.py --peers none --config C --ckpt D --batches 1 8 64     # such as on a GPU

Each run is a process of its own. The prefill rate is prompt tokens per second until the first new token; the decode
rate is new tokens per second after it. The memory rate is that of reading a large matrix for a product with one row.
The share of the memory rate compares a decode step with one read of all weights. Transformers runs with its default
cache, with its static cache, and with the static cache and torch.compile; the fastest of the three is compared. All
programs must choose the same tokens by greedy decoding, or the exit code is 1. Without the package ctranslate2 that
peer is skipped.
"""

import argparse
import importlib.util
import itertools
import os
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import common
import numpy as np
from checkpoint import load_torch, make_checkpoint, random_torch

PROMPT, NEW, REPEATS = 128, 64, 5
TRANSFORMERS = ["transformers", "transformers_static", "transformers_compiled"]
PEERS = {
    "torch": {"transformers": TRANSFORMERS},
    "all": {"transformers": TRANSFORMERS, "ctranslate2": ["ctranslate2"]},
    "none": {},
}
RATES = ("prefill_tokens_per_s", "decode_tokens_per_s")


def main() -> None:
    made = common.parser(__doc__)
    made.add_argument("--ckpt", help="checkpoint of the config's model (default: random weights)")
    made.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    made.add_argument("--peers", choices=list(PEERS), default="all")
    made.add_argument("--plot", metavar="PNG", help="write a bar chart of the rates")
    arguments = common.parse(made)
    if arguments.peers == "all" and importlib.util.find_spec("ctranslate2") is None:
        common.say("CTranslate2 is skipped: it is not installed (pip install ctranslate2)")
        arguments.peers = "torch"
    with tempfile.TemporaryDirectory() as arguments.folder:
        arguments.ckpt = arguments.ckpt or make_checkpoint(arguments, Path(arguments.folder))
        children: dict[str, dict[str, Any]] = {"memory": {"worker": "memory"}}
        for batch in arguments.batches:
            for worker in itertools.chain(["ours"], *PEERS[arguments.peers].values()):
                children[f"{worker} {batch}"] = {"worker": worker, "batch": batch}
        runs = common.in_turn(arguments, children)
    result = summary(runs, arguments)
    if arguments.plot:
        plot(result, arguments.plot)
    common.report(result)
    common.end(differences(runs))


def summary(runs: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds, and the ratios to each peer."""
    rate = common.medians(runs["memory"])["gigabytes_per_s"]
    runs = {name: records for name, records in runs.items() if name != "memory"}
    result: dict[str, Any] = {"config": arguments.config, "memory_gb_per_s": rate}
    for name, records in runs.items():
        result[name] = common.medians(records, *RATES, "peak_memory_mib")
        batch = int(name.split()[1])
        read = result[name]["decode_tokens_per_s"] / batch * records[0]["weight_bytes"] / 1e9
        result[name]["share_of_memory_rate"] = round(read / rate, 3)
    for batch, (peer, workers) in itertools.product(arguments.batches, PEERS[arguments.peers].items()):
        ratios = result.setdefault(f"ours_over_peers at batch {batch}", {})
        for key in RATES:
            fastest = max(result[f"{worker} {batch}"][key] for worker in workers)
            ratios[f"{peer} {key.split('_')[0]}"] = round(result[f"ours {batch}"][key] / fastest, 3)
    return result


def differences(runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The first token of each sequence that differs from our first run with the same batch size."""
    found = []
    for name, records in runs.items():
        for number, record in enumerate(records if name != "memory" else [], 1):
            expected = runs[f"ours {name.split()[1]}"][0]["tokens"]
            for row, sequences in enumerate(zip(record["tokens"], expected, strict=True)):
                pairs = enumerate(itertools.zip_longest(*sequences))
                if apart := [(at, *pair) for at, pair in pairs if pair[0] != pair[1]]:
                    at, theirs, ours = apart[0]
                    found.append(f"{name}, round {number}, sequence {row}, token {at}: {theirs}, not {ours}")
    return found


def plot(result: dict[str, Any], path: str) -> None:
    """Draw the median rates of prefill and decode as bars, by batch size and program."""
    from matplotlib.figure import Figure

    measured = {tuple(words): value for name, value in result.items() if len(words := name.split()) == 2}
    programs, batches = (list(dict.fromkeys(names)) for names in zip(*measured, strict=True))
    figure = Figure(figsize=(9, 3.5), layout="tight")
    axes = figure.subplots(1, 2)
    for axis, key in zip(axes, RATES, strict=True):
        rates = {name: [measured[name, batch][key] for batch in batches] for name in programs}
        bars = axis.grouped_bar(rates, tick_labels=[f"batch {batch}" for batch in batches])
        for one in bars.bar_containers:
            axis.bar_label(one, fmt="{:,.0f}", fontsize=8)
        axis.set(title=key.partition("_")[0], ylabel="tokens per second")
    axes[0].legend(fontsize=8, loc="upper left")
    axes[0].margins(y=0.25)
    axes[1].margins(y=0.1)
    figure.savefig(path, dpi=120)


def ours(arguments: argparse.Namespace) -> dict[str, Any]:
    """Our engine, as device_serve.py and device_sample.py use it."""
    from mesh_transformer import platforms
    from mesh_transformer.checkpoint.open import Checkpoint
    from mesh_transformer.runtime.session.engine import open_engine

    platforms.CompileCache()
    config = common.config_of(arguments)
    engine = open_engine(config, Checkpoint.open(arguments.ckpt), slots=arguments.batch)
    return {**decoded(engine, arguments.batch), "weight_bytes": weight_bytes(config)}


def decoded(engine: Any, batch: int, repeats: int = REPEATS) -> dict[str, Any]:
    """The rates of one of our engines with `batch` slots, as `timed` has them, and the peak memory of the device."""
    from mesh_transformer.infer.programs import MAX_STEPS
    from mesh_transformer.infer.requests import PromptChunk, SamplingParams

    params = SamplingParams(max_tokens=NEW, temperature=0)

    def run() -> tuple[float, float, list[list[int]]]:
        began = time.perf_counter()
        tokens: list[list[int]] = []
        for slot, prompt in enumerate(prompts(batch, engine.model.decoder.n_vocab)):
            engine.insert(slot, prompt, params, source=None, reused=0)
        at_once = engine.max_prefill_tokens // PROMPT
        for slot in range(0, batch, at_once):
            chunks = [PromptChunk(slot, 0, PROMPT) for slot in range(slot, min(batch, slot + at_once))]
            tokens += [[found.first.token.id] if found.first else [] for found in engine.prefill(chunks)]
        middle = time.perf_counter()
        while emitted := engine.generate(MAX_STEPS)():
            for one in emitted:
                tokens[one.slot].append(one.token.id)
        seconds = time.perf_counter() - middle
        for slot in range(batch):
            engine.release(slot)
        return middle - began, seconds, tokens

    return {**timed(run, batch, repeats), "peak_memory_mib": common.own_peak_memory_mib()}


def transformers(arguments: argparse.Namespace, **how: Any) -> dict[str, Any]:
    """`generate` of transformers in torch, greedy. `how` holds further options of `generate`. Without a folder: with
    random weights in bfloat16."""
    import torch

    config = common.config_of(arguments)
    if arguments.folder:
        model = load_torch(arguments.folder)
    else:
        model = random_torch(config, torch.bfloat16).eval()
    ids = torch.tensor(prompts(arguments.batch, config.model.n_vocab), device=model.device)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0, **how}

    def generate(new: int) -> list[list[int]]:
        with torch.inference_mode():
            return model.generate(ids, max_new_tokens=new, min_new_tokens=new, **options)[:, PROMPT:].tolist()

    return measured(generate, arguments)


# with a static cache, and without compiling
transformers_static = partial(transformers, cache_implementation="static", disable_compile=True)


def transformers_compiled(arguments: argparse.Namespace) -> dict[str, Any]:
    """With a static cache and a compiled decode step, on CPU too. On a GPU the step is a CUDA graph."""
    import torch
    from transformers import CompileConfig

    config = CompileConfig(mode="reduce-overhead" if torch.cuda.is_available() else "default")
    # by default transformers compiles only for accelerators
    config._compile_all_devices = True
    return transformers(arguments, cache_implementation="static", compile_config=config)


def ctranslate2(arguments: argparse.Namespace) -> dict[str, Any]:
    """CTranslate2's generator, in float32 on all cores, greedy."""
    import ctranslate2 as ct2

    threads = os.cpu_count() or 1
    model = ct2.Generator(f"{arguments.folder}/ct2", compute_type="float32", intra_threads=threads)
    n_vocab = common.config_of(arguments).model.n_vocab
    words = [[f"t{i}" for i in prompt] for prompt in prompts(arguments.batch, n_vocab)]
    options = {"sampling_topk": 1, "include_prompt_in_result": False, "end_token": []}

    def generate(new: int) -> list[list[int]]:
        out = model.generate_batch(words, max_length=new, min_length=new, **options)
        return [result.sequences_ids[0] for result in out]

    return measured(generate, arguments)


def measured(generate: Callable[[int], Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """The rates of a peer's `generate(new)`, which returns `new` tokens per sequence."""

    def run() -> tuple[float, float, Any]:
        began = time.perf_counter()
        generate(1)
        middle = time.perf_counter()
        tokens = generate(NEW)
        return middle - began, time.perf_counter() - middle - (middle - began), tokens

    repeats = getattr(arguments, "repeats", REPEATS)
    return {**timed(run, arguments.batch, repeats), "weight_bytes": weight_bytes(common.config_of(arguments))}


def memory(_: argparse.Namespace) -> dict[str, Any]:
    """The memory rate: gigabytes per second of a product of one row with a matrix much larger than the caches."""
    import jax
    import jax.numpy as jnp

    row, matrix = jnp.ones((1, 8192)), jnp.ones((8192, 16384))
    product = jax.jit(jnp.matmul)
    seconds = timeit.repeat(lambda: jax.block_until_ready(product(row, matrix)), number=1, repeat=9)
    return {"gigabytes_per_s": matrix.nbytes / min(seconds) / 1e9}


def timed(run: Any, batch: int, repeats: int) -> dict[str, Any]:
    """Median rates of so many runs, after one warm-up run."""
    run()
    firsts, rests, tokens = zip(*(run() for _ in range(repeats)), strict=True)
    return {
        "prefill_tokens_per_s": batch * PROMPT / statistics.median(firsts),
        "decode_tokens_per_s": batch * (NEW - 1) / statistics.median(rests),
        "peak_memory_mib": common.peak_memory_mib(),
        "tokens": tokens[0],
    }


def weight_bytes(config: Any) -> int:
    """Bytes of weights that a decode step reads: all except the embedding, of which it reads a row."""
    from mesh_transformer.runtime.session.session import Session, count_parameters

    placement = Session.open(config).placement
    dtype = placement.model.dtype
    embedding = placement.model.decoder.padded_vocab * config.model.d_model
    return (count_parameters(placement.abstract(dtype)) - embedding) * dtype.itemsize


def prompts(batch: int, n_vocab: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(1, min(n_vocab, 30000), (batch, PROMPT)).tolist()


if __name__ == "__main__":
    main()
