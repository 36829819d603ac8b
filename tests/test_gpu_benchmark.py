"""The script for one GPU: what it runs on which card, when it stops, how it goes on; every case at toy size on CPU."""

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mesh_transformer.errors import UserError

PROGRAM = """
import json, subprocess, sys, time

given = json.loads(sys.argv[2])
if given["worker"] == "hangs":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.pid, file=sys.stderr, flush=True)
    child.wait()
if given["worker"] == "fails":
    sys.exit(given["text"])
print("a word of a library")
print(json.dumps({"value": given["value"]}))
"""
# GPT-J-6B: parameters, two moments and their copies and gradients in bfloat16, GiB
STATE_OF_6B = 16 * 6.05e9 / 2**30


@pytest.fixture(scope="module")
def gpu(repo: Path) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(repo / "benchmarks")
        # common.py extends the path
        patch.setattr(sys, "path", [*sys.path])
        return importlib.import_module("gpu")


@pytest.fixture
def case(gpu: ModuleType, tmp_path: Path) -> Any:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def make(name: str, worker: str = "works", limit: float = 300.0, **arguments: Any) -> Any:
        return gpu.Case(name, worker, arguments, limit, program=program)

    return make


class Card:
    """A device whose cases take as long as `durations` says: the clock is a number."""

    def __init__(self, gpu: ModuleType, out: Path, cases: list[Any], durations: dict[str, float]):
        self.gpu, self.out, self.cases, self.durations = gpu, out, cases, durations
        self.now, self.started = 0.0, []
        self.device = gpu.Device("card", "gpu", 80.0, {"jax": "1"})

    def start(self, case: Any, seconds: float) -> dict[str, Any]:
        self.started.append((self.now, case.name))
        self.now += min(seconds, self.durations[case.name])
        return {"failed": "timeout", "error": ""} if self.durations[case.name] > seconds else {"figure": {"value": 1}}

    def call(self) -> tuple[int, list[str]]:
        """One call of the script: how many cases are left, and the cases that it started."""
        self.now, self.started = 8.0, []
        left = self.gpu.measure(self.out, self.device, lambda rows: self.cases, self.start, lambda: self.now)
        assert all(at <= 480 for at, _ in self.started)
        assert self.now <= 535
        return left, [name for _, name in self.started]


def test_calls_go_on_and_end_in_time(gpu, case, tmp_path):
    """c is running when the first call has to end, and f takes longer than its limit."""
    out = tmp_path / "new" / "rows.jsonl"
    durations = {"a": 200.0, "b": 260.0, "c": 100.0, "d": 1.0, "e": 0.0, "f": 301.0, "g": 5.0}
    cases = [case(name) for name in durations]
    cases[4] = gpu.Case("e", "works", instead={"absent": True, "reason": "not installed: torch"})
    card = Card(gpu, out, cases, durations)
    assert card.call() == (4, ["a", "b", "c"])
    assert gpu.read_rows(out)[-1]["interrupted"]
    # a call that was killed while it wrote
    with out.open("a") as file:
        file.write('{"case": "c", "device": "ca')
    assert card.call() == (0, ["c", "d", "f", "g"])
    assert card.call() == (0, [])
    rows = [
        (row["case"], *(key for key in row if key not in ("case", "device", "versions"))) for row in gpu.read_rows(out)
    ]
    figure = "seconds", "figure"
    assert rows == [
        ("a", *figure), ("b", *figure), ("c", "seconds", "interrupted"), ("c", *figure), ("d", *figure),
        ("e", "seconds", "absent", "reason"), ("f", "seconds", "failed", "error"), ("g", *figure),
    ]  # fmt: skip
    assert gpu.read_rows(out)[0] == {
        "case": "a", "device": "card", "versions": {"jax": "1"}, "seconds": 200.0, "figure": {"value": 1}
    }  # fmt: skip
    # what is installed later is measured; another card has none of it
    cases[4] = case("e")
    assert card.call() == (0, ["e"])
    card.device = card.device._replace(kind="another card")
    assert card.call()[1] == ["a", "b", "c"]


def test_only_takes_whole_words(gpu, case):
    cases = [
        case(name) for name in ("train 6B", "train 6B plain", "decode 6B 1", "decode 6B 1 by layer", "decode 6B 16")
    ]
    assert [one.name for one in gpu.chosen(cases, ["decode 6B 1", "train 6B"])] == [one.name for one in cases[:4]]
    assert gpu.chosen(cases, None) == cases
    with pytest.raises(UserError, match="--only 'peers': .* train, decode"):
        gpu.chosen(cases, ["train", "peers"])


def test_a_case_ends_alone(gpu, case):
    assert gpu.start_process(case("a", value=3), 60) == {"figure": {"value": 3}}
    texts = {
        "ValueError: no such kernel": "exit code 1",
        "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes": "out of memory",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB": "out of memory",
    }
    for text, reason in texts.items():
        assert gpu.start_process(case("b", "fails", text=text), 60) == {"failed": reason, "error": text}


def test_a_case_that_hangs_ends_with_its_children(gpu, case):
    outcome = gpu.start_process(case("a", "hangs"), 3)
    assert outcome["failed"] == "timeout"
    child = int(outcome["error"])
    for _ in range(100):
        # who reaps it is not this test's concern
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().rsplit(")")[1].split()[0] == "Z":
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the child is alive")


def test_a_card_trains_what_fits_it(gpu):
    def train(kind: str, gib: float) -> dict[str, Any]:
        plan = gpu.gpu_plan.plan(gpu.Device(kind, "gpu", gib, {}), [])
        return {case.name: case.instead for case in plan if case.name.startswith("train ")}

    h100, h200 = train("NVIDIA H100 80GB HBM3", 77.0), train("NVIDIA H200", 136.0)
    assert h100["train 6B"]["skipped"].startswith("needs 101.2 GiB (parameters 22.5, optimizer state 45.1, ")
    assert h100["train 6B"]["skipped"].endswith("; the card has 77.0")
    assert 77.0 < STATE_OF_6B < 101.2 < 1.25 * STATE_OF_6B
    assert h100["train 2.7B plain save_matmuls 2 x 8"] is None
    assert not any("6B" in name for name in h100 if name != "train 6B")
    assert h200["train 6B plain save_attn 1 x 8"] is None
    # 137.8 GiB by a formula that is exact to 8%
    assert h200["train 6B plain save_matmuls 2 x 8"] is None
    assert not any("2.7B" in name for name in h200)


def test_peers_alternate_with_the_fastest_of_our_steps(gpu):
    rates = {"plain save_attn": 5.0, "plain save_matmuls": 7.0, "cudnn save_attn": 4.0, "cudnn save_matmuls": 6.0}
    rows = [{"case": f"train 125M {one} 1 x 8", "figure": {"tokens_per_s": rate}} for one, rate in rates.items()]
    plan = gpu.gpu_plan.plan(gpu.Device("NVIDIA H200", "gpu", 136.0, {}), rows)
    peers = [case for case in plan if case.name.startswith("peers train 125M")]
    assert [case.name.split()[-1] for case in peers] == ["ours", "torch", "ours", "torch"]
    assert "compute.remat=save_matmuls" in peers[0].arguments["overrides"]


def test_a_machine_without_a_gpu_is_refused(gpu, monkeypatch):
    """In a process of its own, as a case."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(UserError, match="no GPU found .the device is cpu.*--tiny"):
        gpu.find_device(gpu.start_process, False)


KINDS = [
    "rates",
    "attention 64 2048",
    "train 125M plain save_attn 1 x 8",
    "train 125M cudnn save_attn 1 x 8",
    "decode 6B 1 by layer",
    "peers train 6B 1 torch",
    "peers decode 6B 8 1",
    "preflight train 125M plain save_attn 1 x 8",
]
"""A case of each kind; a whole `--tiny` takes minutes."""


@pytest.mark.nightly
def test_cases_at_toy_size(gpu, repo, tmp_path):
    out = tmp_path / "toy.jsonl"
    # one device, as on a machine with one GPU
    environment = {**os.environ, "XLA_FLAGS": ""}
    chosen = [word for kind in KINDS for word in ("--only", kind)]
    command = [sys.executable, "benchmarks/gpu.py", "--tiny", "--out", str(out), *chosen]
    done = subprocess.run(command, cwd=repo, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr.endswith("all cases are done\n")
    rows = gpu.read_rows(out)
    names = [row["case"] for row in rows]
    assert names == [
        *("rates", "attention 64 2048 plain", "attention 64 2048 cudnn", *KINDS[2:5], KINDS[5]),
        *("peers decode 6B 8 1 ours", "peers decode 6B 8 1 transformers", KINDS[7]),
    ]
    assert {row["reason"] for row in rows if row.get("absent")} <= {
        "cuDNN needs a GPU", "not installed: jax_cuda12_plugin, jax_cuda13_plugin"
    }  # fmt: skip
    figures = {row["case"]: row["figure"] for row in rows if not row.get("absent")}
    assert all(value > 0 for figure in figures.values() for value in figure.values())
    rate = figures["train 125M plain save_attn 1 x 8"]["tokens_per_s"]
    table = gpu.report(rows)
    assert f"| train 125M plain save_attn 1 x 8 | {rate} |" in table
    assert "### cpu: peers" in table
