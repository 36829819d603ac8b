"""A model that does not fit is refused before it is allocated: with the sizes of models that fit no machine, or with a
machine that has little memory."""

import contextlib
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from support.builders import TINY, program
from support.commands import REPO, run, write_run

import device_sample
import device_serve
import device_train
from mesh_transformer import host_memory, logs, platforms
from mesh_transformer.config import ComputeConfig, load_config, parse_config
from mesh_transformer.errors import UserError
from mesh_transformer.estimate import closed_form
from mesh_transformer.infer.engine import SlotEngine
from mesh_transformer.models.placement import Placement
from mesh_transformer.runtime import cli
from mesh_transformer.runtime.evaluation import command as evaluation
from mesh_transformer.runtime.session import memory
from mesh_transformer.runtime.session.session import Session
from mesh_transformer.runtime.training.memory import check_training
from mesh_transformer.train.memory import training_arrays
from mesh_transformer.train.step import TrainProgram, compile_step

GO_ON = ("--set", "compute.memory_check=false")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes this machine one with so many KiB of memory left."""

    def with_kib(kib: int) -> None:
        root = tmp_path / "machine"
        (root / "proc").mkdir(parents=True, exist_ok=True)
        (root / "proc/meminfo").write_text(f"MemTotal: 24684084 kB\nMemAvailable:   {kib} kB\n")
        monkeypatch.setattr(host_memory, "ROOT", root)

    return with_kib


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs a command in this process, in a folder with a config. Returns its exit code and standard error."""
    write_run(tmp_path, mesh={"fsdp": 2, "tp": 4})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(platforms, "CompileCache", contextlib.nullcontext)
    monkeypatch.setattr(logs, "set_up", lambda *_: None)

    def run_command(main, *arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [main.__module__, *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.run(main)
        return int(ended.value.code or 0), capsys.readouterr().err

    return run_command


@pytest.fixture
def checkpoint(command) -> None:
    """A Hugging Face folder, `model`, whose weights cannot be read."""
    config = {"model_type": "gptj", "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 32, "rotary_dim": 8,
              "vocab_size": 257, "tie_word_embeddings": False}  # fmt: skip
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(config))
    Path("model/pytorch_model.bin").write_bytes(b"no weights")


def test_training_that_fits_no_machine_is_refused(tmp_path: Path) -> None:
    """Before the data are looked for: there are none."""
    sizes = ("model.d_model=65536", "model.layers=512", "mesh.tpu_size=null", "checkpoint.bucket=")
    given = [argument for value in sizes for argument in ("--set", value)]
    config = str(REPO / "configs/6B_roto_256.json")
    _, errors = run("device_train.py", "--config", config, *given, cwd=tmp_path, code=2, devices=8)
    line = errors.splitlines()[-1]
    assert line.startswith("error: training does not fit: it needs at least 393,")
    assert all(name in line for name in ("on each of 8 devices: parameters", "moments", "gradients", "adafactor"))
    assert line.endswith("or go on with --set compute.memory_check=false")


def test_training_goes_on_without_the_check(command, machine) -> None:
    machine(1)
    absent = ("--config", "config.json", "--set", "data.train_set=absent.txt")
    code, errors = command(device_train.main, *absent)
    assert code == 2
    assert errors.count("\n") == 1
    assert "training does not fit" in errors
    assert "on each of 8 devices" in errors
    assert "this machine has 0.0 GiB left" in errors
    code, errors = command(device_train.main, *absent, *GO_ON)
    assert code == 2
    assert "absent.txt" in errors
    assert "does not fit" not in errors


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (device_sample.main, ("--prompt-tokens", "1,2", "--max-new-tokens", "2")),
        (device_serve.main, ("--port", "0", "--slots", "2", "--set", "data.tokenizer=bytes")),
    ],
    ids=["sample", "serve"],
)
def test_sampling_and_serving_are_refused_before_weights_are_read(
    command, machine, checkpoint, main, arguments
) -> None:
    machine(1)
    code, errors = command(main, "--ckpt", "model", *arguments)
    assert code == 2
    assert errors.count("\n") == 1
    assert "the model does not fit" in errors
    assert "parameters 0.0, cache 0.0, programs 0.0" in errors
    assert ("--slots" in errors) == (main is device_serve.main)
    code, errors = command(main, "--ckpt", "model", *arguments, *GO_ON)
    assert code == 2
    assert "pytorch_model.bin cannot be read" in errors


def test_evaluation_is_refused_before_its_tasks_are_read(command, machine) -> None:
    machine(1)
    config = load_config("config.json")
    with pytest.raises(UserError, match="the model does not fit"):
        evaluation.evaluate(config, evaluation.EvalOptions(checkpoint="absent", tasks=("absent",)))


def test_a_step_that_may_not_fit_is_a_warning(machine, caplog: pytest.LogCaptureFixture) -> None:
    session = Session.open(parse_config({**TINY, "mesh": {"tp": 8}}))
    made = TrainProgram(session.placement, session.config)
    least = 8 * sum(training_arrays(made).values())
    resolved = session.config.model_copy(update={"compute": made.model.compute})
    estimate = 8 * sum(closed_form.step_gib(resolved, 8).values()) * 2**30
    assert estimate > 1.2 * least
    machine(round(estimate * 1.01) >> 10)
    check_training(session, made)
    assert not caplog.records
    machine(round(1.1 * least) >> 10)
    check_training(session, made)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "a step may not fit" in record.getMessage()


@pytest.mark.parametrize("mesh", [{"pp": 2}, {"cp": 2, "tp": 2}, {"pp": 2, "fsdp": 2, "cp": 2}])
def test_a_mesh_without_a_formula_has_no_estimate(
    machine, caplog: pytest.LogCaptureFixture, mesh: dict[str, int]
) -> None:
    session = Session.open(parse_config({**TINY, "mesh": mesh}, ["model.layers=4"]))
    made = TrainProgram(session.placement, session.config)
    machine(round(8.8 * sum(training_arrays(made).values())) >> 10)
    caplog.clear()
    check_training(session, made)
    assert not caplog.records


@pytest.mark.parametrize(
    ("overrides", "devices", "dtype"),
    [
        (("mesh.fsdp=2", "mesh.zero1=true", "optimizer.gradient_accumulation_steps=2"), 4, "float32"),
        (("optimizer.name=adafactor", "optimizer.min_dim_size_to_factor=16"), 1, "bfloat16"),
    ],
)
def test_a_compiled_step_needs_more(overrides: tuple[str, ...], devices: int, dtype: str) -> None:
    """Of a wide model with a small batch, it does not need much more."""
    raw = {
        "model": {"layers": 1, "d_model": 256, "n_heads": 4, "n_vocab": 256, "seq": 4, "pe_rotary_dims": 8},
        "data": {"batch_size": 4},
    }
    made = program(raw, *overrides, devices=devices, dtype=dtype)
    need = sum(training_arrays(made).values())
    compiled = compile_step(made, made.config.optimizer.gradient_accumulation_steps, 4).memory_analysis()
    peak = compiled.argument_size_in_bytes + compiled.temp_size_in_bytes
    assert 0.25 * peak < need <= peak


def test_what_an_engine_allocates() -> None:
    config = parse_config({**TINY, "mesh": {"tp": 4, "fsdp": 2}, "model": {**TINY["model"], "seq": 600}})
    placement = Placement.of(config, jax.devices()).for_decoding()
    engine = SlotEngine(placement, {"blocks": ()}, slots=3, context=100)
    shards = [shard for x in jax.tree.leaves(engine._slots) for shard in x.addressable_shards]
    held = [shard.data.nbytes for shard in shards if shard.device == jax.devices()[3]]
    assert memory.serving_arrays(placement, 3, 100)["cache"] == sum(held)


class _Device:
    """A GPU or TPU with these statistics of its allocator."""

    platform = "gpu"

    def __init__(self, kind: str, stats: dict[str, int] | None):
        self.device_kind, self._stats = kind, stats

    def memory_stats(self) -> dict[str, int] | None:
        return self._stats


def test_the_memory_of_accelerators() -> None:
    """The memory of their allocator, else of the table; every device has its own."""
    small, large = _Device("NVIDIA L4", {"bytes_limit": 5}), _Device("NVIDIA L4", {"bytes_limit": 7})
    assert memory.find_room([large, small]) == (5, 1, "a device (NVIDIA L4)")
    known = memory.find_room([_Device("NVIDIA H100 80GB HBM3", None)])
    assert known == (78 << 30, 1, "a device (NVIDIA H100 80GB HBM3)")
    assert memory.find_room([_Device("unheard of", {})]) is None


def test_an_allocation_that_fails_is_one_line(command) -> None:
    code, errors = command(_allocate)
    assert code == 1
    assert errors.startswith("error: out of memory (")
    assert errors.count("\n") == 1
    assert "--slots" in errors


def _allocate() -> None:
    jax.block_until_ready(jnp.zeros(1 << 46))


def test_a_server_whose_engine_runs_out_of_memory(command) -> None:
    def open_engine(*_, **__) -> None:
        _allocate()

    def main() -> int:
        return device_serve.main(open_engine=open_engine)

    code, errors = command(main, "--config", "config.json", "--port", "0")
    assert code == 1
    assert errors.splitlines()[-1].startswith("error: out of memory (")
    assert "Traceback" not in errors


def test_the_check_is_no_part_of_the_model() -> None:
    """--cache of eval_harness.py finds answers by this text."""
    assert repr(ComputeConfig(memory_check=False)) == repr(ComputeConfig())
    assert json.loads(ComputeConfig().model_dump_json())["memory_check"] is True
