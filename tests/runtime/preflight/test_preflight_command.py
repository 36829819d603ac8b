"""preflight.py: its arguments; and, where libtpu is installed, whole runs on a small model."""

import csv
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import pytest
from support import gguf_models, hf_models
from support.builders import TINY
from support.hub_server import HubServer

from mesh_transformer.commands import preflight as commands_preflight
from mesh_transformer.config import Config, parse_config
from mesh_transformer.errors import UserError
from mesh_transformer.estimate import programs
from mesh_transformer.estimate.prediction import Prediction, estimate_training
from mesh_transformer.estimate.programs import COMPILER_FAILED, Compiled
from mesh_transformer.estimate.target import Target, gpu_target
from mesh_transformer.runtime.preflight import command
from mesh_transformer.runtime.preflight.command import PreflightOptions


def hf_config(name: str) -> dict[str, Any]:
    """The keys of config.json of a variant."""
    return dict(hf_models.VARIANTS[name][1])


Rows = list[dict[str, Any]]


@pytest.fixture
def messages() -> list[str]:
    """What each run wrote to standard error."""
    return []


@pytest.fixture
def preflight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, messages: list[str]
) -> Callable[..., Any]:
    """Runs the command on a tiny model. Returns the exit code and the rows."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY))

    def run(*overrides: str, config: Path = config, **options: Any) -> tuple[int, Rows]:
        defaults: dict[str, Any] = {"tune_model_path": None, "tpu": [], "gpu": [], "search": False, "serve": False}
        defaults |= {"op_table": None, "model": None, "seq": None, "batch": None}
        defaults |= {"slots": 8, "compile": 4, "steps": None, "price": None, "json": True, "plot": ""}
        given = None if options.get("model") else str(config)
        code = command.run(given, overrides, PreflightOptions(**{**defaults, **options}))
        printed = capsys.readouterr()
        messages.append(printed.err)
        return code, [json.loads(line) for line in printed.out.splitlines()]

    return run


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tpu": ["v3-7"]}, "unknown TPU type 'v3-7'"),
        ({"tpu": ["h200"]}, "unknown TPU type 'h200'"),
        ({"gpu": ["b200"]}, "unknown GPU 'b200' .did you mean h200..: expected one of a100, h100, h200, t4"),
        ({"compile": 0}, "--compile 0: expected a whole number, 1 or more"),
        ({"steps": -1}, "--steps -1"),
        ({"slots": 0}, "--slots 0"),
        ({"price": float("nan")}, "--price nan: expected the price of a chip for an hour"),
        ({"plot": "no/such/folder.png"}, "--plot no/such/folder.png: the folder does not exist"),
        ({"search": True, "serve": True}, "--search finds the fastest training step"),
    ],
)
def test_bad_options(preflight, options, message):
    with pytest.raises(UserError, match=message):
        preflight(**options)


def test_bad_config(preflight):
    with pytest.raises(UserError, match=r"mesh\.tq"):
        preflight("mesh.tq=2")


@pytest.mark.usefixtures("no_libtpu")
@pytest.mark.parametrize("kind", ["file", "folder", "hub", "gguf"])
def test_a_model_without_a_config(
    preflight, tmp_path: Path, hub_server: HubServer, messages: list[str], kind: str
) -> None:
    """No weights are read: the folder has none, and of the hub's none are downloaded."""
    folder = tmp_path / "model"
    if kind == "gguf":
        path = str(gguf_models.save("qwen3", folder))
    else:
        folder.mkdir()
        content = {**hf_config("qwen3"), "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(content))
        hub_server.commit("org/m", {"config.json": json.dumps(content).encode(), "model.safetensors": b"no weights"})
        path = {"file": f"{folder}/config.json", "folder": str(folder), "hub": "hf://org/m"}[kind]
    code, rows = preflight(model=path, seq=64, batch=16, tpu=["v5e-8"])
    assert (code, [row["sequences"] for row in rows]) == (0, [16])
    assert f"assumed for {path}: adam, a step of 16 sequences of 64 tokens, a context of 64" in messages[-1]
    assert "model.safetensors" not in hub_server.downloads()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "nowhere"}, "no checkpoint in nowhere"),
        ({"model": "config.json", "seq": 0}, "--seq 0: expected a whole number, 1 or more"),
        ({"model": "config.json", "batch": -1}, "--batch -1"),
        ({"model": "config.json"}, "config.json: model_type is None"),
        ({"model": "config.json", "tune_model_path": "x"}, "--model makes a config of its own"),
        ({"seq": 9}, "--seq is for --model"),
    ],
)
def test_what_a_model_without_a_config_needs(preflight, options, message) -> None:
    with pytest.raises(UserError, match=message):
        preflight(**options)


def test_neither_a_config_nor_a_model() -> None:
    with pytest.raises(UserError, match="nothing to judge: give --config FILE, or --model"):
        command._config(None, (), PreflightOptions(**{field.name: None for field in fields(PreflightOptions)}))


def test_what_documents_cost_is_said() -> None:
    """cuDNN's kernel has no segments, so that attention is computed without one."""
    sizes = ["model.d_model=512", "model.seq=512", "compute.dtype=bfloat16", "data.packing=documents"]
    config = parse_config(TINY, sizes)
    row, concat = (estimate_training(one, gpu_target("h100"), ()) for one in (config, parse_config(TINY, sizes[:-1])))
    assert row.step_s > concat.step_s
    more = f"{row.step_s / concat.step_s - 1:+.1%}"
    assert f"data.packing documents against concat: {more} time of a step" in row.notes[-1]
    assert not any("concat" in note for note in concat.notes)
    with pytest.raises(UserError, match="compute.attention cudnn cannot compute segments"):
        estimate_training(parse_config(TINY, [*sizes, "compute.attention=cudnn"]), gpu_target("h100"), ())


@pytest.mark.usefixtures("no_libtpu")
def test_by_formula(preflight, repo, messages):
    """The command of docs/preflight.md, whose compiled program needs 14.57 GiB and 5.93 s."""
    code, (row,) = preflight(config=repo / "configs/6B_finetune_v3-8.json", tpu=["v3-8"], steps=72, price=1.1)
    assert code == 0
    assert (row["slice"], row["estimate"], row["fits"], row["best"]) == ("v3-8", "formula", True, True)
    assert row["peak_gib"] == pytest.approx(14.57, rel=0.08)
    assert row["step_s"] == pytest.approx(5.93, rel=0.15)
    assert row["step_s_range"][0] < 5.34
    assert row["step_s_range"][1] > 7.12
    assert sum(row["parts"].values()) == pytest.approx(row["step_s"], rel=1e-3)
    assert set(row["parts"]) == {"products", "attention", "element-wise", "head", "optimizer", "collectives"}
    assert sum(row["memory_gib"].values()) == pytest.approx(row["peak_gib"], rel=1e-3)
    assert set(row["memory_gib"]) == {"parameters", "moments", "weights", "gradients", "activations"}
    assert row["cost"] == pytest.approx(24 * row["days"] * 4 * 1.1, rel=1e-3)
    assert "formula only, without libtpu (pip install" in messages[-1]
    assert "pip install -e '.[tpu]'" in messages[-1]


@pytest.mark.usefixtures("no_libtpu")
def test_search_by_formula(preflight):
    """Each slice has a best row, whose arguments give the same prediction."""
    code, rows = preflight(tpu=["v5e-8", "v4-8"], search=True, compile=2)
    assert code == 0
    assert [row["slice"] for row in rows] == ["v5e-8"] * 2 + ["v4-8"] * 2
    best = rows[0]
    assert best["best"]
    again, (same,) = preflight(*best["set"], tpu=["v5e-8"])
    assert again == 0
    assert {**same, "set": None} == {**best, "set": None}


@pytest.mark.usefixtures("no_libtpu")
def test_nothing_fits_by_formula(preflight, messages):
    large = ["model.d_model=16384", "model.n_heads=64", "model.d_head=256", "model.layers=2", "mesh.tp=8"]
    code, (row,) = preflight(*large, "model.n_vocab=50400", tpu=["v2-8"])
    assert (code, row["fits"]) == (1, False)
    assert "exceeds" in row["reason"]
    assert "It would fit with" in messages[-1]


@pytest.mark.usefixtures("no_libtpu")
@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        (["mesh.cp=2"], {"tpu": ["v4-8"]}, "v4-8: the formula does not model mesh.cp; compiling needs libtpu"),
        (["mesh.dcn=dp"], {"tpu": ["2xv5e-8"]}, "2xv5e-8: the formula does not model several slices"),
        ([], {"tpu": ["v4-8"], "serve": True}, "--serve compiles the server's programs, which needs libtpu"),
        ([], {"op_table": "tables"}, "--op-table lists the operations of compiled programs, which needs libtpu"),
    ],
)
def test_what_the_formula_does_not_model(preflight, overrides, options, message):
    with pytest.raises(UserError, match=rf"{message}.*pip install -e '\.\[tpu\]'"):
        preflight(*overrides, **options)


@pytest.mark.usefixtures("libtpu")
@pytest.mark.tpu
def test_rows_for_slices(preflight, tmp_path, messages):
    """One slice has a row with a time, on the other the mesh is impossible; the second run compiles nothing."""
    arguments = ["mesh.tp=8", "model.n_heads=8", "model.d_head=16"]
    code, (fits, impossible) = preflight(*arguments, tpu=["v3-8", "v4-8"], plot="a.png", steps=1000, price=1.5)
    assert code == 1
    assert fits["fits"]
    assert fits["best"]
    assert 0 < fits["peak_gib"] < fits["usable_gib"] == 15.48
    assert sum(fits["memory_gib"].values()) == pytest.approx(fits["peak_gib"], rel=1e-3)
    assert sum(fits["parts"].values()) == pytest.approx(fits["step_s"], rel=1e-3)
    assert fits["step_s_range"][0] < fits["step_s"] < fits["step_s_range"][1]
    assert fits["tokens_per_s"] == pytest.approx(fits["sequences"] * TINY["model"]["seq"] / fits["step_s"], rel=1e-3)
    assert 0 < fits["mfu"] < 1
    assert fits["cost"] == pytest.approx(24 * fits["days"] * 4 * 1.5, rel=1e-3)
    assert not impossible["fits"]
    assert "needs a multiple of 8 devices, found 4" in impossible["reason"]
    assert (tmp_path / "a.png").exists()
    assert "compiling: v3-8 train on tp 8" in messages[-1]
    assert "compiling: v4-8" not in messages[-1]
    kept = {path: path.read_bytes() for path in (tmp_path / "cache").rglob("*.json.gz")}
    assert len(kept) == 1
    _, (again,) = preflight(*arguments, tpu=["v3-8"], steps=1000, price=1.5)
    assert again == fits
    assert {path: path.read_bytes() for path in (tmp_path / "cache").rglob("*.json.gz")} == kept


@pytest.mark.usefixtures("libtpu")
@pytest.mark.tpu
def test_search(preflight):
    """The best of the compiled programs comes with the arguments that give it, and with them the same prediction."""
    code, rows = preflight(tpu=["v5e-8"], search=True, compile=2)
    assert code == 0
    (best,) = (row for row in rows if row["best"])
    assert len(rows) == 2
    assert {row["sequences"] for row in rows} == {16}
    again, (same,) = preflight(*best["set"], tpu=["v5e-8"])
    assert again == 0
    assert {**same, "set": None} == {**best, "set": None}


@pytest.mark.usefixtures("libtpu")
@pytest.mark.tpu
def test_the_search_goes_on_where_the_compiler_fails(preflight, monkeypatch, messages):
    """As libtpu fails for tp 2 on v5e-256: such a program is none of those of --compile."""

    def predict(config: Config, target: Target, changes: list[str], *_: Any) -> Prediction:
        row = estimate_training(config, target, changes)
        failed = config.mesh.tp == 1
        return replace(row, fits=False, reason=f"{COMPILER_FAILED}: why") if failed else row

    monkeypatch.setattr(command, "predict_training", predict)
    code, rows = preflight(tpu=["v5e-8"], search=True, compile=2)
    assert code == 0
    assert [row["fits"] for row in rows].count(True) == 2
    assert rows[-1]["fits"]
    assert not rows[0]["fits"]
    assert "does not compile" in messages[-1]


def test_a_process_that_the_compiler_ends_is_followed_by_another(tmp_path, monkeypatch, capfd):
    """Its lines are written once, by the process that reaches the end."""
    program = tmp_path / "python"
    count = tmp_path / "count"
    program.write_text(f"""#!/bin/sh
echo "$3 $4 $5 $6 $MESH_TRANSFORMER_COMPILES"
echo x >> {count}
[ "$(wc -l < {count})" -lt 3 ] && kill -ABRT $$
exit 1
""")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    assert commands_preflight.main(["--config", "c.json", "--search"]) == 1
    printed = capfd.readouterr()
    assert printed.out == "preflight --config c.json --search 1\n"
    assert printed.err.count("the compiler ended the process") == 2


def test_a_compiler_that_ends_every_process_ends_the_command(tmp_path, monkeypatch, capfd):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nkill -ABRT $$\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(commands_preflight, "_MOST_PROCESSES", 3)
    assert commands_preflight.main(["--config", "c.json", "--search"]) == 128 + 6
    assert capfd.readouterr().err.count("the compiler ended the process") == 2


@pytest.mark.parametrize("ended", [True, False])
def test_a_program_that_ended_its_compiler_is_refused(tmp_path, monkeypatch, ended):
    """Not one that another process compiles now."""
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    target = gpu_target("h100")
    monkeypatch.setattr(programs, "_compile", lambda *_: Compiled("", 7))
    with subprocess.Popen(["sleep", "600"]) as process:
        (tmp_path / f"{programs._key(lowered, target)}.json{programs.BEGUN}-{process.pid}").touch()
        if ended:
            process.kill()
            process.wait()
        compiled = programs.compile_for(lowered, target, tmp_path)
        process.kill()
    assert (compiled.refused is not None) == ended
    assert (compiled.peak_bytes is None) == ended
    assert len(list(tmp_path.glob(f"*{programs.BEGUN}-*"))) == 1


@pytest.mark.usefixtures("libtpu")
@pytest.mark.tpu
def test_serving(preflight, messages):
    code, (prefill, decode) = preflight("mesh.tp=2", tpu=["v4-8"], serve=True, slots=4)
    assert code == 0
    assert (prefill["program"], decode["program"], decode["sequences"]) == ("prefill", "decode", 4)
    assert (prefill["best"], decode["best"]) == (False, True)
    assert decode["memory_gib"]["cache"] > 0
    assert decode["tokens_per_s"] < prefill["tokens_per_s"]
    lines = [line for line in messages[-1].splitlines() if "I compiling: v4-8" in line]
    assert [line.partition(" I ")[2] for line in lines] == [
        "compiling: v4-8 prefill on dp 2 tp 2",
        "compiling: v4-8 decode on dp 2 tp 2",
    ]


@pytest.mark.usefixtures("libtpu")
@pytest.mark.tpu
def test_tables_of_operations(preflight, tmp_path):
    """Each compiled program has a table, with the seconds and parts of its row."""
    code, (first, second) = preflight(tpu=["v5e-8"], search=True, compile=2, op_table="a/tables")
    assert code == 0
    assert [row["op_table"] for row in (first, second)] == [f"a/tables/v5e-8-train-{number}.tsv" for number in (1, 2)]
    for row in (first, second):
        with (tmp_path / row["op_table"]).open() as file:
            operations = list(csv.DictReader(file, delimiter="\t"))
        assert sum(float(one["seconds"]) for one in operations) == pytest.approx(row["step_s"], rel=0.01)
        assert {one["part"] for one in operations} == {part for part, seconds in row["parts"].items() if seconds}
    _, served = preflight("mesh.tp=2", tpu=["v4-8"], serve=True, slots=4, op_table="a")
    assert [row["op_table"] for row in served] == ["a/v4-8-prefill-1.tsv", "a/v4-8-decode-1.tsv"]
    assert all((tmp_path / row["op_table"]).exists() for row in served)


def test_a_folder_that_cannot_be_made(preflight, tmp_path, monkeypatch):
    monkeypatch.setattr(Target, "missing_compiler", None)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--op-table file/tables: Not a directory; give a folder"):
        preflight(gpu=["h200"], op_table="file/tables")


@pytest.mark.usefixtures("libtpu")
@pytest.mark.tpu
def test_nothing_fits(preflight, messages):
    """A model of 100B on 8 GiB: the compiler refuses it, and the advice names a way out."""
    large = ["model.d_model=16384", "model.n_heads=64", "model.d_head=256", "model.layers=2", "mesh.tp=8"]
    code, (row,) = preflight(*large, "model.n_vocab=50400", tpu=["v2-8"])
    assert code == 1
    assert not row["fits"]
    assert row["step_s"] is None
    assert row["peak_gib"] > row["usable_gib"]
    assert "v2-8: nothing fits; the nearest, tp 8, needs" in messages[-1]
    assert "It would fit with" in messages[-1]


@pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)),
    reason="JAX's CUDA plugin is not installed (pip install -e '.[gpu-target]'): nothing was compiled for a GPU",
)
def test_a_gpu(preflight):
    # smaller products have no kernel without autotuning
    code, (row,) = preflight("model.d_model=256", "model.n_heads=4", "model.seq=128", gpu=["h200"])
    assert code == 0
    assert (row["slice"], row["estimate"], row["usable_gib"]) == ("h200", "roofline", 139.0)
    assert sum(row["parts"].values()) == pytest.approx(row["step_s"], rel=1e-3)
    assert 0 < row["mfu"] < 1


@pytest.mark.skipif(
    any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)),
    reason="JAX's CUDA plugin is installed",
)
def test_without_the_compiler_for_gpus_the_closed_form_judges(preflight, messages):
    code, rows = preflight(gpu=["h200", "RTX 4090", "mi300x"])
    assert code == 0
    assert [(row["slice"], row["estimate"]) for row in rows] == [
        ("h200", "formula"), ("rtx4090", "formula"), ("mi300x", "formula"),
    ]  # fmt: skip
    assert "formula only, without JAX's CUDA plugin (pip install -e '.[gpu-target]'" in messages[-1]
    with pytest.raises(UserError, match="--serve compiles the server's programs, which needs JAX's CUDA plugin"):
        preflight(gpu=["h200"], serve=True)
