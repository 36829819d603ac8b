"""Memory and speed of converting GPT-J-6B, against `cp -r`: 8 classic shards to 1, to native, to Hugging Face and back.

    python benchmarks/convert_6b.py --folder SCRATCH [--config configs/6B_roto_256.json] [--turns 3]

A random slim checkpoint (12 GB for the 6B config) is made in SCRATCH. Each conversion runs in a process of its own, right
after a `cp -r` of the folder that it reads; both begin with nothing left to be written to the disk, and neither waits
for the disk at its end. Peak memory is VmHWM of that process, which counts its own pages and those of mapped files,
not the page cache. Prints one JSON object a line. Needs Linux and room for three checkpoints.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from mesh_transformer.checkpoint.classic import ClassicSource  # noqa: E402
from mesh_transformer.checkpoint.classic_write import write_classic  # noqa: E402
from mesh_transformer.checkpoint.hf import HFSource  # noqa: E402
from mesh_transformer.checkpoint.hf_write import write_hf  # noqa: E402
from mesh_transformer.checkpoint.native_writer import write_native  # noqa: E402
from mesh_transformer.checkpoint.tensors import Counts, Index, TensorInfo  # noqa: E402
from mesh_transformer.config import ModelConfig, load_config  # noqa: E402

SHARDS, STEP = 8, 1
BLOCK = 1 << 20


class RandomSource:
    """Parameters of a model, bfloat16: a block of random numbers over and over."""

    where, extra, counts = "random", dict[str, object](), Counts(STEP)

    def __init__(self, model: ModelConfig):
        c = model
        layer = {
            **{f"attention/{name}/w": (c.d_model, c.d_model) for name in "qkvo"},
            "ff/in/w": (c.d_model, c.d_ff), "ff/in/b": (c.d_ff,),
            "ff/out/w": (c.d_ff, c.d_model), "ff_out/b": (c.d_model,),
            "norm/scale": (c.d_model,), "norm/offset": (c.d_model,),
        }  # fmt: skip
        other = {
            "embed/tokens/w": (c.padded_vocab, c.d_model), "embed/tokens/b": (c.d_model,),
            "head/logits/w": (c.d_model, c.padded_vocab), "head/logits/b": (c.padded_vocab,),
            "head/norm/scale": (c.d_model,), "head/norm/offset": (c.d_model,),
        }  # fmt: skip
        shapes = {f"blocks/{name}": (c.layers, *shape) for name, shape in layer.items()} | other
        kind = np.dtype(ml_dtypes.bfloat16)
        self.tensors = {f"params/{name}": TensorInfo(shape, kind) for name, shape in shapes.items()}
        self.block = (np.random.default_rng(0).standard_normal(BLOCK, np.float32) / 64).astype(kind)

    def read(self, name: str, index: Index) -> np.ndarray:
        sizes = zip(index, self.tensors[name].shape, strict=True)
        return np.resize(self.block, [len(range(*s.indices(n))) for s, n in sizes])


def convert(what: str, config: str, source: str, target: str) -> None:
    """One conversion, then its own peak memory in MiB and seconds as JSON. Runs in a child process."""
    model = load_config(config).model
    began = time.perf_counter()
    if what == "make":
        write_classic(RandomSource(model), model, target, SHARDS)
    elif what == "to 1 shard":
        write_classic(ClassicSource(source, model), model, target, 1)
    elif what == "to native":
        write_native(ClassicSource(source, model), target)
    elif what == "to Hugging Face":
        write_hf(ClassicSource(source, model), model, target)
    elif what == "Hugging Face to 8 shards":
        write_classic(HFSource(source, model), model, target, SHARDS)
    else:
        write_native(HFSource(source, model), target)
    seconds = time.perf_counter() - began
    with open("/proc/self/status", encoding="ascii") as status:
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
    sys.stdout.write(json.dumps({"seconds": round(seconds, 1), "peak_mib": round(peak)}) + "\n")


def measure(what: str, config: str, source: Path, target: Path) -> dict[str, float]:
    """What `convert` reports, with nothing of what came before left to be written to the disk."""
    os.sync()
    command = [sys.executable, __file__, "--config", config, "--child", what, str(source), str(target)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(result.stdout.splitlines()[-1])


def copied(source: Path, target: Path) -> float:
    """Seconds that `cp -r` takes; the copy is deleted."""
    os.sync()
    began = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    seconds = time.perf_counter() - began
    shutil.rmtree(target)
    return round(seconds, 1)


def compare(what: str, config: str, source: Path, folder: Path) -> dict[str, float]:
    """A copy and a conversion, one after the other; the conversion's result is left in folder/converted."""
    target = folder / "converted"
    if target.exists():
        shutil.rmtree(target)
    cp = copied(source, folder / "copy")
    found = measure(what, config, source, target)
    return {**found, "cp_seconds": cp, "speed_against_cp": round(cp / max(found["seconds"], math.ulp(1)), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default=str(REPO / "configs/6B_roto_256.json"))
    parser.add_argument("--folder", type=Path, help="a new folder to work in, which is deleted at the end")
    parser.add_argument("--turns", type=int, default=1, help="times that each is measured")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        convert(arguments.child[0], arguments.config, *arguments.child[1:])
        return
    if arguments.folder is None:
        parser.error("--folder is needed")
    folder: Path = arguments.folder
    folder.mkdir(parents=True)
    try:
        report(folder, arguments.config, arguments.turns)
    finally:
        shutil.rmtree(folder)


def report(folder: Path, config: str, turns: int) -> None:
    """Each conversion as one line of JSON."""
    classic, theirs = folder / f"step_{STEP}", folder / "hf"
    found: dict[str, object] = measure("make", config, classic, classic)
    size = sum(file.stat().st_size for file in classic.rglob("*") if file.is_file())
    say({"make": {**found, "gigabytes": round(size / 1e9, 2)}})
    for what in ("to 1 shard", "to native", "to Hugging Face"):
        for _ in range(turns):
            say({what: compare(what, config, classic, folder)})
    (folder / "converted").rename(theirs)
    shutil.rmtree(classic)
    for what in ("Hugging Face to 8 shards", "Hugging Face to native"):
        for _ in range(turns):
            say({what: compare(what, config, theirs, folder)})


def say(found: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
