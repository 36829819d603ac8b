"""What a process that imports and uses the library sees of it besides results."""

import ast
import importlib
import signal
import subprocess
import sys
from pathlib import Path

from support.commands import CONFIG, REPO, finish, run_python, start_python, wait_for_step
from support.xla import cpu_flags

import mesh_transformer

# what others change when they are imported is theirs
STATE = """
import asyncio, copy, gc, logging, os, signal, sys, threading, warnings

import fsspec.config, jax, matplotlib.pyplot, numpy, orbax.checkpoint, tensorboardX, transformers, uvicorn
import jax._src.cache_key
# the first use of a tokenizer imports more
transformers.AutoTokenizer.from_pretrained(sys.argv[1])

LOGGERS = ["", "absl", "asyncio", "fsspec", "jax", "mesh_transformer", "transformers", "uvicorn", "uvicorn.error"]


def state():
    loggers = [logging.getLogger(name) for name in LOGGERS]
    signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
    return copy.copy({
        "hooks": (sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook, sys.getswitchinterval()),
        "signals": signals,
        "argv": list(sys.argv),
        "gc": (gc.get_threshold(), gc.isenabled(), gc.get_freeze_count()),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "loggers": [(each.level, list(each.filters), list(each.handlers), each.disabled) for each in loggers],
        "fsspec": copy.deepcopy(fsspec.config.conf),
        "jax": {name: getattr(jax.config, name, None) for name in jax.config.values},
        "listeners": list(jax._src.monitoring.get_event_listeners()),
        "key": jax._src.cache_key._hash_accelerator_config,
        "warnings": list(warnings.filters),
        "threads": {thread.name for thread in threading.enumerate()},
    })


before = state()
"""
USE = """
from mesh_transformer import fit, load

run = fit({config!r}, optimizer={{"total_steps": 2}})
assert [row["step"] for row in run.metrics][-1] == run.step == 2
with run.load(slots=1) as model:
    model.generate("12", max_tokens=2)
    for text in model.stream("12", max_tokens=9):
        break
    model.score("123")
    model.embed("123")
    model.save("hf")
    with model.serve(port=0):
        pass
with load(sys.argv[1], slots=1) as model:
    model.chat("12", max_tokens=2)
try:
    load("nowhere")
except ValueError:
    pass
now = state()
for name, value in before.items():
    if name == "threads":
        # pools of other libraries, and of executors that end with the process
        left = [each for each in now[name] - value if each.startswith(("engine", "model", "fit", "compile"))]
        assert not left, left
    else:
        assert now[name] == value, (name, value, now[name])
"""


def write_text(folder: Path) -> None:
    (folder / "text.txt").write_text("".join(f"{i} bottles of beer on the wall, {i * i}.\n" for i in range(500)))


def test_the_import_is_light() -> None:
    program = "import sys; from mesh_transformer import load, fit, Completion; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", program], cwd=REPO, text=True, capture_output=True, check=True)
    assert not {"jax", "numpy", "transformers", "haiku", "pydantic"} & set(modules.stdout.split())


def test_editors_see_all_names() -> None:
    stub = ast.parse((REPO / "mesh_transformer/__init__.pyi").read_text())
    imported = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    assert sorted(node.names[0].name for node in imported) == mesh_transformer.__all__
    for node in imported:
        name = node.names[0].name
        assert getattr(importlib.import_module(str(node.module)), name) is getattr(mesh_transformer, name)
    assert (REPO / "mesh_transformer/py.typed").is_file()


def test_a_process_is_as_before(model_folder: Path, tmp_path: Path) -> None:
    write_text(tmp_path)
    output, errors = run_python(STATE + USE.format(config=CONFIG), str(model_folder), cwd=tmp_path)
    assert (output, errors) == ("", "")


def test_ctrl_c_saves_and_returns(tmp_path: Path) -> None:
    write_text(tmp_path)
    groups = {"optimizer": {"total_steps": 100000}, "checkpoint": {"ckpt_every": 100000}}
    program = (
        "import mesh_transformer\n"
        f"run = mesh_transformer.fit({CONFIG!r}, **{groups!r})\n"
        "print('returned', run.step, run.checkpoint)"
    )
    process = start_python(program, cwd=tmp_path)
    wait_for_step(process, tmp_path / "run", 2)
    process.send_signal(signal.SIGINT)
    output, _ = finish(process)
    words = output.split()
    assert words[0] == "returned"
    assert 1 <= int(words[1]) < 100000
    assert words[2] == f"run/step_{words[1]}"
    assert (tmp_path / words[2]).is_dir()


def test_cpu_devices_that_are_asked_for_too_late(tmp_path: Path) -> None:
    program = (
        "import os, jax\n"
        "jax.devices()\n"
        f"os.environ['XLA_FLAGS'] = {cpu_flags(4)!r}\n"
        "import mesh_transformer\n"
        f"mesh_transformer.fit({CONFIG!r}, mesh={{'tp': 4}})"
    )
    write_text(tmp_path)
    _, errors = run_python(program, cwd=tmp_path, code=1)
    assert "UserError: XLA_FLAGS asks for 4 devices of the CPU, but JAX has 1" in errors.splitlines()[-1]


def test_a_process_ends_with_an_open_stream(model_folder: Path, tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from mesh_transformer import load\n"
        "model = load(sys.argv[1], slots=1)\n"
        "stream = model.stream('A day', ignore_eos=True)\n"
        "next(stream)\n"
        "print('end')"
    )
    assert run_python(program, str(model_folder), cwd=tmp_path) == ("end\n", "")
