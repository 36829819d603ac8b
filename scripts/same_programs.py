"""Compare the programs of two checkouts: do steps, prefill and decode of small models lower to the same StableHLO?

    git worktree add /tmp/before HEAD~3
    python scripts/same_programs.py /tmp/before .                    # all cases
    python scripts/same_programs.py /tmp/before . --case deepseek    # those whose name has this in it
    python scripts/same_programs.py /tmp/before . --keep /tmp/ir     # keep the texts: diff -r /tmp/ir/0 /tmp/ir/1

Each case trains one step and samples, with the commands of each checkout, in this script's environment. It compares
what JAX gives to the compiler, in order, without locations and without the names of modules and private functions.
Programs without a matrix product are left out. The exit code is 1 if a program differs.
"""

import argparse
import difflib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

SMALL = {"layers": 4, "d_model": 64, "n_heads": 8, "n_vocab": 257, "seq": 32}
GROUPED = {**SMALL, "n_kv_heads": 4, "d_ff": 96}
EXPERTS = {"n_experts": 8, "experts_per_token": 2}
MODELS: dict[str, dict[str, Any]] = {
    "gptj": {**SMALL, "pe_rotary_dims": 8},
    "llama": {**GROUPED, "family": "llama"},
    "gemma3": {**GROUPED, "family": "gemma3", "d_head": 8, "window": 8, "full_every": 2},
    "deepseek_v3": {
        **SMALL, **EXPERTS, "family": "deepseek_v3", "dense_layers": [], "d_ff": 96, "expert_d_ff": 32, "q_rank": 32,
        "kv_rank": 16, "nope_dims": 8, "rotary_dims": 8, "v_dims": 8,
    },
    "jaxformer": {
        **SMALL, **EXPERTS, "family": "jaxformer", "block_layers": 2, "latent_dim": 16, "rotary_dims": 8,
    },
}  # fmt: skip
MESHES = {
    "one device": [],
    "dropout": ["optimizer.dropout=0.1", "compute.remat=save_attn"],
    "dp 2 x fsdp 2 x tp 2": ["mesh.dp=2", "mesh.fsdp=2", "mesh.tp=2"],
    "pp 2 x tp 2": ["mesh.pp=2", "mesh.tp=2", "compute.remat=full"],
    "cp 2 x tp 2": ["mesh.cp=2", "mesh.tp=2"],
    "ep 2": ["mesh.ep=2"],
}
WITH_EXPERTS = ("deepseek_v3", "jaxformer")
CONFIG: dict[str, dict[str, Any]] = {
    "optimizer": {"warmup_steps": 1, "anneal_steps": 1, "total_steps": 1, "gradient_accumulation_steps": 2},
    "data": {"train_set": "text.txt", "val_set": {"held": "text.txt"}, "tokenizer": "bytes", "batch_size": 8,
             "val_every": 1, "val_batches": 1},
    "checkpoint": {"model_dir": "run", "ckpt_every": 1},
    "logging": {"tensorboard": False, "plot": False},
}  # fmt: skip
COMMANDS = {
    "train": ["train"],
    "sample": ["sample", "--prompt", "12 bottles of beer", "--max-new-tokens", "4", "--seed", "0"],
}
_FUNCTION = re.compile(r"^  func\.func (?:public |private )?@(\S+?)\(.*?^  \}$", re.MULTILINE | re.DOTALL)
_CALLED = re.compile(r"@[\w.$-]+")


class Program(NamedTuple):
    """A program: its name, and its text without what may differ."""

    name: str
    text: str


def main() -> None:
    """Compare, print a line for each program, and exit."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--case", default="", help="compare the cases whose name has this in it")
    parser.add_argument("--keep", type=Path, help="write the texts of all programs here")
    options = parser.parse_args()
    checkouts = [path.resolve() for path in (options.before, options.after)]
    different = 0
    for case, (model, overrides) in cases().items():
        if options.case in case:
            with ThreadPoolExecutor() as pool:
                before, after = pool.map(programs, checkouts, [model] * 2, [overrides] * 2)
            different += compare(case, before, after)
            if options.keep:
                write(options.keep / "0" / case, before)
                write(options.keep / "1" / case, after)
    sys.exit(1 if different else 0)


def cases() -> dict[str, tuple[str, list[str]]]:
    """The model and the overrides of each case."""
    return {
        f"{model}, {mesh}": (model, overrides)
        for model in MODELS
        for mesh, overrides in MESHES.items()
        if mesh != "ep 2" or model in WITH_EXPERTS
    }


def programs(checkout: Path, model: str, overrides: list[str]) -> list[Program]:
    """The programs of a training run of one step and of a sample, in the order of their compilation."""
    compiled = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "text.txt").write_text("".join(f"{i} bottles of beer, {i * i}.\n" for i in range(400)))
        (folder / "config.json").write_text(json.dumps({"model": MODELS[model], **CONFIG}))
        settings = [word for override in overrides for word in ("--set", override)]
        for command, words in COMMANDS.items():
            texts = folder / f"{command}-programs"
            run(checkout, folder, texts, [*words, "--config", "config.json", *settings])
            for path in sorted(texts.glob("*_compile.mlir")):
                text = path.read_text()
                if "dot_general" in text:
                    name = re.sub(r"^jax_ir\d+_|_compile$", "", path.stem)
                    compiled.append(Program(f"{command}: {name}", canonical(text)))
    return compiled


def run(checkout: Path, folder: Path, texts: Path, arguments: list[str]) -> None:
    """Run a command of a checkout, which writes its programs into `texts`."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
        "PJRT_NPROC": "32",
        "JAX_DUMP_IR_TO": str(texts),
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        # the order of the members of a set is the order of the outputs of some programs
        "PYTHONHASHSEED": "0",
    }
    command = [sys.executable, "-m", "mesh_transformer", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{checkout}: {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-3000:]}")


def canonical(text: str) -> str:
    """A program with its private functions named by their content, in the order of their calls."""
    text = re.sub(r"^#loc.*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r" ?loc\((?:[^()]|\([^()]*\))*\)", "", text)
    functions = {match[1]: match[0] for match in _FUNCTION.finditer(text)}
    hashes: dict[str, str] = {}
    bodies: dict[str, str] = {}

    def hashed(name: str) -> str:
        if name not in hashes:
            hashes[name] = name  # as yet: a function does not call itself
            first, _, body = functions[name].partition("\n")
            renamed = re.sub(
                _CALLED, lambda call: f"@{hashed(call[0][1:])}" if call[0][1:] in functions else call[0], body
            )
            head = re.sub(r"func\.func (public |private )?@[\w.$-]+", r"func.func \1@", first)
            hashes[name] = "f" + hashlib.sha256(f"{head}\n{renamed}".encode()).hexdigest()[:12]
            bodies.setdefault(hashes[name], f"{head.replace('@', '@' + hashes[name], 1)}\n{renamed}")
        return hashes[name]

    hashed("main")
    rest = _FUNCTION.sub("", text)
    rest = re.sub(r"module @[\w.$-]+", "module", rest)
    # the last one is `main`
    return "\n".join([*(line for line in rest.splitlines() if line.strip()), *bodies.values()]) + "\n"


def compare(case: str, before: list[Program], after: list[Program]) -> int:
    """Print a line for each program. Returns how many differ."""
    texts = [program.text for program in after]
    # equal programs are each other's, wherever they stand; of the others, the next one
    equal = [program for program in before if program.text in texts]
    different = [program for program in before if program.text not in texts]
    others = [program for program in after if program.text not in {one.text for one in before}]
    for program in equal:
        say(case, program.name, program.text, "equal")
    for number in range(max(len(different), len(others))):
        old = different[number] if number < len(different) else Program("none", "")
        new = others[number] if number < len(others) else Program("none", "")
        lines = difflib.unified_diff(old.text.splitlines(), new.text.splitlines(), n=0, lineterm="")
        changed = sum(line[0] in "+-" for line in lines)
        say(case, f"{old.name} -> {new.name}", old.text, f"{changed} lines differ")
    return max(len(different), len(others))


def say(case: str, name: str, text: str, result: str) -> None:
    """Print a line of the table."""
    sys.stdout.write(f"{case} | {name} | {len(text.splitlines())} lines | {result}\n")
    sys.stdout.flush()


def write(folder: Path, texts: list[Program]) -> None:
    """Write programs into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, program in enumerate(texts):
        (folder / f"{number:02} {program.name.replace(': ', ' ')}.mlir").write_text(program.text)


if __name__ == "__main__":
    main()
