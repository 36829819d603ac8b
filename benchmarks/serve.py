"""Speed of the server, compared with its own engine: throughput, time to the first token, gaps between tokens, cold
start.

    python benchmarks/serve.py            # configs/70M.json, 8 slots, 32 clients, 5 rounds in turn

The engine runs with the scheduler in a process of its own, with all requests queued at once. The server is
device_serve.py, to which 32 clients send the same requests and stream the answers. Both run in turn; the ratio is that
of new tokens per second. Then a prompt of 1,000 tokens (or as many as fit the context) joins running streams, and the
gaps between their tokens are compared with the gaps before. The cold start is the time from the start of the process to
the first token of a completion, with compiled programs on disk. The tokenizer has an artificial word for each token, so
that each token has text.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import numpy as np
from checkpoint import make_checkpoint, save_words
from common import REPO, child, command, config_of, in_turn, medians, parse, parser, report

PROMPT, NEW, LONG = 64, 48, 1000
REQUESTS = 64


def main() -> None:
    made = parser(__doc__)
    made.set_defaults(overrides=["model.seq=2048"], peers="none")
    made.add_argument("--slots", type=int, default=8)
    made.add_argument("--clients", type=int, default=32)
    arguments = parse(made)
    with tempfile.TemporaryDirectory() as folder:
        arguments.ckpt = make_checkpoint(arguments, Path(folder))
        save_words(Path(folder, "words"), config_of(arguments).model.n_vocab)
        arguments.overrides.append(f"data.tokenizer={folder}/words")
        # after this run the compiled programs are on disk
        child(arguments, worker="server")
        runs = in_turn(arguments, {name: {"worker": name} for name in ("engine", "server")})
    found = {name: medians(records) for name, records in runs.items()}
    ratio = round(found["server"]["tokens_per_s"] / found["engine"]["tokens_per_s"], 3)
    report({"config": arguments.config, "slots": arguments.slots, **found, "server_over_engine": ratio})


def engine(arguments: argparse.Namespace) -> dict[str, Any]:
    """New tokens per second of the scheduler and the engine alone."""
    from mesh_transformer import platforms
    from mesh_transformer.checkpoint.open import Checkpoint
    from mesh_transformer.infer.requests import SamplingParams
    from mesh_transformer.infer.scheduler import Scheduler
    from mesh_transformer.runtime.session.engine import open_engine

    platforms.CompileCache()
    made = open_engine(config_of(arguments), Checkpoint.open(arguments.ckpt), slots=arguments.slots)
    made.warm_up()
    for program in made.programs():
        made.compile(program)
    rates = []
    # the first pass is a warm-up
    for _ in range(2):
        scheduler = Scheduler(made, max_queue=REQUESTS)
        began = time.perf_counter()
        for number, prompt in enumerate(prompts()):
            scheduler.submit(number, prompt, SamplingParams(max_tokens=NEW, temperature=1.0, seed=number))
        count = sum(len(output.tokens) for output in scheduler.run())
        rates.append(count / (time.perf_counter() - began))
    return {"tokens_per_s": rates[-1]}


def server(arguments: argparse.Namespace) -> dict[str, Any]:
    """New tokens per second through HTTP, and the delays of the clients."""
    with served(arguments) as (url, first_token_s):
        return asyncio.run(_measure(url, arguments, first_token_s))


@contextmanager
def served(arguments: argparse.Namespace) -> Any:
    """A running device_serve.py: its URL, and the seconds from its start to its first token."""
    options = ["--ckpt", arguments.ckpt, "--port", "0", "--slots", str(arguments.slots)]
    serve = command("device_serve.py", arguments.config, arguments.overrides, *options)
    began = time.perf_counter()
    child = subprocess.Popen(serve, cwd=REPO, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stderr is not None
        line = next(line for line in child.stderr if "listening on" in line)
        url = line.rpartition("listening on ")[2].split()[0]
        with httpx.Client(base_url=url, timeout=600) as client:
            while client.get("/health").status_code != 200:
                time.sleep(0.05)
            client.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 1}).raise_for_status()
        yield url, time.perf_counter() - began
    finally:
        child.terminate()
        child.wait(60)


async def _measure(url: str, arguments: argparse.Namespace, first_token_s: float) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        # the idle server reads the programs that it has not needed yet
        await asyncio.sleep(10)
        await _all(client, arguments.clients)
        began = time.perf_counter()
        streams = await _all(client, arguments.clients)
        seconds = time.perf_counter() - began
        tokens = sum(stream.tokens for stream in streams)
        waits = [stream.times[0] - stream.began for stream in streams]
        quiet, busy = await _with_a_long_prompt(client, arguments)
    return {
        "tokens_per_s": tokens / seconds,
        "first_token_p50_s": float(np.percentile(waits, 50)),
        "first_token_p99_s": float(np.percentile(waits, 99)),
        "gap_p50_ms": 1000 * statistics.median(quiet),
        "gap_p99_ms": 1000 * float(np.percentile(quiet, 99)),
        "gap_p99_ms_while_a_long_prompt_joins": 1000 * float(np.percentile(busy, 99)),
        "cold_start_to_first_token_s": first_token_s,
    }


class Stream:
    """One streamed completion: the times of its events, and its number of tokens."""

    def __init__(self) -> None:
        self.began, self.times, self.tokens = time.perf_counter(), list[float](), 0

    async def read(self, client: httpx.AsyncClient, prompt: list[int], new: int, seed: int) -> Self:
        body = {
            "prompt": prompt, "max_tokens": new, "seed": seed, "stream": True, "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        async with client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                if '"choices":[]' in line.replace(" ", ""):
                    self.tokens = json.loads(line[6:])["usage"]["completion_tokens"]
                else:
                    self.times.append(time.perf_counter())
        return self


async def _all(client: httpx.AsyncClient, clients: int) -> list[Stream]:
    """Send all requests, from `clients` clients at a time."""
    free = asyncio.Semaphore(clients)

    async def one(number: int, prompt: list[int]) -> Stream:
        async with free:
            return await Stream().read(client, prompt, NEW, number)

    return await asyncio.gather(*(one(*request) for request in enumerate(prompts())))


async def _with_a_long_prompt(
    client: httpx.AsyncClient, arguments: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """Gaps between the events of running streams, before and during the prefill of a long prompt, seconds."""
    room = config_of(arguments).model.seq
    new = room - PROMPT - 8
    running = [Stream() for _ in range(arguments.slots - 1)]
    tasks = [
        asyncio.ensure_future(stream.read(client, prompt, new, number))
        for number, (stream, prompt) in enumerate(zip(running, prompts(), strict=False))
    ]
    await asyncio.sleep(1.5)
    joined = time.perf_counter()
    long = np.random.default_rng(9).integers(1, 50000, min(LONG, room - 8)).tolist()
    await Stream().read(client, long, 1, 0)
    answered = time.perf_counter()
    await asyncio.gather(*tasks)
    gaps = [(a, b) for stream in running for a, b in zip(stream.times, stream.times[1:], strict=False)]
    quiet = [b - a for a, b in gaps if b < joined]
    busy = [b - a for a, b in gaps if b > joined and a < answered]
    return quiet, busy


def prompts() -> list[list[int]]:
    return np.random.default_rng(0).integers(1, 50000, (REQUESTS, PROMPT)).tolist()


if __name__ == "__main__":
    main()
