"""Memory and speed of conversions of GPT-J-6B, compared with `cp -r`: 8 classic shards to 1, to native, to Hugging Face
and back.

    python benchmarks/convert_6b.py --folder SCRATCH [--config configs/6B_roto_256.json] [--turns 3]

The benchmark writes a random slim checkpoint (12 GB for the 6B config) to SCRATCH. Each conversion runs in a process of
its own, right after a `cp -r` of its input. Both start after a sync of the disk, and neither syncs at its end. Peak
memory is VmHWM of the process, which counts its own pages and those of mapped files, but not the page cache. Each line
of the output is a JSON object. This needs Linux and space for three checkpoints.

    python benchmarks/convert_6b.py --folder SCRATCH --sample [--set compute.dtype=float32]

With --sample: the peak memory of device_sample.py for 8 tokens of one prompt on CPU, minus that of a tiny model,
divided by the size of the weights in compute.dtype.
"""

import argparse
import math
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from common import REPO, child, command, config_of, emit, parse, parser, peak_memory_mib

# The package's checkpoints need jax. Functions import them, because a process starts with the peak memory of its
# parent.
SHARDS, STEP = 8, 1
DTYPE = ["mesh.tp=1", "mesh.dp=1", "compute.dtype=bfloat16"]
TINY = {"layers": 2, "d_model": 64, "n_heads": 8, "n_vocab": 512, "pe_rotary_dims": 8}
BLOCK = 1 << 20


class RandomSource:
    """Parameters of a model, bfloat16: a repeated block of random numbers."""

    where, extra = "random", dict[str, object]()

    def __init__(self, model: Any):
        from mesh_transformer.checkpoint.tensors import TensorInfo, UpdateCounts, parameter_shapes

        kind = np.dtype(ml_dtypes.bfloat16)
        self.counts = UpdateCounts(STEP)
        self.tensors = {f"params/{name}": TensorInfo(shape, kind) for name, shape in parameter_shapes(model).items()}
        self.block = (np.random.default_rng(0).standard_normal(BLOCK, np.float32) / 64).astype(kind)

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        sizes = zip(index, self.tensors[name].shape, strict=True)
        return np.resize(self.block, [len(range(*s.indices(n))) for s, n in sizes])


def convert(arguments: argparse.Namespace) -> dict[str, float]:
    """Run one conversion, or write the input of the others. Returns its seconds and the peak memory of this process in
    MiB."""
    began = time.perf_counter()
    from mesh_transformer.checkpoint.classic.source import ClassicSource
    from mesh_transformer.checkpoint.classic.writer import write_classic
    from mesh_transformer.checkpoint.hf.source import HFSource
    from mesh_transformer.checkpoint.hf.writer import write_hf
    from mesh_transformer.checkpoint.native.writer import write_native

    model, what = config_of(arguments).model, arguments.what
    opened: Any
    if what == "make":
        opened = RandomSource(model)
    else:
        opened = (HFSource if what.startswith("Hugging Face") else ClassicSource)(arguments.source, model)
    match what.rpartition("to ")[2]:
        case "native":
            write_native(opened, arguments.target)
        case "Hugging Face":
            write_hf(opened, model, arguments.target)
        case "1 shard":
            write_classic(opened, model, arguments.target, 1)
        case _:
            write_classic(opened, model, arguments.target, SHARDS)
    return {"seconds": round(time.perf_counter() - began, 1), "peak_mib": peak_memory_mib()}


def measure(arguments: argparse.Namespace, what: str, source: Path, target: Path) -> dict[str, float]:
    """The report of `convert`, after a sync of the disk."""
    os.sync()
    return child(arguments, worker="convert", what=what, source=str(source), target=str(target))


def compare(arguments: argparse.Namespace, what: str, source: Path, target: Path) -> None:
    """Run a copy and then a conversion, and print one line of JSON. The output of the conversion stays."""
    copy = target.with_name("copy")
    for _ in range(arguments.turns):
        shutil.rmtree(target, ignore_errors=True)
        os.sync()
        began = time.perf_counter()
        subprocess.run(["cp", "-r", source, copy], check=True)
        cp = round(time.perf_counter() - began, 1)
        shutil.rmtree(copy)
        found = measure(arguments, what, source, target)
        speed = round(cp / max(found["seconds"], math.ulp(1)), 2)
        emit({what: {**found, "cp_seconds": cp, "speed_against_cp": speed}})


def sample(arguments: argparse.Namespace, folder: Path) -> None:
    """Sample from a tiny model and from that of the config, and print one line of JSON."""
    found = {}
    for name, model in {"tiny": TINY, "whole": {}}.items():
        tiny = [f"model.{field}={value}" for field, value in model.items()]
        arguments.overrides = [*DTYPE, *arguments.given, *tiny]
        target = folder / name / f"step_{STEP}"
        measure(arguments, "make", target, target)
        asked = ["--ckpt", str(target), "--prompt-tokens", "1,2,3", "--max-new-tokens", "8"]
        sampling = command("device_sample.py", arguments.config, arguments.overrides, *asked)
        began = time.perf_counter()
        # without the cache both compile
        environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "0"}
        process = subprocess.Popen(sampling, cwd=REPO, env=environment, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise RuntimeError(f"device_sample.py ended with {os.waitstatus_to_exitcode(status)}")
        seconds = round(time.perf_counter() - began, 1)
        found[name] = {"seconds": seconds, "peak_mib": usage.ru_maxrss >> 10}
    config = config_of(arguments)
    elements = sum(math.prod(info.shape) for info in RandomSource(config.model).tensors.values())
    weights = elements * np.dtype(config.compute.dtype).itemsize / 2**20
    ratio = (found["whole"]["peak_mib"] - found["tiny"]["peak_mib"]) / weights
    emit({**found, "weights_mib": round(weights), "ratio": round(ratio, 2)})


def main() -> None:
    made = parser(__doc__, config="6B_roto_256", rounds=None)
    made.add_argument("--folder", help="a new folder for the checkpoints, deleted at the end")
    made.add_argument("--sample", action="store_true", help="measure device_sample.py instead")
    made.add_argument("--turns", type=int, default=1, help="measurements of each conversion (default: %(default)s)")
    os.environ["JAX_PLATFORMS"] = "cpu"
    arguments = parse(made)
    if arguments.folder is None:
        made.error("--folder is required")
    folder = Path(arguments.folder)
    folder.mkdir(parents=True)
    try:
        arguments.given = arguments.overrides
        (sample if arguments.sample else report)(arguments, folder)
    finally:
        shutil.rmtree(folder)


def report(arguments: argparse.Namespace, folder: Path) -> None:
    """Measure each conversion, and print one line of JSON for each."""
    classic, theirs, converted = folder / f"step_{STEP}", folder / "hf", folder / "converted"
    found = measure(arguments, "make", classic, classic)
    size = sum(file.stat().st_size for file in classic.rglob("*") if file.is_file())
    emit({"make": {**found, "gigabytes": round(size / 1e9, 2)}})
    for what in ("to 1 shard", "to native", "to Hugging Face"):
        compare(arguments, what, classic, converted)
    converted.rename(theirs)
    shutil.rmtree(classic)
    for what in ("Hugging Face to 8 shards", "Hugging Face to native"):
        compare(arguments, what, theirs, converted)


if __name__ == "__main__":
    main()
