"""Runs with adapters by the commands: from a base to samples, an export and a resumed run."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.commands import metrics, run, write_run

from mesh_transformer.checkpoint.hf.safetensors_file import read_header
from mesh_transformer.checkpoint.native.source import NativeSource

RATE = {"lr": 0.02, "end_lr": 0.02, "warmup_steps": 0}
LORA = {"rank": 4, "alpha": 8}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_run(folder)
    run("train.py", "--config", "config.json", cwd=folder)
    return folder / "run"


@pytest.fixture(scope="module")
def tuned(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps with adapters, on two devices."""
    folder = tmp_path_factory.mktemp("tuned")
    write_run(folder, optimizer=RATE, lora=LORA, mesh={"tp": 2})
    _, errors = run("train.py", "--config", "config.json", "--tune-model-path", str(base), cwd=folder, devices=2)
    (folder / "log.txt").write_text(errors)
    return folder


def greedy(*arguments: str, cwd: Path, code: int = 0) -> str:
    output, errors = run(
        "device_sample.py", *arguments, "--prompt", "12 bottles of", "--max-new-tokens", "8", "--temperature", "0",
        cwd=cwd, code=code,
    )  # fmt: skip
    return output if code == 0 else errors


def test_the_run_tells_what_is_trained_and_learns(tuned: Path) -> None:
    log = (tuned / "log.txt").read_text()
    trained, share, frozen = re.search(r"parameters \(([\d,]+) trained, ([\d.]+)%; ([\d,]+) frozen\)", log).groups()
    trained, frozen = (int(number.replace(",", "")) for number in (trained, frozen))
    # q, k, v, o: 32 x 32; in and out: 32 x 128; two layers
    assert trained == 2 * 4 * (4 * 64 + 2 * 160)
    assert float(share) == pytest.approx(100 * trained / (trained + frozen), abs=0.01)
    records = metrics(tuned / "run")
    losses = [record["train/loss"] for record in records if "train/loss" in record]
    assert losses[-1] < losses[0]
    first = next(record for record in records if "val/loss_held" in record)
    assert records[-1]["val/loss_held"] < first["val/loss_held"]


def test_a_step_holds_adapters_and_names_its_base(tuned: Path, base: Path) -> None:
    source = NativeSource(str(tuned / "run/step_12"))
    assert {name.split("/")[0] for name in source.tensors} == {"params", "mu", "nu"}
    assert all(re.search(r"_lora_[ab]$", name) for name in source.tensors)
    record = source.extra["lora"]
    assert record["base"] == str(base / "step_12")
    assert re.fullmatch("[0-9a-f]{16}", record["hash"])
    size = sum(path.stat().st_size for path in (tuned / "run/step_12").rglob("*") if path.is_file())
    assert size < 0.6 * sum(path.stat().st_size for path in (base / "step_12").rglob("*") if path.is_file())


def test_samples_and_an_export_are_of_the_whole_model(tuned: Path, base: Path, tmp_path: Path) -> None:
    completion = greedy("--ckpt", str(tuned / "run"), cwd=tmp_path)
    run("to_hf_weights.py", "--input-ckpt", str(tuned / "run"), "--output-path", "hf", "--merge", "--dtype", "fp32",
        cwd=tmp_path)  # fmt: skip
    assert greedy("--ckpt", "hf", cwd=tmp_path) == completion
    tensors = read_header(str(tmp_path / "hf/model.safetensors"))
    adapters, whole = NativeSource(str(tuned / "run/step_12")), NativeSource(str(base / "step_12"))

    def layer(source: NativeSource, name: str) -> np.ndarray:
        shape = source.tensors[name].shape
        return source.read(name, (slice(1, 2), *(slice(None),) * (len(shape) - 1)))[0]

    stem = "params/blocks/ff/out/w"
    a, b = layer(adapters, f"{stem}_lora_a"), layer(adapters, f"{stem}_lora_b")
    exported = tensors["transformer.h.1.mlp.fc_out.weight"]
    found = exported.read((slice(None),) * 2).T
    np.testing.assert_allclose(found, layer(whole, stem) + 2 * a @ b, rtol=0, atol=1e-6)
    assert np.abs(found - layer(whole, stem)).max() > 1e-3


def test_a_moved_base_is_named(tuned: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    record = NativeSource(str(tuned / "run/step_12")).extra["lora"]
    shutil.copytree(record["base"], moved)
    copy = tmp_path / "tuned"
    shutil.copytree(tuned / "run", copy)
    assert greedy("--ckpt", str(copy), "--base", str(moved), cwd=tmp_path) == greedy("--ckpt", str(copy), cwd=tmp_path)
    error = greedy("--ckpt", str(copy), "--base", "nowhere", cwd=tmp_path, code=2)
    assert "the base of" in error
    assert "nowhere, cannot be opened" in error
    assert "Traceback" not in error


@pytest.fixture(scope="module")
def peft(tuned: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The adapters of the run in a folder of PEFT."""
    folder = tmp_path_factory.mktemp("peft")
    run("to_hf_weights.py", "--input-ckpt", str(tuned / "run"), "--output-path", "adapter", cwd=folder)
    return folder / "adapter"


def test_the_adapters_alone_are_a_folder_of_peft(peft: Path, base: Path, tmp_path: Path) -> None:
    assert sorted(path.name for path in peft.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((peft / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, str(base / "step_12"))
    (tmp_path / "copy").symlink_to(base)
    run("to_hf_weights.py", "--input-ckpt", "copy", "--adapter", str(peft), "--output-path", "again", cwd=tmp_path)
    again = tmp_path / "again/adapter_model.safetensors"
    assert again.read_bytes() == (peft / "adapter_model.safetensors").read_bytes()
    config = json.loads((tmp_path / "again/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "copy/step_12")
    _, errors = run(
        "to_hf_weights.py", "--input-ckpt", str(base), "--output-path", "hf", "--merge", cwd=tmp_path, code=2
    )
    assert "is a whole model: omit the option" in errors
    assert not (tmp_path / "hf").exists()


def test_adapters_are_given_to_their_base(tuned: Path, peft: Path, base: Path, tmp_path: Path) -> None:
    expected = greedy("--ckpt", str(tuned / "run"), cwd=tmp_path)
    assert greedy("--ckpt", str(base), "--adapter", str(peft), cwd=tmp_path) == expected
    assert greedy("--ckpt", str(base), "--adapter", str(tuned / "run"), cwd=tmp_path) == expected
    # the base that it names
    assert greedy("--ckpt", str(peft), cwd=tmp_path) == expected
    assert greedy("--ckpt", str(base), cwd=tmp_path) != expected
    error = greedy("--adapter", str(peft), cwd=tmp_path, code=2)
    assert "needs its base: give it with --ckpt BASE" in error
    error = greedy("--ckpt", str(peft), "--adapter", str(base), cwd=tmp_path, code=2)
    assert "is a whole model, not adapters of" in error


def test_a_run_begins_as_other_adapters(tuned: Path, peft: Path, base: Path, tmp_path: Path) -> None:
    """With the group lora of these, or with a larger rank; from a folder of PEFT or from a run."""
    last = [record["val/loss_held"] for record in metrics(tuned / "run") if "val/loss_held" in record][-1]
    for number, (adapter, lora) in enumerate([(peft, {}), (tuned / "run", {"rank": 6, "alpha": 3})]):
        folder = tmp_path / str(number)
        write_run(folder, optimizer={**RATE, "total_steps": 2}, lora=lora)
        run("train.py", "--config", "config.json", "--tune-model-path", str(base), "--adapter", str(adapter),
            cwd=folder)  # fmt: skip
        first = next(record["val/loss_held"] for record in metrics(folder / "run") if "val/loss_held" in record)
        assert first == pytest.approx(last, rel=1e-5)
        recorded = NativeSource(str(folder / "run/step_2")).extra["config"]["lora"]
        assert (recorded["rank"], recorded["alpha"]) == ((4, 8) if not lora else (6, 3))


def test_a_run_that_began_so_resumes_without_them(peft: Path, base: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(peft, adapter)
    write_run(tmp_path, optimizer={**RATE, "total_steps": 2})
    command = ["train.py", "--config", "config.json", "--tune-model-path", str(base), "--adapter", str(adapter),
               "--set", "lora.dropout=0.1"]  # fmt: skip
    run(*command, cwd=tmp_path)
    shutil.rmtree(adapter)
    run(*command, "--set", "optimizer.total_steps=3", cwd=tmp_path)
    recorded = NativeSource(str(tmp_path / "run/step_3")).extra["config"]["lora"]
    assert (recorded["rank"], recorded["alpha"], recorded["dropout"]) == (4, 8, 0.1)


def test_other_formats_get_the_adapters(tuned: Path, peft: Path, base: Path, tmp_path: Path) -> None:
    """Beside the run, not beside the adapters."""
    expected = greedy("--ckpt", str(tuned / "run"), cwd=tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(base, copy)
    run("slim_model.py", "--ckpt", "copy", "--ckpt-step", "12", "--adapter", str(peft), "--f16", cwd=tmp_path)
    assert (tmp_path / "copy_slim_f16/step_12").is_dir()
    run("resharding_example.py", "--ckpt", "copy", "--adapter", str(peft), "--format", "native", "--out", "native",
        cwd=tmp_path)  # fmt: skip
    assert greedy("--ckpt", "native", cwd=tmp_path) == expected
    plain = greedy("--ckpt", str(base), cwd=tmp_path)
    assert greedy("--ckpt", "copy_slim_f16", "--set", "data.tokenizer=bytes", cwd=tmp_path) != plain


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--set", "lora.rank=2"], "has rank 4 at .*lora.rank=4 or more"),
        (["--set", "lora.rank=4", "--set", 'lora.targets=["q"]'], "which lora.targets leaves out"),
    ],
)
def test_a_run_that_cannot_begin_so(peft: Path, base: Path, tmp_path: Path, options: list[str], words: str) -> None:
    write_run(tmp_path)
    _, errors = run("train.py", "--config", "config.json", "--tune-model-path", str(base), "--adapter", str(peft),
                    *options, cwd=tmp_path, code=2)  # fmt: skip
    assert re.search(words, errors)
    assert "Traceback" not in errors
    assert not list((tmp_path / "run").glob("step_*"))


def test_a_resumed_run_is_as_one_without_a_stop(tuned: Path, base: Path, tmp_path: Path) -> None:
    """Bit for bit on the same mesh, and within rounding on another, where the targets are named one by one."""
    named = {**LORA, "targets": ["q", "v", "k_proj", "attention/o", "ff/in", "out"]}
    for name, mesh, devices, lora in (("same", {"tp": 2}, 2, LORA), ("other", {"fsdp": 2}, 2, named)):
        folder = tmp_path / name
        write_run(folder, optimizer=RATE, lora=lora, mesh=mesh)
        (folder / "run").mkdir()
        shutil.copytree(tuned / "run/step_5", folder / "run/step_5")
        run("train.py", "--config", "config.json", cwd=folder, devices=devices)
        resumed = {record["step"]: record["train/loss"] for record in metrics(folder / "run")}
        whole = {record["step"]: record.get("train/loss") for record in metrics(tuned / "run")}
        assert set(resumed) == set(range(6, 13))
        for step, loss in resumed.items():
            assert loss == whole[step] if name == "same" else loss == pytest.approx(whole[step], rel=1e-5)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({}, "of a run with lora.rank 4, and the config has null"),
        ({"rank": 2, "alpha": 8}, "of a run with lora.rank 4, and the config has 2"),
        ({"rank": 4}, "of a run with lora.alpha 8"),
        ({"rank": 4, "alpha": 8, "targets": ["q"]}, 'of a run with lora.targets ["all-linear"]'),
    ],
)
def test_other_adapters_are_refused_on_resume(tuned: Path, tmp_path: Path, lora: dict, message: str) -> None:
    write_run(tmp_path, optimizer=RATE, lora=lora)
    shutil.copytree(tuned / "run", tmp_path / "run")
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    _, errors = run("train.py", "--config", "config.json", "--set", "optimizer.total_steps=14", cwd=tmp_path, code=2)
    assert message in errors
    assert "Traceback" not in errors
    assert {*before} <= {path.name for path in (tmp_path / "run").iterdir()}


def test_full_steps_are_refused_with_adapters(base: Path, tmp_path: Path) -> None:
    write_run(tmp_path, lora=LORA, optimizer={"total_steps": 14})
    shutil.copytree(base, tmp_path / "run")
    _, errors = run("train.py", "--config", "config.json", "--tune-model-path", str(base), cwd=tmp_path, code=2)
    assert "of a run with lora.rank null, and the config has 4" in errors


def test_another_base_is_refused_on_resume(tuned: Path, base: Path, tmp_path: Path) -> None:
    """The same base at another place is found."""
    shutil.copytree(base, tmp_path / "base")
    write_run(tmp_path, optimizer={**RATE, "total_steps": 2}, lora=LORA)
    train = ("train.py", "--config", "config.json", "--tune-model-path")
    run(*train, "base", cwd=tmp_path)
    shutil.rmtree(tmp_path / "base")
    more = ("--set", "optimizer.total_steps=3")
    _, errors = run("train.py", "--config", "config.json", *more, cwd=tmp_path, code=2)
    assert "cannot be opened" in errors
    assert "--tune-model-path DIR says where it is" in errors
    other = str(base / "step_5")
    _, errors = run(*train, other, *more, cwd=tmp_path, code=2)
    assert re.search(r"a base of hash [0-9a-f]{16}, and \S+step_5 has [0-9a-f]{16}: restore that base", errors)
    assert "Traceback" not in errors
    run(*train, str(base), *more, cwd=tmp_path)
    assert metrics(tmp_path / "run")[-1]["step"] == 3
    # a reader only warns
    _, errors = run(
        "device_sample.py", "--ckpt", str(tuned / "run"), "--base", other, "--prompt", "1", "--max-new-tokens", "1",
        cwd=tmp_path,
    )  # fmt: skip
    assert "was trained on a base of hash" in errors


def test_the_config_of_a_run_opens_it(tuned: Path) -> None:
    assert greedy("--config", "config.json", "--set", "mesh.tp=1", cwd=tuned) == greedy("--ckpt", "run", cwd=tuned)


def test_a_base_is_needed(tmp_path: Path) -> None:
    write_run(tmp_path, lora=LORA)
    _, errors = run("train.py", "--config", "config.json", cwd=tmp_path, code=2)
    assert "lora.rank 4 adapts a trained model: give its checkpoint with --tune-model-path" in errors
    assert "compiling" not in errors


@pytest.mark.nightly
def test_adapters_of_adapters(tuned: Path, tmp_path: Path) -> None:
    """A run may start from the whole model of another run with adapters."""
    samples = {"sample_prompts": ["12 bottles of"], "sample_tokens": 8}
    write_run(tmp_path, optimizer={**RATE, "total_steps": 2}, lora={"rank": 2}, logging=samples)
    run("train.py", "--config", "config.json", "--tune-model-path", str(tuned / "run"), cwd=tmp_path)
    # the samples before the first step are of that model
    first, *_ = (json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines())
    assert first["samples"][0]["completion"] in greedy("--ckpt", str(tuned / "run"), cwd=tmp_path)
    first = next(record for record in metrics(tmp_path / "run") if "val/loss_held" in record)
    last = [record for record in metrics(tuned / "run") if "val/loss_held" in record][-1]
    assert first["val/loss_held"] == pytest.approx(last["val/loss_held"], rel=1e-5)
