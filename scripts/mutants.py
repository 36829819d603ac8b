#!/usr/bin/env python3
"""Change one line of the package at a time, and see whether the tests that the changed file selects fail.

    python scripts/mutants.py              all mutants of the table below, and 8 drawn ones
    python scripts/mutants.py ring pipe    the ones whose file has one of these texts in its path

Each mutant runs `pytest --changed HEAD -x` in a copy of HEAD, without JAX's cache of programs. A mutant that survives
is either equal in all numbers or a missing test. The last line is JSON. Exit code 1: a mutant survived.
"""

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "mesh_transformer"
DRAWN_FROM = ("ops/attend", "train/pipeline.py", "train/pipeline_forward.py", "ops/experts")
DRAWN, SEED = 8, 0
SURVIVED = "SURVIVED"


class Mutant(NamedTuple):
    """A change of a file: `old`, which is there once, becomes `new`."""

    file: str
    old: str
    new: str


MUTANTS = [
    Mutant("ops/attend/ring_blocks.py", "(1 - jnp.square(products / self.softcap))", "(1 - products / self.softcap)"),
    Mutant(
        "ops/attend/ring_blocks.py",
        "key.positions_S[None], self.window)[",
        "key.positions_S[None], self.window if self.window is None else self.window - 1)[",
    ),
    Mutant("ops/attend/ring_blocks.py", "rescale + exps.sum(-1))", "rescale + exps.sum(-1) * (1 + 1e-4))"),
    Mutant("ops/attend/causal.py", "dlogits.sum(0, keepdims=True)", "dlogits.mean(0, keepdims=True)"),
    Mutant("ops/attend/packed.py", "(queries < self.ends_BT[:, None])", "(queries <= self.ends_BT[:, None])"),
    Mutant("ops/attend/cached.py", "window + longest_chunk - 1)", "window + longest_chunk - 2)"),
    Mutant("spec/feed_forward.py", "{**arrays, **gate} if self.shared_gate else arrays", "arrays"),
    Mutant("spec/flops.py", "min(one.window or seq, seq)", "seq"),
    Mutant("train/pipeline.py", "square += 2 * (dx_embed", "square += (dx_embed"),
    Mutant("train/pipeline.py", "at(carry.rows, slot)).sum()", "at(carry.rows, slot - 1)).sum()"),
    Mutant("train/experts.py", "rate * jnp.sign(1 - load(means))", "rate * jnp.sign(load(means) - 1)"),
    Mutant("train/optimizer.py", "warmup * config.lr -", "config.lr -"),
    Mutant("ops/experts/routing.py", "probs_BTE.mean((0, 1))", "probs_BTE.max((0, 1))"),
    Mutant("ops/experts/dispatch.py", "dispatch.capacity(experts_Nk.size,", "dispatch.capacity(len(experts_Nk),"),
    Mutant(
        "ops/positions.py", "(rotary.base ** exponents.astype(np.float64)).astype(np.float32)", "rotary.base**exponents"
    ),
    Mutant("models/head.py", "exps_BtC * scale_Bt[..., None] -", "exps_BtC * scale_Bt[..., None] * 0.9999 -"),
]


def drawn(count: int, seed: int) -> list[Mutant]:
    """Mutants of random operators and numbers of DRAWN_FROM."""
    files = [path for place in DRAWN_FROM for path in _files(ROOT / PACKAGE / place)]
    found = [mutant for path in files for mutant in _mutations(path)]
    return random.Random(seed).sample(found, count)


def _files(place: Path) -> list[Path]:
    return sorted(place.rglob("*.py")) if place.is_dir() else [place]


OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*"}
COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}


def _mutations(path: Path) -> Iterator[Mutant]:
    """One mutant for each operator, comparison and small number of a file, on lines that are there once."""
    lines = path.read_text().splitlines()
    for function in ast.walk(ast.parse("\n".join(lines))):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in (node for statement in function.body for node in ast.walk(statement)):
            if (change := _change(node)) is None:
                continue
            (number, start, end), text = change
            line = lines[number - 1]
            if lines.count(line) == 1:
                name = path.relative_to(ROOT / PACKAGE).as_posix()
                yield Mutant(name, line, f"{line[:start]}{text}{line[end:]}")


def _change(node: ast.AST) -> tuple[tuple[int, int, int], str] | None:
    """A place on a line (its number, first column, column after the last) and the text to put there."""
    match node:
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS and left.end_lineno == right.lineno:
            return (right.lineno, left.end_col_offset or 0, right.col_offset), f" {OPERATORS[type(op)]} "
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
            if left.end_lineno == right.lineno:
                return (right.lineno, left.end_col_offset or 0, right.col_offset), f" {COMPARISONS[type(op)]} "
        case ast.Constant(value=int(value)) if not isinstance(value, bool) and 0 <= value <= 2:
            return (node.lineno, node.col_offset, node.end_col_offset or 0), str(value + 1)
    return None


def run(mutant: Mutant, copy: Path, python: str) -> str:
    """The first test that fails with the mutant, or SURVIVED."""
    path = copy / PACKAGE / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.file} has {mutant.old!r} {text.count(mutant.old)} times: mend the table of mutants")
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        command = [python, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--changed", "HEAD"]
        environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    finally:
        path.write_text(text)
    if done.returncode == 0:
        return SURVIVED
    if done.returncode == 5:
        return f"{SURVIVED}: no test is selected"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if failed is None:
        raise SystemExit(
            f"the tests did not run: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return failed.group(1)


def main(arguments: Sequence[str]) -> int:
    """Run the mutants and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help="only mutants of files with this text in their path")
    parser.add_argument("--draw", type=int, default=DRAWN, help="number of drawn mutants (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=SEED, help="of the drawn mutants (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at once (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the mutants and run no test")
    chosen = parser.parse_args(arguments)
    mutants = [*MUTANTS, *drawn(chosen.draw, chosen.seed)]
    mutants = [one for one in mutants if not chosen.files or any(text in one.file for text in chosen.files)]
    if chosen.list:
        for one in mutants:
            sys.stdout.write(f"{one.file}: {one.old.strip()} -> {one.new.strip()}\n")
        return 0
    results = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(chosen.jobs) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(chosen.jobs):
            copies.put(_copy(Path(folder) / str(number)))

        def judge(mutant: Mutant) -> dict[str, str | float]:
            copy, start = copies.get(), time.monotonic()
            try:
                result = run(mutant, copy, sys.executable)
            finally:
                copies.put(copy)
            seconds = round(time.monotonic() - start, 1)
            return {**mutant._asdict(), "result": result, "seconds": seconds}

        for result in pool.map(judge, mutants):
            results.append(result)
            sys.stderr.write(f"{result['file']}: {result['old']} -> {result['new']}\n")
            sys.stderr.write(f"    {result['seconds']} s: {result['result']}\n")
    survived = [one for one in results if str(one["result"]).startswith(SURVIVED)]
    sys.stdout.write(json.dumps({"mutants": len(results), "survived": len(survived), "results": results}) + "\n")
    return 1 if survived else 0


def _copy(folder: Path) -> Path:
    """A repository of its own with the files of HEAD."""
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    return folder


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
