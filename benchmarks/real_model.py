"""A trained model beside transformers, CTranslate2 and llama.cpp, in turn: prefill and decode, wall and CPU seconds.

    pip install torch==2.13.0 ctranslate2 xllamacpp gguf
    python benchmarks/real_model.py --hf FOLDER --gguf FILE.gguf         # 512 + 64 tokens, batch 1 and 8, 5 rounds

FOLDER is the model as a Hugging Face folder in float32. llama.cpp reads FILE, and the same weights in float32. Each run
is a process of its own. A peer whose package is absent is skipped. Prefill is the time to the first token of all
sequences; decode is the time of the further ones. Each repetition has other prompts, so that no cache has them.
"""

import argparse
import importlib.util
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common
import numpy as np

PROMPT, NEW, REPEATS, VOCAB = 512, 64, 2, 30_000
PEERS = {"transformers": "torch", "ctranslate2": "ctranslate2", "llama_f32": "xllamacpp", "llama_file": "xllamacpp"}
KEYS = ("prefill_tokens_per_s", "decode_tokens_per_s", "prefill_cpu_s", "decode_cpu_s", "peak_memory_mib")
# the tokens of the sequences, given prompts and a number of new tokens
Generate = Callable[[list[list[int]], int], list[list[int]]]


def main() -> None:
    made = common.parser(__doc__, config=None)
    made.add_argument("--hf", help="Hugging Face folder of the model")
    made.add_argument("--gguf", help="the same model as a GGUF file")
    made.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    arguments = common.parse(made)
    with tempfile.TemporaryDirectory() as arguments.folder:
        workers = ["ours", *(name for name, package in PEERS.items() if importlib.util.find_spec(package))]
        if not arguments.gguf:
            workers = [name for name in workers if not name.startswith("llama")]
        if "ctranslate2" in workers:
            convert(arguments)
        if "llama_f32" in workers:
            write_f32(arguments.gguf, f"{arguments.folder}/f32.gguf")
        children = {f"{name} {n}": {"worker": name, "batch": n} for n in arguments.batches for name in workers}
        runs = common.in_turn(arguments, children)
    result: dict[str, Any] = {name: common.medians(records, *KEYS) for name, records in runs.items()}
    for name, records in runs.items():
        batch = name.split()[1]
        if not name.startswith("ours"):
            result[name]["ours_over_it"] = {key: ratios(runs[f"ours {batch}"], records, key) for key in KEYS[:2]}
            if not name.startswith("llama"):
                result[name]["equal_tokens"] = equal(runs[f"ours {batch}"][0]["tokens"], records[0]["tokens"])
    common.report(result)


def ratios(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], key: str) -> list[float]:
    """The median of the rounds' ratios, the least and the largest."""
    each = [a[key] / b[key] for a, b in zip(ours, theirs, strict=True)]
    return [round(value, 3) for value in (statistics.median(each), min(each), max(each))]


def equal(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """The share of greedy tokens that are equal, up to the first one of each sequence that differs."""
    pairs = [list(zip(*sequences, strict=True)) for sequences in zip(ours, theirs, strict=True)]
    same = [next((at for at, (a, b) in enumerate(pair) if a != b), len(pair)) for pair in pairs]
    return round(sum(same) / sum(map(len, pairs)), 3)


def ours(arguments: argparse.Namespace) -> dict[str, Any]:
    """Our engine, as `serve` uses it."""
    from mesh_transformer import platforms
    from mesh_transformer.infer.requests import SamplingParams
    from mesh_transformer.infer.scheduler import Scheduler
    from mesh_transformer.runtime.session.engine import open_engine
    from mesh_transformer.runtime.session.weights import config_for

    platforms.CompileCache()
    engine = open_engine(*config_for(None, [], arguments.hf), slots=arguments.batch, context=1024)

    def generate(prompts: list[list[int]], new: int) -> list[list[int]]:
        scheduler = Scheduler(engine, max_queue=len(prompts), max_steps=16)
        for number, prompt in enumerate(prompts):
            scheduler.submit(number, prompt, SamplingParams(max_tokens=new, temperature=0))
        tokens: list[list[int]] = [[] for _ in prompts]
        for output in scheduler.run():
            tokens[output.request] += [token.id for token in output.tokens]
        return tokens

    return timed(generate, arguments.batch)


def transformers(arguments: argparse.Namespace) -> dict[str, Any]:
    """`generate` of transformers in torch with its default cache, greedy."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(arguments.hf, dtype=torch.float32).eval()

    def generate(prompts: list[list[int]], new: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        how = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0, "min_new_tokens": new}
        with torch.inference_mode():
            return model.generate(ids, max_new_tokens=new, **how)[:, ids.shape[1] :].tolist()

    return timed(generate, arguments.batch)


def ctranslate2(arguments: argparse.Namespace) -> dict[str, Any]:
    """CTranslate2's generator, in float32 on all cores, greedy."""
    import ctranslate2 as ct2

    threads = os.cpu_count() or 1
    model = ct2.Generator(f"{arguments.folder}/ct2", compute_type="float32", intra_threads=threads)
    words = json.loads(Path(arguments.folder, "ct2/vocabulary.json").read_text())

    def generate(prompts: list[list[int]], new: int) -> list[list[int]]:
        options = {"sampling_topk": 1, "include_prompt_in_result": False, "end_token": []}
        given = [[words[token] for token in prompt] for prompt in prompts]
        results = model.generate_batch(given, max_length=new, min_length=new, **options)
        return [result.sequences_ids[0] for result in results]

    return timed(generate, arguments.batch)


def llama_f32(arguments: argparse.Namespace) -> dict[str, Any]:
    """llama.cpp with the weights in float32."""
    return llama(f"{arguments.folder}/f32.gguf", arguments.batch)


def llama_file(arguments: argparse.Namespace) -> dict[str, Any]:
    """llama.cpp with the weights of the GGUF file."""
    return llama(arguments.gguf, arguments.batch)


def llama(path: str, batch: int) -> dict[str, Any]:
    """llama.cpp's server in this process, greedy, on all cores."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_parallel, params.n_ctx, params.warmup, params.port = batch, 1024 * batch, True, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count() or 1
    server = xllamacpp.Server(params)

    def generate(prompts: list[list[int]], new: int) -> list[list[int]]:
        def one(prompt: list[int]) -> list[int]:
            body = {"prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
            server.handle_completions(body)
            # its answer has no token IDs
            return []

        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(one, prompts))

    return timed(generate, batch)


def timed(generate: Generate, batch: int) -> dict[str, Any]:
    """The medians of so many repetitions, after one warm-up run."""
    random = np.random.default_rng(0)
    generate(random.integers(1, VOCAB, (batch, PROMPT)).tolist(), NEW)
    rows = []
    for _ in range(REPEATS):
        # other prompts each time, so that none of them is in a cache
        first, whole = (random.integers(1, VOCAB, (batch, PROMPT)).tolist() for _ in range(2))
        clocks = [(time.perf_counter(), time.process_time())]
        generate(first, 1)
        clocks.append((time.perf_counter(), time.process_time()))
        tokens = generate(whole, NEW)
        clocks.append((time.perf_counter(), time.process_time()))
        (wall, cpu), (both_wall, both_cpu) = (np.subtract(b, a) for a, b in zip(clocks, clocks[1:], strict=False))
        rows.append((wall, cpu, both_wall - wall, both_cpu - cpu))
    prefill, prefill_cpu, decode, decode_cpu = map(statistics.median, zip(*rows, strict=True))
    return {
        "prefill_tokens_per_s": batch * PROMPT / prefill,
        "decode_tokens_per_s": batch * (NEW - 1) / decode,
        "prefill_cpu_s": prefill_cpu,
        "decode_cpu_s": decode_cpu,
        "peak_memory_mib": common.peak_memory_mib(),
        "tokens": tokens,
    }


def convert(arguments: argparse.Namespace) -> None:
    """Write the model in CTranslate2's format."""
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(arguments.hf).convert(f"{arguments.folder}/ct2", force=True)


def write_f32(source: str, target: str) -> None:
    """Write a GGUF file with all tensors in float32."""
    import gguf

    read = gguf.GGUFReader(source)
    architecture = read.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in read.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub_type)
    for tensor in read.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
