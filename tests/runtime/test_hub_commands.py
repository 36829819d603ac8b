"""Commands on models of the Hugging Face hub, and what a checkpoint keeps of the folder that it came from."""

import contextlib
import json
import os
import random
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support import commands, peft_folders
from support.hf_models import SEED, VARIANTS
from support.hub_server import TOKEN, HubServer

from mesh_transformer import hub, logs, platforms
from mesh_transformer.cluster.base import Job
from mesh_transformer.cluster.driver.compute_target import ComputeTarget
from mesh_transformer.errors import UserError
from mesh_transformer.runtime import cli

Run = Callable[..., str]
SPECIAL = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
# a tokenizer of characters
TOKENIZER = {
    "tokenizer.json": {
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": "<end>", **SPECIAL}],
        "model": {"type": "BPE", "vocab": {"<end>": 0} | {chr(97 + i): i + 1 for i in range(26)}, "merges": []},
        **dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")),
    },
    "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"},
}
# keys that this program does not use, in an order of their own
EXTRA = {"zz_version": "1", "_name_or_path": "x", "id2label": {"0": "a"}}


def new_model(name: str) -> Any:
    """A random model of a variant in hf_models.py."""
    import transformers

    family, keys = VARIANTS[name]
    kind = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    torch.manual_seed(SEED)
    model = getattr(transformers, kind)
    return model(model.config_class(**keys))


def save(
    folder: Path, name: str, dtype: torch.dtype, *, shard: str = "5GB", pickled: bool = False, tokenizer: bool = True
) -> Path:
    """A folder as transformers writes it, with a tokenizer and some more keys."""
    new_model(name).to(dtype).save_pretrained(folder, max_shard_size=shard)
    if pickled:
        torch.save(safetensors.torch.load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**EXTRA, **config}, indent=1))
    for name, content in TOKENIZER.items() if tokenizer else ():
        (folder / name).write_text(json.dumps(content))
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of all files, read by safetensors and torch."""
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= safetensors.torch.load_file(path)
    for path in folder.glob("*.bin"):
        found |= torch.load(path, weights_only=True)
    return found


def others(folder: Path) -> dict[str, bytes]:
    """The files without weights, and without the marker that Orbax writes into each folder."""
    unwanted = re.compile(r".*\.bin|model.*\.safetensors(\.index\.json)?|commit_success\.txt")
    return {path.name: path.read_bytes() for path in folder.iterdir() if not unwanted.fullmatch(path.name)}


def assert_equal_folders(found: Path, expected: Path) -> None:
    assert others(found) == others(expected)
    ours, theirs = tensors(found), tensors(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    # the test session keeps its own handlers and its own cache
    monkeypatch.setattr(logs, "set_up", lambda *_: None)
    monkeypatch.setattr(platforms, "CompileCache", contextlib.nullcontext)


@pytest.fixture
def run(repo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process, and returns its standard output."""

    def run_command(program: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        runpy.run_path(str(repo / f"{program}.py"))["main"]()
        return capsys.readouterr().out

    return run_command


DTYPES = (torch.float16, torch.bfloat16, torch.float32)
STORED = ({"shard": "200KB"}, {}, {"pickled": True}, {})


@pytest.mark.parametrize("number", range(len(VARIANTS)), ids=list(VARIANTS))
def test_an_export_equals_the_folder_that_it_came_from(
    run: Run, hub_server: HubServer, tmp_path: Path, number: int
) -> None:
    name, dtype, stored = list(VARIANTS)[number], DTYPES[number % 3], STORED[number % 4]
    folder = save(tmp_path / "hf", name, dtype, **stored)
    assert ("shard" in stored) == (len(list(folder.glob("*.safetensors"))) > 1)
    commit = hub_server.commit_folder("org/model", folder)
    run("from_hf_weights", "--input", f"hf://org/model@{commit}", "--output-path", "native")
    # one step folder has all that an export needs
    shutil.move("native/step_0", "moved")
    run("to_hf_weights", "--input-ckpt", "moved", "--output-path", "back")
    assert_equal_folders(tmp_path / "back", folder)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained("back", local_files_only=True, dtype="auto")
    assert loaded.dtype == dtype
    assert AutoTokenizer.from_pretrained("back", local_files_only=True).encode("abc") == [1, 2, 3]


def test_another_dtype_changes_only_the_key_of_the_dtype(run: Run, tmp_path: Path) -> None:
    save(tmp_path / "hf", "gptj", torch.float32)
    run("to_hf_weights", "--input-ckpt", "hf", "--output-path", "half", "--dtype", "bf16")
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "half"))
    assert before["dtype"] == "float32"
    assert list(after.items()) == list({**before, "dtype": "bfloat16"}.items())
    assert {tensor.dtype for tensor in tensors(tmp_path / "half").values()} == {torch.bfloat16}


def test_tensors_of_several_dtypes(run: Run, tmp_path: Path) -> None:
    folder = save(tmp_path / "hf", "gpt_neox", torch.bfloat16)
    stored = tensors(folder)
    for name in stored:
        if "layernorm" in name or "layer_norm" in name:
            stored[name] = stored[name].float() + 1e-5
    safetensors.torch.save_file(stored, folder / "model.safetensors", {"format": "pt"})
    run("from_hf_weights", "--input", "hf", "--output-path", "native")
    run("to_hf_weights", "--input-ckpt", "native", "--output-path", "back")
    assert_equal_folders(tmp_path / "back", folder)
    run("to_hf_weights", "--input-ckpt", "native", "--output-path", "half", "--dtype", "fp16")
    assert {tensor.dtype for tensor in tensors(tmp_path / "half").values()} == {torch.float16}
    assert json.loads((tmp_path / "half/config.json").read_text())["dtype"] == "float16"


def test_a_tied_folder_whose_head_is_apart(run: Run, tmp_path: Path) -> None:
    """The head of this family is a parameter of its own, so that the export must not say that it is tied."""
    from transformers import AutoModelForCausalLM

    model = new_model("gptj")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained("hf")
    run("from_hf_weights", "--input", "hf", "--output-path", "native")
    run("to_hf_weights", "--input-ckpt", "native", "--output-path", "back")
    assert json.loads((tmp_path / "back/config.json").read_text())["tie_word_embeddings"] is False
    back = AutoModelForCausalLM.from_pretrained("back", local_files_only=True)
    assert torch.equal(back.lm_head.weight, model.transformer.wte.weight)


def test_sampling_from_the_hub(run: Run, hub_server: HubServer, tmp_path: Path) -> None:
    hub_server.commit_folder("org/model", save(tmp_path / "hf", "gpt_neox", torch.float32), branch="v1")
    options = ["--max-new-tokens", "5", "--temperature", "0", "--json", "--set", "mesh.dp=8"]
    run("resharding_example", "--ckpt", "hf://org/model@v1", "--format", "native", "--out", "native")
    by_prompt, by_native, by_tokens = (
        json.loads(run("device_sample", "--ckpt", *source, *options)) | {"seconds": 0}
        for source in (
            ["hf://org/model@v1", "--prompt", "abc"],
            ["native", "--prompt", "abc"],
            ["hf", "--prompt-tokens", "1,2,3"],
        )
    )
    # a random model may choose the end token early
    assert len(by_prompt["tokens"]) == 5 or by_prompt["tokens"][-1] == 0
    assert by_native == by_prompt
    assert by_tokens == {**by_prompt, "prompt": None, "completion": None}


def test_adapters_from_the_hub(run: Run, hub_server: HubServer, tmp_path: Path) -> None:
    folder = save(tmp_path / "hf", "gpt_neox", torch.float32)
    base = hub_server.commit_folder("org/model", folder)
    peft_folders.write_adapters(folder, tmp_path / "adapter", name=f"hf://org/model@{base}")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/model", base)
    hub_server.commit_folder("org/adapter", tmp_path / "adapter")
    options = ["--prompt", "abc", "--max-new-tokens", "5", "--temperature", "0", "--json"]
    alone, given, local, plain = (
        json.loads(run("device_sample", *source, *options)) | {"seconds": 0}
        for source in (
            ["--ckpt", "hf://org/adapter"],
            ["--ckpt", "hf://org/model", "--adapter", "hf://org/adapter"],
            ["--ckpt", "hf", "--adapter", "adapter"],
            ["--ckpt", "hf"],
        )
    )
    assert alone == given == local
    assert given["tokens"] != plain["tokens"]


# of huggingface_hub's own call of httpx
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_adapters_and_whole_models_are_not_uploaded_to_one_repository(
    run: Run, hub_server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    folder = save(tmp_path / "hf", "gpt_neox", torch.float32)
    peft_folders.write_adapters(folder, tmp_path / "adapter")
    hub_server.commit_folder("org/model", folder)
    given = ["--input-ckpt", "hf", "--adapter", "adapter"]
    with pytest.raises(UserError, match="org/model holds a whole model"):
        run("to_hf_weights", *given, "--output-path", "out", "--push", "org/model")
    run("to_hf_weights", *given, "--output-path", "out", "--push", "org/new")
    assert set(hub_server.repos["org/new"].files()) == {"adapter_config.json", "adapter_model.safetensors"}
    with pytest.raises(UserError, match="org/new holds adapters"):
        run("to_hf_weights", *given, "--output-path", "merged", "--merge", "--push", "org/new")
    assert not Path("merged").exists()


def test_the_tokenizer_of_adapters_is_used(run: Run, tmp_path: Path) -> None:
    """In place of the base's; the merged model has it."""
    folder, adapter = save(tmp_path / "hf", "gpt_neox", torch.float32), tmp_path / "adapter"
    peft_folders.write_adapters(folder, adapter)
    model = {**TOKENIZER["tokenizer.json"]["model"], "vocab": {"<end>": 0} | {chr(122 - i): i + 1 for i in range(26)}}
    (adapter / "tokenizer.json").write_text(json.dumps({**TOKENIZER["tokenizer.json"], "model": model}))
    (adapter / "tokenizer_config.json").write_text(json.dumps(TOKENIZER["tokenizer_config.json"]))
    run("to_hf_weights", "--input-ckpt", "hf", "--adapter", "adapter", "--merge", "--output-path", "merged")
    options = ["--max-new-tokens", "5", "--temperature", "0", "--json"]
    by_adapter, by_merged, by_tokens = (
        json.loads(run("device_sample", *source, *options))["tokens"]
        for source in (
            ["--ckpt", "hf", "--adapter", "adapter", "--prompt", "zyx"],
            ["--ckpt", "merged", "--prompt", "zyx"],
            ["--ckpt", "hf", "--adapter", "adapter", "--prompt-tokens", "1,2,3"],
        )
    )
    assert by_adapter == by_merged == by_tokens


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("EleutherAI/pythia-70m", "hf://EleutherAI/pythia-70m"),
        ("EleutherAI/pythia-70m@step3000", "hf://EleutherAI/pythia-70m@step3000"),
        ("https://huggingface.co/EleutherAI/pythia-70m", "hf://EleutherAI/pythia-70m"),
        ("https://huggingface.co/EleutherAI/pythia-70m/tree/step3000/", "hf://EleutherAI/pythia-70m@step3000"),
        ("org/m-GGUF/m.Q4_K_M.gguf", "hf://org/m-GGUF/m.Q4_K_M.gguf"),
        ("https://huggingface.co/org/m/blob/main/a/m.gguf", "hf://org/m@main/a/m.gguf"),
        ("https://huggingface.co/org/m/resolve/v1/m.gguf?download=true", "hf://org/m@v1/m.gguf"),
        ("runs/m.gguf", "runs/m.gguf"),
        # a folder, or a path in a folder
        *(
            (path, path)
            for path in ("runs/mine", "runs/absent", "absent", "runs/mine/step_1", "/runs/mine", "./runs/b")
        ),
        *((path, path) for path in ("gs://bucket/run", "hf://org/model", "a/b/step_1", "https://example.com/a/b")),
    ],
)
def test_a_path_that_means_a_name_on_the_hub(tmp_path: Path, given: str, name: str) -> None:
    (tmp_path / "runs/mine").mkdir(parents=True)
    assert cli.checkpoint_path(given) == name


def test_a_name_without_its_prefix_is_read_from_the_hub(
    run: Run, hub_server: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub_server.commit_folder("org/model", save(tmp_path / "hf", "gpt_neox", torch.float32))
    run("from_hf_weights", "--input", "https://huggingface.co/org/model", "--output-path", "by_address")
    run("from_hf_weights", "--input", "org/model", "--output-path", "by_name")
    assert (tmp_path / "by_name/step_0/hf/config.json").exists()
    assert (tmp_path / "by_address/step_0/hf/config.json").exists()
    with pytest.raises(UserError, match="hf://runs/mine: no such repository"):
        run("from_hf_weights", "--input", "runs/mine", "--output-path", "other")
    said = f"no folder runs/mine in {tmp_path}: taken as hf://runs/mine, a model on the Hugging Face hub\n"
    assert capsys.readouterr().err.endswith(said)


def test_without_a_tokenizer(run: Run, tmp_path: Path) -> None:
    save(tmp_path / "hf", "gpt_neox", torch.float32, tokenizer=False)
    run("from_hf_weights", "--input", "hf", "--output-path", "native")
    options = ["--max-new-tokens", "2", "--set", "mesh.dp=8"]
    for checkpoint in ("hf", "native"):
        sample = json.loads(run("device_sample", "--ckpt", checkpoint, "--prompt-tokens", "1,2", "--json", *options))
        assert sample["completion"] is None
        assert len(sample["tokens"]) == 2 or sample["tokens"] == [0]
        for program, arguments in {
            "device_sample": ["--prompt", "a", *options],
            "device_serve": ["--port", "0"],
            "eval_harness": ["--tasks", "piqa"],
        }.items():
            with pytest.raises(UserError, match=r"no tokenizer files in this folder; .*--set data\.tokenizer=FOLDER"):
                run(program, "--ckpt", checkpoint, *arguments)


# of huggingface_hub's own call of httpx
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_upload(run: Run, hub_server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path / "hf", "gpt_neox", torch.bfloat16)
    to_hf = ["to_hf_weights", "--input-ckpt", "hf", "--output-path", "back"]
    for name, reason in {
        "org/new": "no token of the Hugging Face hub: run hf auth login, or set HF_TOKEN",
        "org/new@v1": "an upload goes to the main branch",
        "a/b/c": "expected hf://ORG/NAME",
    }.items():
        with pytest.raises(UserError, match=reason):
            run(*to_hf, "--push", name)
    with pytest.raises(UserError, match="give a local --output-path"):
        run(*to_hf[:-1], "gs://bucket/back", "--push", "org/new")
    assert not (tmp_path / "back").exists()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    run(*to_hf, "--push", "org/new")
    assert hub_server.repos["org/new"].private
    assert hub_server.repos["org/new"].files() == {
        path.name: path.read_bytes() for path in (tmp_path / "back").iterdir()
    }
    # the weights of an earlier upload go, and other files stay
    earlier = {"README.md": b"#", "model.safetensors.index.json": b"{}", "model-00001-of-00002.safetensors": b""}
    hub_server.commit("org/old", earlier, private=False)
    run(*to_hf, "--push", "hf://org/old", "--overwrite")
    assert not hub_server.repos["org/old"].private
    assert set(hub_server.repos["org/old"].files()) == {"README.md"} | {path.name for path in folder.iterdir()}


CONFIG = {
    "optimizer": {"lr": 1e-2, "warmup_steps": 1, "anneal_steps": 10, "total_steps": 3},
    "data": {"train_set": "text.txt", "batch_size": 8, "val_batches": 0, "seq": 16},
    "checkpoint": {"model_dir": "tuned", "ckpt_every": 1, "keep_latest": 2},
    "logging": {"tensorboard": False},
}


def test_fine_tuning_from_the_hub(run: Run, hub_server: HubServer, tmp_path: Path) -> None:
    """Model and tokenizer come from the hub, and afterwards from the run's own steps. An export is as at the start."""
    folder = save(tmp_path / "hf", "gpt_neox", torch.bfloat16)
    hub_server.commit_folder("org/model", folder)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 100)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    train = ["device_train", "--config", "config.json", "--tune-model-path", "hf://org/model"]
    run(*train)
    assert sorted(path.name for path in (tmp_path / "tuned").glob("step_*")) == ["step_2", "step_3"]
    assert others(tmp_path / "tuned/step_3/hf") == others(folder)
    # the run resumes without the hub
    shutil.rmtree(tmp_path / "tuned/step_3")
    hub_server.clear()
    hub.forget()
    run(*train)
    assert not hub_server.requests
    assert others(tmp_path / "tuned/step_3/hf") == others(folder)
    manifest = json.loads((tmp_path / "tuned/step_3/manifest/metadata").read_text())["body"]["extra"]
    assert manifest["config"]["model"]["family"] == "gpt_neox"
    assert manifest["config"]["data"]["tokenizer"] is None
    assert [record["step"] for record in commands.metrics(tmp_path / "tuned")] == [1, 2, 3, 3]

    # the config has no model and no tokenizer either
    sample = run(
        "device_sample", "--config", "config.json", "--prompt", "abc", "--max-new-tokens", "1", "--set", "mesh.dp=8"
    )
    assert sample.startswith("abc")
    run("to_hf_weights", "--input-ckpt", "tuned", "--output-path", "back")
    assert others(tmp_path / "back") == others(folder)
    before, after = tensors(folder), tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert not torch.equal(before["gpt_neox.embed_in.weight"], after["gpt_neox.embed_in.weight"])


def test_a_config_that_differs_from_the_checkpoint(run: Run, tmp_path: Path) -> None:
    save(tmp_path / "hf", "gptj", torch.float32)
    (tmp_path / "text.txt").write_text("abc " * 1000)
    for model, reason in {
        '{"family": "gptj", "layers": 3, "d_model": 48, "n_heads": 2, "n_vocab": 131}': (
            "model.n_heads: the config has 2"
        ),
        '{"layers": 3}': "required and not given: model.d_model",
    }.items():
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model": json.loads(model)}))
        with pytest.raises(UserError, match=reason):
            run("device_train", "--config", "config.json", "--tune-model-path", "hf")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(UserError, match="required and not given: model"):
        run("device_train", "--config", "config.json")
    with pytest.raises(UserError, match=r"config\.json: the group model is not given, and no checkpoint in nowhere"):
        run("device_train", "--config", "config.json", "--tune-model-path", "nowhere")
    with pytest.raises(UserError, match="model.layers: the config has 2, the checkpoint 3"):
        run("device_train", "--config", "config.json", "--tune-model-path", "hf", "--set", "model.layers=2")


def test_a_driver_names_the_commit_to_its_workers(
    run: Run, hub_server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub_server.commit_folder("org/model", save(tmp_path / "hf", "gpt_neox", torch.float32))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    jobs: list[Job] = []
    monkeypatch.setattr(ComputeTarget, "run", lambda _, job, config: jobs.append(job) or (0, None))
    pinned = f"hf://org/model@{commit}"
    run("train", "--config", "config.json", "--tune-model-path", "hf://org/model", "--processes", "2")
    assert jobs[0].arguments["tune_model_path"] == pinned
    assert jobs[0].config["model"]["layers"] == 3
    run("eval_harness", "--ckpt", "hf://org/model", "--tasks", "piqa", "--processes", "2")
    assert jobs[1].arguments["checkpoint"] == pinned
    # a driver needs no weights
    assert "model.safetensors" not in hub_server.downloads()


def test_slim_needs_a_folder(run: Run) -> None:
    with pytest.raises(UserError, match="hf://org/model is no folder beside which"):
        run("slim_model", "--ckpt", "hf://org/model")


def test_processes_of_one_host_share_a_download(hub_server: HubServer, tmp_path: Path, repo: Path) -> None:
    files = {"config.json": b"{}", "model.safetensors": random.Random(0).randbytes(1 << 20)}
    hub_server.commit("org/model", files)
    code = "from mesh_transformer import hub; print(hub.model_folder('hf://org/model'))"
    environment = {**os.environ, **hub_server.environment(tmp_path / "home"), "PYTHONPATH": str(repo)}
    started = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    folders = {process.communicate(timeout=60)[0].strip() for process in started}
    assert all(process.returncode == 0 for process in started)
    (folder,) = folders
    assert Path(folder, "model.safetensors").read_bytes() == files["model.safetensors"]
    assert hub_server.downloads().count("model.safetensors") == 1


def test_a_command_of_its_own(hub_server: HubServer, tmp_path: Path) -> None:
    """The library's variables, and errors as one line with exit code 2."""
    hub_server.commit_folder("org/model", save(tmp_path / "hf", "gptj", torch.float16), private=True)
    environment = hub_server.environment(tmp_path / "home")
    ask = [
        "device_sample.py",
        "--ckpt",
        "hf://org/model",
        "--prompt-tokens",
        "1",
        "--max-new-tokens",
        "1",
        "--seed",
        "0",
    ]
    _, errors = commands.run(*ask, cwd=tmp_path, code=2, **environment)
    importing, error = errors.splitlines()
    assert importing.endswith(" I importing JAX")
    assert error.startswith("error: hf://org/model: no such repository")
    output, errors = commands.run(*ask, cwd=tmp_path, HF_TOKEN=TOKEN, **environment)
    assert output.strip().isdigit()
    assert "weights that are not there yet are downloaded" in errors
    again, _ = commands.run(*ask, cwd=tmp_path, **{**environment, "HF_HUB_OFFLINE": "1"})
    assert again == output
