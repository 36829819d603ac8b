"""The options that a message advises: each is pasted behind the command that printed it, which then succeeds."""

import ast
import contextlib
import json
import logging
import re
import shlex
import shutil
import socket
import sys
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import safetensors.numpy
from support import hf_models
from support.commands import write_run

from mesh_transformer import commands, errors, files, host_memory, logs, platforms
from mesh_transformer.config import load
from mesh_transformer.runtime import cli
from mesh_transformer.runtime.serving import start as serving
from mesh_transformer.runtime.training import run_folder

PACKAGE = Path(errors.__file__).parent
ADVICE = {"options_to_add", "set_options"}
# advice that other tests paste, or whose command the tests cannot run
ELSEWHERE = {
    **dict.fromkeys([f"runtime/new/plan.py {name}" for name in ("_check", "_larger", "_smaller")], "tests/runtime/new"),
    "config/schema.py CheckpointConfig": "needs a bucket",
    "estimate/search.py search": "needs a TPU's compiler",
    "estimate/search.py remedies": "needs a TPU's compiler",
    "runtime/preflight/report.py print_table": "needs a TPU's compiler",
    "runtime/training/session.py suggest_a_faster_step": "needs a TPU",
    "runtime/new/command.py _write": "another process writes the file between two checks",
}
TRAIN = "train --config config.json --set checkpoint.model_dir=new"
TRAIN_FLAT = "train --config flat.json --set data.tokenizer=bytes --set checkpoint.model_dir=new{n}"
LLAMA = {**hf_models.BASE, **hf_models.rope(), "num_hidden_layers": 1, "tie_word_embeddings": True}
FLAT = {
    "layers": 1, "d_model": 32, "n_heads": 4, "n_vocab": 257, "seq": 32, "per_replica_batch": 1,
    "train_set": "text.txt",
    "gradient_accumulation_steps": 1, "warmup_steps": 1, "anneal_steps": 1, "lr": 1e-3, "end_lr": 1e-4,
    "weight_decay": 0.1, "total_steps": 1, "val_batches": 0, "val_every": 1, "ckpt_every": 1, "keep_every": 1,
    "cores_per_replica": 1, "tpu_size": 8, "bucket": "", "model_dir": "flat",
}  # fmt: skip


class Case(NamedTuple):
    """A command that prints advice.

    Args:
        place: file and function (or class) that make the advice.
        command: {n} is another number each time.
        nth: which advice of this place is pasted.
        code: of the command without the advice; 0: it is in the log.
        prepare: called before.
    """

    place: str
    command: str
    nth: int = 0
    code: int = 2
    prepare: Callable[[pytest.MonkeyPatch], None] = lambda _: None


def little_memory(patch: pytest.MonkeyPatch) -> None:
    Path("machine/proc").mkdir(parents=True)
    Path("machine/proc/meminfo").write_text("MemTotal: 24684084 kB\nMemAvailable:   10 kB\n")
    patch.setattr(host_memory, "ROOT", Path("machine").absolute())


def full_disk(patch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    patch.setattr(run_folder.shutil, "disk_usage", lambda _: usage(1, 0, 1))


def another_text(_: pytest.MonkeyPatch) -> None:
    with open("text.txt", "a") as file:
        file.write("Another line of text.\n" * 50)


def without_credentials(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "absent.json")
    patch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    files._cached_client.cache_clear()


def wide_file(_: pytest.MonkeyPatch) -> None:
    Path("wide.json").write_text(json.dumps({**FLAT, "d_model": 64}))


def stopped_server(patch: pytest.MonkeyPatch) -> None:
    """A server that ends as soon as it could answer."""

    async def until_signal(_: serving.Service) -> bool:
        return True

    patch.setattr(serving, "_until_signal", until_signal)


def bad_defaults(_: pytest.MonkeyPatch) -> None:
    Path("hf/generation_config.json").write_text('{"temperature": "hot"}')


def other_defaults(_: pytest.MonkeyPatch) -> None:
    Path("hf/generation_config.json").write_text('{"do_sample": true, "temperature": 0.5}')


def vision_model(_: pytest.MonkeyPatch) -> None:
    config = json.loads(Path("hf/config.json").read_text())
    tensors = safetensors.numpy.load_file("hf/model.safetensors")
    Path("vision").mkdir()
    Path("vision/config.json").write_text(json.dumps({"model_type": "mistral3", "text_config": config}))
    named = {f"language_model.{name}": values for name, values in tensors.items()}
    safetensors.numpy.save_file({**named, "vision_tower.a": np.zeros(1, np.float32)}, "vision/model.safetensors")


def large_values(_: pytest.MonkeyPatch) -> None:
    tensors = safetensors.numpy.load_file("hf/model.safetensors")
    shutil.copytree("hf", "large")
    safetensors.numpy.save_file({name: 1e6 + values for name, values in tensors.items()}, "large/model.safetensors")


def records(_: pytest.MonkeyPatch) -> None:
    commands.main(shlex.split("prepare --input text.txt --tokenizer bytes --seq 16 --val 0 --output short --workers 1"))


def adapted_run(_: pytest.MonkeyPatch) -> None:
    commands.main(shlex.split(f"{TRAIN} --set checkpoint.model_dir=adapted --tune-model-path run --set lora.rank=2"))


def fused_matrices(_: pytest.MonkeyPatch) -> None:
    hf_models.save_model("GPTNeoX", {**hf_models.BASE, **hf_models.rope(), "num_hidden_layers": 1}, Path("neox"))


def config_file(name: str, **groups: dict[str, object]) -> Callable[[pytest.MonkeyPatch], None]:
    """Writes config.json with changes as another file."""

    def write(_: pytest.MonkeyPatch) -> None:
        config = json.loads(Path("config.json").read_text())
        Path(name).write_text(json.dumps({group: {**config[group], **groups.get(group, {})} for group in config}))

    return write


CASES = {
    "another model": Case("checkpoint/identity.py check_same_architecture", f"{TRAIN} --tune-model-path hf"),
    "another model in a flat file": Case(
        "checkpoint/identity.py check_same_architecture", "sample --config wide.json --ckpt run --prompt a",
        prepare=wide_file,
    ),
    "an output that exists": Case("checkpoint/target.py check_free", "from-hf --input hf --output-path native"),
    "an export that exists": Case("checkpoint/target.py check_free", "to-hf --input-ckpt run --output-path hf"),
    "no pe in a flat file": Case("config/classic.py _position_encoding", TRAIN_FLAT, code=0),
    "no norm in a flat file": Case("config/classic.py _norm", TRAIN_FLAT, code=0),
    "two batches": Case(
        "config/data.py DataConfig", "train --config both.json",
        prepare=config_file("both.json", data={"per_replica_batch": 1}),
    ),
    "two batches, the other one": Case(
        "config/data.py DataConfig", "train --config both.json", 1,
        prepare=config_file("both.json", data={"per_replica_batch": 1}),
    ),
    "a mesh for other devices": Case("config/mesh.py _advice", f"{TRAIN} --set mesh.dp=4"),
    "an unknown key": Case(
        "config/names.py _how_to_ignore", "train --config key.json",
        prepare=config_file("key.json", optimizer={"momentum": 0.9, "foo": 1}),
    ),
    "fields of another family": Case(
        "config/variants.py Variants", f"{TRAIN} --set model.family=gpt2 --set model.norm=rmsnorm"
    ),
    "fields of another schedule": Case(
        "optimizers/base.py OptimizerConfig", f"{TRAIN} --set optimizer.schedule=constant"
    ),
    "sequences longer than the context": Case("config/schema.py Config", f"{TRAIN} --set data.seq=64"),
    "too few ids for bytes": Case("config/schema.py Config", f"{TRAIN} --set model.n_vocab=256"),
    "records of another length": Case(
        "data/batches/batching.py Batching", f"{TRAIN} --set data.train_set=short/train.index", prepare=records
    ),
    "another text": Case("data/records/stamps.py or_restart", "train --config config.json", prepare=another_text),
    "no credentials": Case(
        "files.py _credentials_explained", f"{TRAIN} --set checkpoint.bucket=b", prepare=without_credentials
    ),
    "an output without a tokenizer": Case(
        "runtime/convert.py _own_tokenizer", "to-hf --input-ckpt tokenized --output-path out{n}", code=0
    ),
    "shards of a native checkpoint": Case(
        "runtime/convert.py _check_shards", "reshard --ckpt run --out out/step_1 --format native --shards-out 1"
    ),
    "a port in use": Case("runtime/serving/start.py bind", "serve --ckpt run --port {port}", prepare=stopped_server),
    "shards for other devices": Case(
        "runtime/convert.py _check_devices", "reshard --ckpt run --prompt a --shards-out 3"
    ),
    "a config that exists": Case(
        "runtime/new/answers.py check_name",
        "new config --goal train --model tiny --data text.txt --hardware t4 --budget 100k",
    ),
    "a run that exists": Case(
        "runtime/new/answers.py check_name",
        "new old --goal train --model tiny --data text.txt --hardware t4 --budget 100k",
    ),
    "a long prompt": Case(
        "runtime/sampling/sampler.py Sampler", f"sample --ckpt run --prompt {'long' * 10} --max-new-tokens 2"
    ),
    "a drawn seed": Case("runtime/sampling/sampler.py _with_seed", "sample --ckpt run --prompt a", code=0),
    "defaults that are wrong": Case(
        "runtime/session/generation_defaults.py _none", "sample --ckpt hf --prompt-tokens 1", prepare=bad_defaults
    ),
    "defaults of the model": Case(
        "runtime/session/generation_defaults.py _none", "sample --ckpt hf --prompt-tokens 1", code=0,
        prepare=other_defaults,
    ),
    "little memory": Case("runtime/session/memory.py check", TRAIN, prepare=little_memory),
    "a loss that is not finite": Case(
        "runtime/training/report.py MetricsReporter",
        f"{TRAIN} --set optimizer.lr=1e38 --set optimizer.warmup_steps=0 --set optimizer.total_steps=3", code=1,
    ),
    "a full disk": Case(
        "runtime/training/run_folder.py warn_of_little_space", TRAIN, code=0, prepare=full_disk
    ),
    "a z-loss": Case("runtime/training/start.py _note_z_loss", f"{TRAIN}{{n}} --tune-model-path run", code=0),
    "tokens of another tokenizer": Case(
        "runtime/training/tokenizers.py _of_data",
        f"{TRAIN}{{n}} --tune-model-path tokenized --set model.n_vocab=280", code=0,
    ),
    "a model beside a vision tower": Case(
        "checkpoint/hf/config.py _text_model", "from-hf --input vision --output-path out", prepare=vision_model
    ),
    "adapters without a rank": Case(
        "config/lora.py LoraConfig", f"{TRAIN} --tune-model-path run --set lora.alpha=8"
    ),
    "a part of a fused matrix": Case(
        "config/lora.py with_adapters",
        f"{TRAIN} --ignore-keys model --set data.seq=32 --tune-model-path neox --set lora.rank=2 "
        "--set 'lora.targets=[\"q\",\"v\"]'",
        prepare=fused_matrices,
    ),
    "another rank": Case(
        "checkpoint/identity.py check_lora",
        "train --config config.json --set checkpoint.model_dir=adapted --set lora.rank=4", prepare=adapted_run,
    ),
    "adapters of more matrices": Case(
        "runtime/training/start_adapters.py OtherAdapters",
        f"{TRAIN}{{n}} --tune-model-path run --adapter adapted --set lora.rank=4 --set 'lora.targets=[\"q\"]'",
        prepare=adapted_run,
    ),
    "adapters of a larger rank": Case(
        "runtime/training/start_adapters.py OtherAdapters",
        f"{TRAIN}{{n}} --tune-model-path run --adapter adapted --set lora.rank=1", prepare=adapted_run,
    ),
    "values too large for float16": Case(
        "checkpoint/hf/writer.py cast", "to-hf --input-ckpt large --output-path out --dtype fp16", prepare=large_values
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with configs, a run, a run with a tokenizer of its own, and a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("advice")
    optimizer = {"total_steps": 1, "warmup_steps": 1, "anneal_steps": 1, "gradient_accumulation_steps": 1}
    off = {"val_set": {}, "val_batches": 0}
    write_run(folder, model={"layers": 1}, optimizer=optimizer, data=off, checkpoint={"ckpt_every": 1})
    (folder / "flat.json").write_text(json.dumps(FLAT))
    (folder / "runs/old").mkdir(parents=True)
    hf_models.save_model("Llama", LLAMA, folder / "hf")
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        # a command sets it
        patch.setattr(sys, "argv", sys.argv)
        patch.setattr(logs, "set_up", lambda *_: None)
        patch.setattr(platforms, "CompileCache", contextlib.nullcontext)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        commands.main(shlex.split("train --config config.json"))
        commands.main(shlex.split("tokenizer --input text.txt --output words --vocab 280"))
        commands.main(shlex.split("from-hf --input hf --output-path native"))
        words = "--set data.tokenizer=words --set model.n_vocab=280 --set checkpoint.model_dir=tokenized"
        commands.main(shlex.split(f"train --config config.json {words}"))
    return folder


@pytest.fixture
def advice(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, tuple[str, ...]]]]:
    """The advice that was printed in a copy of `made`, each with its place."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(logs, "set_up", lambda *_: None)
    monkeypatch.setattr(platforms, "CompileCache", contextlib.nullcontext)
    logging.getLogger("mesh_transformer").setLevel(logging.INFO)
    # a process warns once
    load._warn_once.cache_clear()
    printed: list[tuple[str, tuple[str, ...]]] = []

    def join(words: tuple[str, ...]) -> str:
        frame = sys._getframe(1)
        while frame.f_code.co_filename == errors.__file__:
            assert frame.f_back is not None
            frame = frame.f_back
        path = Path(frame.f_code.co_filename).relative_to(PACKAGE)
        printed.append((f"{path} {frame.f_code.co_qualname.partition('.')[0]}", words))
        return shlex.join(words)

    monkeypatch.setattr(errors, "shlex", SimpleNamespace(join=join))
    yield printed
    files._cached_client.cache_clear()


def run(words: list[str], patch: pytest.MonkeyPatch) -> int:
    """The exit code of a command."""
    patch.setattr(sys, "argv", ["mesh-transformer", *words])
    with pytest.raises(SystemExit) as ended:
        cli.run(commands.main)
    return int(ended.value.code or 0)


@pytest.mark.parametrize("name", CASES)
def test_advice_is_pasted(name, advice, monkeypatch, caplog, capsys):
    case = CASES[name]
    case.prepare(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        first = case.command.format(n=1, port=busy.getsockname()[1])
        assert run(shlex.split(first), monkeypatch) == case.code, capsys.readouterr().err
    options = [words for place, words in advice if place == case.place]
    assert options, advice
    shown = capsys.readouterr().err + caplog.text
    assert shlex.join(options[case.nth]) in shown
    advice.clear()
    again = [*shlex.split(case.command.format(n=2, port=1)), *options[case.nth]]
    assert run(again, monkeypatch) == 0, capsys.readouterr().err
    # the same advice is not given again
    assert options[case.nth] not in [words for place, words in advice if place == case.place]


def places() -> Iterator[str]:
    """Each place of the package that makes advice."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path == Path(errors.__file__):
            continue
        for top in ast.parse(path.read_text()).body:
            for node in ast.walk(top):
                called = getattr(getattr(node, "func", None), "id", getattr(getattr(node, "func", None), "attr", ""))
                if isinstance(node, ast.Call) and called in ADVICE:
                    yield f"{path.relative_to(PACKAGE)} {getattr(top, 'name', '')}"


def test_all_advice_is_pasted():
    """Each call has a case of its own."""
    pasted, calls = Counter(case.place for case in CASES.values()), Counter(places())
    assert pasted.keys() | ELSEWHERE.keys() == calls.keys()
    assert [place for place in pasted if pasted[place] < calls[place]] == []


# whole options outside the two functions
WRITTEN_OUT = {
    "checkpoint/hf/text_only.py": "an option to leave out",
    "config/load.py": "the form of --set",
    "runtime/convert.py": "an option of sample",
}


def test_no_whole_option_is_written_out():
    """A message has it from the two functions, so that a case pastes it."""
    option = re.compile(r"--set [a-z_]+(\.[a-z_]+)?=[^A-Z{]|--port \d|--overwrite\b|--truncate\b|--text-only\b")
    places = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and option.search(" ".join(texts(node))):
                places.add(str(path.relative_to(PACKAGE)))
    assert places <= WRITTEN_OUT.keys()


def texts(node: ast.AST) -> Iterator[str]:
    """The texts in a statement that the two functions do not get."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ADVICE:
        return
    if isinstance(node, ast.Constant):
        yield str(node.value)
    for child in ast.iter_child_nodes(node):
        yield from texts(child)


def test_a_pasted_seed_gives_the_same_sample(advice, monkeypatch, capsys):
    words = shlex.split("sample --ckpt run --prompt a --max-new-tokens 8")
    run(words, monkeypatch)
    first = capsys.readouterr().out
    run([*words, *advice[-1][1]], monkeypatch)
    assert capsys.readouterr().out == first
