"""Each command that writes a checkpoint: stopped and killed in mid-write, repeated, through the faults of a bucket."""

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
from support.gcs_server import CUT, HALF, GcsServer

from mesh_transformer.checkpoint.classic.writer import write_classic
from mesh_transformer.checkpoint.hf.writer import write_hf
from mesh_transformer.checkpoint.native.writer import write_native
from mesh_transformer.checkpoint.open import open_source

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
    """GPTJForCausalLM has no bias on its embedding: it is added to the rows of the vocabulary."""
    table, bias = "params/embed/tokens/w", "params/embed/tokens/b"
    added = (
        arrays[table] + np.where(np.arange(len(arrays[table])) < MODEL.n_vocab, 1, 0)[:, None] * arrays[bias]
    )
    return {**parameters(arrays), table: added.astype(np.float32), bias: np.zeros_like(arrays[bias])}


class Command(NamedTuple):
    """A command line, the step or folder that it writes, and what must be in that, of what is in the sources."""

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


class Place:
    """A working folder, and a bucket `models` with one model in all forms: run (classic, full), native (full) and hf."""

    def __init__(self, gcs: GcsServer, folder: Path, sources: Path) -> None:
        self.gcs, self.folder = gcs, folder
        gcs.clear()
        (folder / "config.json").write_text(json.dumps(CONFIG))
        for path in sources.rglob("*"):
            if path.is_file():
                gcs.put("models", path.relative_to(sources).as_posix(), path.read_bytes())

    def written(self) -> set[str]:
        """The files of a command, local ones and those in the bucket."""
        local = {
            path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()
        }
        names = local | set(self.gcs.objects("models"))
        return {name for name in names if name.startswith(("out/", "run_slim/"))}

    def start(self, command: Command, output: str):
        program, *arguments = command.line.format(output).split()
        return commands.start(program, *arguments, cwd=self.folder, **self.gcs.environment())

    def signal_in_mid_write(self, command: Command, number: signal.Signals, code: int) -> str:
        """Start the command; once something is written no request is answered until the signal was sent."""
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
    """The three forms in a folder, and the values in them."""
    folder = tmp_path_factory.mktemp("sources")
    source = RandomSource(MODEL, full=True)
    write_classic(source, MODEL, str(folder / "run/step_7"), 2)
    (folder / "run/meta.json").write_text(json.dumps({"step": 7, "checkpoints": [7], "aux": {"7": {}}}))
    write_native(source, str(folder / "native"))
    write_hf(source, MODEL, str(folder / "hf"))
    return folder, values(source)


@pytest.fixture
def load(sources: tuple[Path, Arrays], tmp_path: Path) -> Iterator[Place]:
    with GcsServer() as gcs:
        yield Place(gcs, tmp_path, sources[0])


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Tests that run in the background of a shell ignore Ctrl-C, and so would their children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def assert_written(place: Place, command: Command, arrays: Arrays, copy: Path) -> None:
    """The target holds what it must and lies, with meta.json beside a classic step, alone."""
    names = place.written()
    classic = any("/shard_0/" in name for name in names)
    beside = {name for name in names if not name.startswith(f"{command.target}/")}
    assert beside == ({f"{command.target.split('/')[0]}/meta.json"} if classic else set())
    for name, content in place.gcs.objects("models").items():
        if name in names:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(content)
    found, expected = values(open_source(str(copy / command.target), MODEL)), command.expected(arrays)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize("name", ["slim", *COMMANDS])
def test_stopped_killed_and_repeated(
    place: Place, sources: tuple[Path, Arrays], interruptible: None, name: str
) -> None:
    command = {"slim": SLIM, **COMMANDS}[name]
    errors = place.signal_in_mid_write(command, signal.SIGINT, 130)
    assert errors.splitlines()[-1] == "interrupted"
    assert "Traceback" not in errors
    assert place.written() == set()

    place.signal_in_mid_write(command, signal.SIGKILL, -signal.SIGKILL)
    assert place.written()
    assert all("mtj-partial/" in name for name in place.written())

    place.gcs.fail(503, method="GET", path="alt=media")
    place.gcs.fail(HALF, method="GET", path="alt=media")
    _, errors = commands.finish(place.start(command, ""))
    assert not any(fault.times for fault in place.gcs.faults)
    assert "interrupted" in errors
    assert re.search(r" \d+/\d+  rate \d+ MB/s  eta ", errors)
    assert_written(place, command, sources[1], place.folder)


@pytest.mark.parametrize("name", ["slim", *COMMANDS])
def test_written_to_a_bucket_through_faults(place: Place, sources: tuple[Path, Arrays], name: str) -> None:
    command = {"slim": SLIM, **COMMANDS}[name]
    place.gcs.fail(503, method="POST|PUT", path="/upload/")
    place.gcs.fail(CUT, method="POST|PUT", path="/upload/")
    commands.finish(place.start(command, "gs://models/"))
    assert not any(fault.times for fault in place.gcs.faults)
    assert_written(place, command, sources[1], place.folder)
