#!/usr/bin/env python3
"""Change one line of the package at a time, and see whether a test fails.

    python scripts/mutants.py              all mutants of the table below, and 8 drawn ones
    python scripts/mutants.py ring pipe    the ones whose file has one of these texts in its path

Each mutant runs the tests of .ci/run that it names, or those that `pytest --changed HEAD` selects, up to the first that
fails, in a copy of HEAD, without JAX's cache of programs. Its processes have 120 CPU seconds together; only Linux
counts them. A mutant that survives is equal in all numbers, a missing test, or one that came too late. The last line is
JSON. Exit code 1: a mutant survived.
"""

import argparse
import ast
import contextlib
import json
import os
import random
import re
import signal
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
CPU_SECONDS = 120


class Mutant(NamedTuple):
    """A change of a file: `old`, which is there once, becomes `new`."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()
    """The files or tests that must kill it, each with its daily cases; none: what `--changed` selects."""


MUTANTS = [
    Mutant(
        "ops/attend/ring_blocks.py",
        "(1 - jnp.square(products / self.softcap))",
        "(1 - products / self.softcap)",
        ("tests/ops/attend/test_context.py::test_outputs_and_gradients_equal_one_device",),
    ),
    Mutant(
        "ops/attend/ring_blocks.py",
        "key.positions_S[None], self.window)[",
        "key.positions_S[None], self.window if self.window is None else self.window - 1)[",
        ("tests/ops/attend/test_context.py::test_outputs_and_gradients_equal_one_device",),
    ),
    Mutant(
        "ops/attend/ring_blocks.py",
        "rescale + exps.sum(-1))",
        "rescale + exps.sum(-1) * (1 + 1e-4))",
        ("tests/ops/attend/test_context.py::test_outputs_and_gradients_equal_one_device",),
    ),
    Mutant("ops/attend/causal.py", "dlogits.sum(0, keepdims=True)", "dlogits.mean(0, keepdims=True)"),
    Mutant("ops/attend/packed.py", "(queries < self.ends_BT[:, None])", "(queries <= self.ends_BT[:, None])"),
    Mutant("ops/attend/cached.py", "window + longest_chunk - 1)", "window + longest_chunk - 2)"),
    Mutant(
        "spec/feed_forward.py",
        "if self.shared_gate:",
        "if False:",
        ("tests/spec/test_arrays.py::test_arrays_have_the_dimension_names_of_the_modules",),
    ),
    Mutant("spec/flops.py", "min(attention.window or seq, seq)", "seq", ("tests/spec/test_flops.py",)),
    Mutant(
        "train/pipeline.py",
        "jnp.where(item.valid, inputs, at(kept, *place))",
        "inputs",
        ("tests/parallel/test_pipeline_meshes.py::test_training_equals_one_device",),
    ),
    Mutant(
        "train/pipeline.py",
        "_masked(item.valid, gradient)})",
        "gradient})",
        ("tests/parallel/test_pipeline_meshes.py::test_training_equals_one_device",),
    ),
    Mutant("train/experts.py", "rate * jnp.sign(1 - load(means))", "rate * jnp.sign(load(means) - 1)"),
    Mutant("optimizers/schedules.py", "warmup * rates.lr -", "rates.lr -"),
    # the decay begins at once
    Mutant("optimizers/schedules.py", "step - (rates.total_steps - rates.decay_steps)", "step"),
    Mutant(
        "ops/experts/routing.py",
        "probs_BTE.mean((0, 1))",
        "probs_BTE.max((0, 1))",
        ("tests/ops/experts/test_routing.py::test_statistics",),
    ),
    Mutant(
        "ops/experts/dispatch.py",
        "dispatch.capacity(experts_Nk.size,",
        "dispatch.capacity(len(experts_Nk),",
        ("tests/ops/experts/test_expert_meshes.py::test_a_device_computes_up_to_the_capacity_of_its_tokens",),
    ),
    Mutant(
        "ops/positions.py", "(rotary.base ** exponents.astype(np.float64)).astype(np.float32)", "rotary.base**exponents"
    ),
    Mutant(
        "models/head.py",
        "exps_BtC * scale_Bt[..., None] -",
        "exps_BtC * scale_Bt[..., None] * 0.9999 -",
        ("tests/ops/test_gradients.py::test_the_loss_in_parts_is_the_loss",),
    ),
    # the key of position 0 is not seen
    Mutant(
        "ops/attend/cached.py",
        "(distance_BTS <= positions_BT[:, :, None])",
        "(distance_BTS < positions_BT[:, :, None])",
        ("tests/infer/test_ring.py::test_window_plus_chunk_minus_one_positions_are_needed_and_enough",),
    ),
    # differs where a later part's largest logit is larger by about 88: exp overflows
    Mutant(
        "ops/attend/cached.py",
        "functools.reduce(jnp.maximum, (part_logits.max(-1, keepdims=True) for part_logits in logits))",
        "logits[0].max(-1, keepdims=True)",
        ("tests/infer/test_storage.py",),
    ),
    # a query sees the documents before its own
    Mutant(
        "ops/attend/ring_blocks.py",
        "(query.segments_BC[:, :, None] == key.segments_BS[:, None])",
        "(query.segments_BC[:, :, None] >= key.segments_BS[:, None])",
    ),
    Mutant(
        "ops/attend/ring_blocks.py",
        "mixed * weight[..., None]",
        "mixed",
        ("tests/ops/attend/test_attention_kernels.py::test_splash_on_a_mesh_is_attention",),
    ),
    Mutant(
        "ops/attend/context.py",
        "jnp.repeat(x, times, axis=2)",
        "jnp.tile(x, (1, 1, times, 1))",
        ("tests/ops/attend/test_context.py::test_outputs_and_gradients_equal_one_device",),
    ),
    # differs where a bias makes scores negative
    Mutant(
        "ops/experts/routing.py",
        "(_two_best, -jnp.inf)",
        "(_two_best, 0.0)",
        ("tests/ops/experts/test_routing.py",),
    ),
    # the share of real tokens of a device's own, not of all devices'
    Mutant(
        "ops/experts/routing.py",
        "(total(jnp.float32(real_BT.size)) / jnp.maximum(total(real_BT.sum()), 1))",
        "(jnp.float32(real_BT.size) / jnp.maximum(real_BT.sum(), 1))",
    ),
    Mutant(
        "ops/experts/dispatch.py",
        "dropped.sum() / self._size(self.mlp)",
        "dropped.sum()",
        ("tests/ops/experts/test_expert_meshes.py::test_a_device_computes_up_to_the_capacity_of_its_tokens",),
    ),
    Mutant(
        "ops/experts/dispatch.py",
        "math.ceil(self.capacity_factor",
        "math.floor(self.capacity_factor",
        ("tests/ops/experts/test_expert_meshes.py::test_a_device_computes_up_to_the_capacity_of_its_tokens",),
    ),
    # norms and biases decay too
    Mutant(
        "train/optimizer.py",
        "u + decay * p if matrix else u",
        "u + decay * p",
        ("tests/train/test_against_torch.py::test_losses_of_fine_tuning_are_theirs",),
    ),
    # of all targets, not the learned ones
    Mutant(
        "train/batch.py",
        "(z_loss_BT * counted_BT).sum(1) / jnp.maximum(counted_BT.sum(1), 1)",
        "z_loss_BT.mean(1)",
        ("tests/train/test_token_metrics.py",),
    ),
    # targets of padding are learned
    Mutant(
        "train/batch.py",
        "(before == after) & (after > 0)",
        "before == after",
        ("tests/train/test_packed.py::test_a_step_has_the_mean_over_all_learned_targets",),
    ),
    # keys take the first frequencies
    Mutant(
        "models/attention.py",
        "x[..., ::heads]",
        "x[..., : x.shape[-1] // heads]",
    ),
    Mutant(
        "models/head.py",
        "self.total * jnp.exp(self.largest - largest) +",
        "self.total +",
        ("tests/ops/test_gradients.py::test_the_loss_in_parts_is_the_loss",),
    ),
    # the step that the data does not fill is not undone
    Mutant("data/batches/mixture.py", "self._progress = before", "pass", ("tests/data/batches/test_mixture.py",)),
    # every pass has the same order
    Mutant(
        "data/batches/mixture.py",
        'f"{self._seed} {epoch} {name}"',
        'f"{self._seed} {name}"',
        ("tests/data/batches/test_mixture.py",),
    ),
    # padding belongs to the last document
    Mutant(
        "sequences.py",
        "np.zeros(count, np.int32)",
        "np.full(count, len(lengths), np.int32)",
        ("tests/dataset/test_packed_data_set.py",),
    ),
    # a checkpoint is looked for at each question
    Mutant(
        "checkpoint/open.py",
        "@functools.cached_property\n    def _stored",
        "@property\n    def _stored",
        ("tests/checkpoint/test_open.py",),
    ),
    # a tied table wins over a head that the folder has
    Mutant(
        "checkpoint/hf/source.py",
        "self._stored.setdefault(row.foreign, self._stored[other])",
        "self._stored[row.foreign] = self._stored[other]",
        ("tests/checkpoint/hf/test_hf.py::test_a_tied_head_is_the_embedding_matrix",),
    ),
    # the biases of routers are rounded too
    Mutant(
        "checkpoint/hf/writer.py",
        "stored if dtype is None or (rounds and exact(first.parameter)) else dtype",
        "stored if dtype is None else dtype",
        ("tests/checkpoint/hf/test_hf_deepseek.py::test_the_biases_of_routers_stay_float32",),
    ),
    # differs for a sequence of n equal tokens
    Mutant(
        "infer/sampling.py",
        "(length_B >= n_B)[:, None]",
        "(length_B > n_B)[:, None]",
        ("tests/infer/test_sampling.py",),
    ),
    Mutant(
        "infer/sampling.py",
        "jnp.where(keys_BV >= smallest_B[:, None], logits_BV,",
        "jnp.where(keys_BV > smallest_B[:, None], logits_BV,",
        ("tests/infer/test_sampling.py",),
    ),
    Mutant(
        "spec/layer_groups.py",
        "(groups[number].layers, number)",
        "(groups[number].repeats, number)",
        ("tests/spec/test_layer_groups.py",),
    ),
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
        selection = mutant.tests or ("--changed", "HEAD")
        command = [python, "-m", "pytest", "-x", "-v", "-p", "no:cacheprovider", *selection]
        code, output = run_limited(command, copy, CPU_SECONDS)
    finally:
        path.write_text(text)
    if code is None:
        ended = len(re.findall(r"::.* (?:PASSED|SKIPPED|XFAIL|XPASS)\b", output))
        return f"{SURVIVED}: no test failed in {CPU_SECONDS} CPU s ({ended} tests ended)"
    if code == 0:
        return SURVIVED
    if code == 5:
        return f"{SURVIVED}: no test is selected"
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.MULTILINE)
    if failed is None:
        raise SystemExit(f"the tests did not run: exit code {code}\n{output[-4000:]}")
    return failed.group(1)


def run_limited(command: Sequence[str], folder: Path, seconds: float) -> tuple[int | None, str]:
    """The exit code and the output of a program; None if all its processes together took more CPU seconds."""
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while (code := child.poll()) is None and _cpu_seconds(child.pid) < seconds:
                time.sleep(0.5)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(0)
        return code, output.read()


def _cpu_seconds(session: int) -> float:
    """The CPU seconds of the processes of a session, and of their children that have ended."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        # the process may end before it is read
        with contextlib.suppress(OSError):
            # behind the name: its state, parent, group, session, ...; from 11, its own and its children's time
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def main(arguments: Sequence[str]) -> int:
    """Run the mutants and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help="only mutants of files with this text in their path")
    parser.add_argument("--draw", type=int, default=DRAWN, help="number of drawn mutants (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=SEED, help="of the drawn mutants (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at once (default: %(default)s)")
    parser.add_argument(
        "--list", action="store_true", help="print the mutants with the tests that they name, and run none"
    )
    chosen = parser.parse_args(arguments)
    mutants = [*MUTANTS, *drawn(chosen.draw, chosen.seed)]
    mutants = [one for one in mutants if not chosen.files or any(text in one.file for text in chosen.files)]
    if chosen.list:
        for one in mutants:
            sys.stdout.write(f"{one.file}: {one.old.strip()} -> {one.new.strip()}\n")
            sys.stdout.writelines(f"    {test}\n" for test in one.tests)
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
