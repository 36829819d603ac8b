"""What each program of a server costs on a CPU: to compile it, and to run it, in several layouts of the layers.

    python benchmarks/serving_programs.py --ckpt FOLDER                    # 4 slots, 8,192 positions

`packed` is the layout that decodes on a CPU, one program text for each layer. `stacked` is a scan over the layers.
Compile times are CPU seconds without a cache of programs. A program that runs is called several times; the fastest call
counts. `prefixes` are prompts whose beginning is in the cache, and the same without. Chunks of 16 to 64 tokens show
what further sizes of later chunks would save.
"""

import time
from typing import Any

import common

PROGRAMS = {
    "first chunk of 128": ("prefill", 128, 128),
    "first chunk of 512": ("prefill", 512, 512),
    "later chunk of 16, 256 positions": ("prefill", 16, 256),
    "later chunk of 32, 256 positions": ("prefill", 32, 256),
    "later chunk of 64, 256 positions": ("prefill", 64, 256),
    "later chunk of 128, 256 positions": ("prefill", 128, 256),
    "later chunk of 128, 8192 positions": ("prefill", 128, 8192),
    "later chunk of 512, 8192 positions": ("prefill", 512, 8192),
    "one token of one slot, 256 positions": ("generate", True, 256),
    "one token of all slots, 256 positions": ("generate", False, 256),
    "one token of all slots, 8192 positions": ("generate", False, 8192),
}
STEPS, CALLS, VOCAB = 16, 5, 30_000
# tokens of a cached prefix, and of the prompt
REUSED = [(84, 100), (1000, 1100), (7000, 7100)]


def main() -> None:
    made = common.parser(__doc__, config=None)
    made.add_argument("--ckpt", help="a checkpoint of any format")
    made.add_argument("--slots", type=int, default=4)
    made.add_argument("--layouts", nargs="+", default=["packed", "stacked"], choices=["packed", "stacked"])
    arguments = common.parse(made)
    children = {layout: {"worker": "measure", "layout": layout} for layout in arguments.layouts}
    children["prefixes"] = {"worker": "prefixes"}
    runs = common.in_turn(arguments, children)
    common.report({name: common.medians(records) for name, records in runs.items()})


def prefixes(arguments: Any) -> dict[str, float]:
    """CPU seconds of prompts, as a whole and with a reused prefix, to the first token."""
    import numpy as np

    from mesh_transformer.infer.requests import SamplingParams
    from mesh_transformer.infer.scheduler import Scheduler
    from mesh_transformer.runtime.session.engine import open_engine
    from mesh_transformer.runtime.session.weights import config_for

    engine = open_engine(*config_for(None, [], arguments.ckpt), slots=1)
    scheduler, random = Scheduler(engine, max_queue=1), np.random.default_rng(0)

    def cpu_seconds(prompt: list[int]) -> float:
        scheduler.submit(0, prompt, SamplingParams(max_tokens=1, temperature=0))
        before = time.process_time()
        list(scheduler.run())
        return time.process_time() - before

    for size in (20, 100, 200, 600):
        # compile the programs
        cpu_seconds(random.integers(1, VOCAB, size).tolist())
    seconds: dict[str, float] = {}
    for reused, length in REUSED:
        times = []
        for _ in range(CALLS):
            prompt, other = (random.integers(1, VOCAB, length).tolist() for _ in range(2))
            cpu_seconds(prompt[:reused])
            with_prefix = cpu_seconds(prompt)
            times.append((with_prefix, cpu_seconds(other)))
        for name, each in zip(("reused", "whole"), zip(*times, strict=True), strict=True):
            seconds[f"{length} tokens, {reused} of them cached: {name}"] = min(each)
    return seconds


def measure(arguments: Any) -> dict[str, float]:
    """The seconds of each program in one layout."""
    import jax
    import numpy as np

    from mesh_transformer.infer.engine import SlotEngine
    from mesh_transformer.infer.program_table import Generate, Prefill
    from mesh_transformer.infer.programs import ChunkBatch
    from mesh_transformer.runtime.session.session import Session
    from mesh_transformer.runtime.session.weights import config_for, read_params

    config, checkpoint = config_for(None, [], arguments.ckpt)
    session = Session.open(config)
    params = read_params(session, checkpoint, for_decode=arguments.layout == "packed").params
    engine = SlotEngine(session.whole_sequences.for_decoding(), params, slots=arguments.slots)
    slots, seconds = engine._slots, dict[str, float]()
    for name, (kind, which, length) in PROGRAMS.items():
        begin = np.full(engine.slots, length - (STEPS + 1 if kind == "generate" else which), np.int32)
        running = {"left_N": np.full_like(begin, 10**6), "drawn_N": np.ones_like(begin)}
        # where a program reads as many positions as it needs, there is one for all lengths
        if getattr(engine, "_any_length", False):
            length = engine.context
        if kind == "prefill":
            chunk = ChunkBatch.none(1, which)
            chunk.count_B[:], chunk.start_B[:] = which, begin[0]
            program, given = Prefill(1, which, length), (chunk, np.int32(0))
        else:
            slots_B = np.zeros(1, np.int32) if which else None
            program, given = Generate(bool(which), length), (slots_B, np.int32(STEPS), np.int32(0))
        before = time.process_time()
        engine.compile(program)
        seconds[f"{name}: compile"] = time.process_time() - before
        times = []
        for _ in range(CALLS):
            state = jax.device_put(slots._replace(length_N=begin, **running), engine._programs.shardings)
            jax.block_until_ready(state)
            start = time.perf_counter()
            # the call takes the arrays of the cache
            slots = jax.block_until_ready(engine.compiled[program](engine.params, state, *given))[0]
            times.append(time.perf_counter() - start)
        seconds[f"{name}: run"] = min(times) / (STEPS if kind == "generate" else 1)
    seconds["peak memory, GB"] = common.peak_memory_mib() / 953.67
    return seconds


if __name__ == "__main__":
    main()
