"""Each command that writes a checkpoint, interrupted and killed during the write, repeated, and with faults of a
bucket."""

import json
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from support import commands
from support.classic_folders import RandomSource, model_config, values
from support.covering import covering
from support.gcs_server import CUT, HALF, GcsServer

from mesh_transformer.checkpoint.classic.writer import write_classic
from mesh_transformer.checkpoint.hf.writer import write_hf
from mesh_transformer.checkpoint.native.writer import write_native
from mesh_transformer.checkpoint.open import Checkpoint

CONFIG = {
    "layers": 4, "d_model": 64, "n_heads": 8, "n_vocab": 256, "seq": 16, "pe_rotary_dims": 8, "cores_per_replica": 2,
    "bucket": "models", "model_dir": "run",
}  # fmt: skip
MODEL = model_config(**CONFIG)
Arrays = dict[str, np.ndarray]


def parameters(arrays: Arrays) -> Arrays:
    return {name: array for name, array in arrays.items() if name.startswith("params/")}


def in_bfloat16(arrays: Arrays) -> Arrays:
    return {name: array.astype(ml_dtypes.bfloat16) for name, array in parameters(arrays).items()}


def with_bias_in_table(arrays: Arrays) -> Arrays:
    """Add the bias of the embedding, which GPTJForCausalLM does not have, to the rows of its matrix."""
    table, bias = "params/embed/tokens/w", "params/embed/tokens/b"
    added = arrays[table] + np.where(np.arange(len(arrays[table])) < MODEL.n_vocab, 1, 0)[:, None] * arrays[bias]
    return {**parameters(arrays), table: added.astype(np.float32), bias: np.zeros_like(arrays[bias])}


class Command(NamedTuple):
    """A command line, the path that it writes, and a function from the arrays of the source to the expected arrays."""

    line: str
    target: str
    expected: Callable[[Arrays], Arrays]


COMMANDS = {
    "to classic": Command(
        "resharding_example.py --config config.json --ckpt gs://models/native --shards-out 4 --out {}out/step_7",
        "out/step_7",
        dict,
    ),
    "to native": Command(
        "resharding_example.py --config config.json --ckpt gs://models/run/step_7 --format native --out {}out",
        "out/step_7",
        dict,
    ),
    "to Hugging Face": Command(
        "to_hf_weights.py --config config.json --input-ckpt gs://models/run --output-path {}out/gptj --dtype fp32",
        "out/gptj",
        with_bias_in_table,
    ),
    "Hugging Face to native": Command(
        "from_hf_weights.py --input gs://models/hf --output-path {}out", "out/step_0", with_bias_in_table
    ),
    "Hugging Face to classic": Command(
        "from_hf_weights.py --input gs://models/hf --output-path {}out/step_0 --format classic --shards 2",
        "out/step_0",
        with_bias_in_table,
    ),
}
SLIM = Command("slim_model.py --config config.json", "run_slim/step_7", in_bfloat16)


class Workspace:
    """A working folder, and a bucket `models` with one model in all formats: run (classic, full), native (full) and
    hf."""

    def __init__(self, gcs: GcsServer, folder: Path, sources: Path) -> None:
        self.gcs, self.folder = gcs, folder
        gcs.clear()
        (folder / "config.json").write_text(json.dumps(CONFIG))
        for path in sources.rglob("*"):
            if path.is_file():
                gcs.put("models", path.relative_to(sources).as_posix(), path.read_bytes())

    def written(self) -> set[str]:
        """The files that a command has written, local ones and those in the bucket."""
        local = {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()}
        names = local | set(self.gcs.objects("models"))
        return {name for name in names if name.startswith(("out/", "run_slim/"))}

    def start(self, command: Command, output: str):
        program, *arguments = command.line.format(output).split()
        return commands.start(program, *arguments, cwd=self.folder, **self.gcs.environment())

    def signal_during_write(self, command: Command, number: signal.Signals, code: int) -> str:
        """Start the command and send a signal during the write: the bucket answers no request until the signal is
        sent."""
        writing, sent = threading.Event(), threading.Event()

        def gate() -> None:
            if not sent.is_set() and any("mtj-partial" in name for name in self.written()):
                writing.set()
                sent.wait(60)

        self.gcs.gate = gate
        process = self.start(command, "")
        arrived = writing.wait(60)
        process.send_signal(number)
        sent.set()
        errors = commands.finish(process, code)[1]
        assert arrived, errors
        return errors


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Arrays]:
    """A folder with one model in the three formats, and its arrays."""
    folder = tmp_path_factory.mktemp("sources")
    source = RandomSource(MODEL, full=True)
    write_classic(source, MODEL, str(folder / "run/step_7"), 2)
    (folder / "run/meta.json").write_text(json.dumps({"step": 7, "checkpoints": [7], "aux": {"7": {}}}))
    write_native(source, str(folder / "native"))
    write_hf(source, MODEL, str(folder / "hf"))
    return folder, values(source)


@pytest.fixture
def workspace(sources: tuple[Path, Arrays], tmp_path: Path) -> Iterator[Workspace]:
    with GcsServer() as gcs:
        yield Workspace(gcs, tmp_path, sources[0])


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Restore the handler of SIGINT, which is ignored in the background of a shell and in child processes."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def assert_written(workspace: Workspace, command: Command, arrays: Arrays, copy: Path) -> None:
    """The target has the expected arrays, and nothing else was written but the meta.json of a classic step."""
    names = workspace.written()
    classic = any("/shard_0/" in name for name in names)
    other_files = {name for name in names if not name.startswith(f"{command.target}/")}
    assert other_files == ({f"{command.target.split('/')[0]}/meta.json"} if classic else set())
    for name, content in workspace.gcs.objects("models").items():
        if name in names:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(content)
    found, expected = values(Checkpoint.open(str(copy / command.target)).source(MODEL)), command.expected(arrays)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array, err_msg=name)


# one for each writer
@pytest.mark.parametrize(
    "name", covering(["slim", *COMMANDS], daily=(["to classic", "Hugging Face to native", "to Hugging Face"],))
)
def test_a_command_is_interrupted_killed_and_repeated(
    workspace: Workspace, sources: tuple[Path, Arrays], interruptible: None, name: str
) -> None:
    command = {"slim": SLIM, **COMMANDS}[name]
    errors = workspace.signal_during_write(command, signal.SIGINT, 130)
    assert errors.splitlines()[-1] == "interrupted"
    assert "Traceback" not in errors
    assert workspace.written() == set()

    workspace.signal_during_write(command, signal.SIGKILL, -signal.SIGKILL)
    assert workspace.written()
    assert all("mtj-partial/" in name for name in workspace.written())

    workspace.gcs.fail(503, method="GET", path="alt=media")
    workspace.gcs.fail(HALF, method="GET", path="alt=media")
    _, errors = commands.finish(workspace.start(command, ""))
    assert not any(fault.times for fault in workspace.gcs.faults)
    assert "interrupted" in errors
    assert re.search(r" \d+/\d+  rate \d+ MB/s  eta ", errors)
    assert_written(workspace, command, sources[1], workspace.folder)


@pytest.mark.parametrize("name", covering(["slim", *COMMANDS]))
def test_a_command_writes_to_a_bucket_with_faults(
    workspace: Workspace, sources: tuple[Path, Arrays], name: str
) -> None:
    command = {"slim": SLIM, **COMMANDS}[name]
    workspace.gcs.fail(503, method="POST|PUT", path="/upload/")
    workspace.gcs.fail(CUT, method="POST|PUT", path="/upload/")
    commands.finish(workspace.start(command, "gs://models/"))
    assert not any(fault.times for fault in workspace.gcs.faults)
    assert_written(workspace, command, sources[1], workspace.folder)
