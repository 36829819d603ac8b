"""logging.sample_prompts: the samples of a run are those of its checkpoints, on any mesh, and change nothing else."""

import json
import logging
import os
import shutil
import signal
import sys
from pathlib import Path

import jax
import pytest
from support import hf_folders as hf
from support.chat_templates import chat_folder
from support.commands import free_port, metrics, write_run
from support.covering import covering
from support.evaluated import session_of
from support.events import read_events
from support.together import outputs_of

from mesh_transformer.config import load_config, parse_config
from mesh_transformer.data.tokens.byte_tokenizer import ByteTokenizer
from mesh_transformer.data.tokens.tokenizer import load_tokenizer
from mesh_transformer.errors import UserError
from mesh_transformer.logs import Progress
from mesh_transformer.runtime.sampling.sampler import SampleRequest, sample_prompts
from mesh_transformer.runtime.training import samples, trainer
from mesh_transformer.runtime.training.observer import Observer
from mesh_transformer.runtime.training.report import Goodput, MetricsReporter, StepWork
from mesh_transformer.runtime.training.start import TuningSource

PROMPTS = ["7 bottles", "1"]
LOGGING = {"sample_prompts": PROMPTS, "sample_tokens": 12, "sample_every": 4, "tensorboard": True}
GROUPS = {
    "model": {"layers": 1, "d_model": 16, "n_heads": 2, "seq": 24, "pe_rotary_dims": 4},
    "optimizer": {"total_steps": 10, "gradient_accumulation_steps": 1},
    "data": {"val_every": 5},
    "checkpoint": {"ckpt_every": 4, "keep_every": 4},
}
CHAT = [{"role": "user", "content": "Hello"}]


def train(folder, *overrides, code=0, observer=None, tuned=None):
    config = load_config("config.json", [f"checkpoint.model_dir={folder}", *overrides])
    assert trainer.train(config, TuningSource(tuned), observer).code == code
    return folder


def records(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of ten steps with samples, and the same run without."""
    made = tmp_path_factory.mktemp("samples")
    write_run(made, **GROUPS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        train(made / "plain")
        write_run(made, **GROUPS, logging=LOGGING)
        train(made / "run")
    return made


def test_training_and_validation_are_the_same_to_the_last_bit(folder):
    for sampled_run, plain in zip(metrics(folder / "run"), metrics(folder / "plain"), strict=True):
        found = sampled_run.keys() - plain.keys()
        assert found == ({samples.SECONDS} if sampled_run["step"] in (4, 8, 10) else set())
        for name in ("train/loss", "train/grad_norm", "val/loss_held", "val/accuracy_held"):
            assert sampled_run.get(name) == plain.get(name), name


def test_samples_are_those_of_the_checkpoints(folder, monkeypatch):
    """Every sample_every steps, and after the last step."""
    monkeypatch.chdir(folder)
    found = records(folder / "run")
    assert [record["step"] for record in found] == [4, 8, 10]
    assert found[0]["samples"] != found[1]["samples"] != found[2]["samples"]
    request = SampleRequest(max_new_tokens=12, temperature=0)
    for record in found:
        checkpoint = str(folder / f"run/step_{record['step']}")
        of_checkpoint = sample_prompts(load_config("config.json"), request, checkpoint, PROMPTS)
        assert record["samples"] == [
            {"prompt": sample.prompt, "completion": sample.completion} for (sample,) in of_checkpoint
        ]


def test_tensorboard_has_the_texts(folder):
    found = [
        (event.step, value.tag, value.tensor.string_val[0].decode())
        for event in read_events(folder / "run/tensorboard")
        for value in event.summary.value
        if value.metadata.plugin_data.plugin_name == "text"
    ]
    assert found == [
        (record["step"], f"samples/{number}/text_summary", f"    {sample['prompt']}{sample['completion']}")
        for record in records(folder / "run")
        for number, sample in enumerate(record["samples"], 1)
    ]


def test_steps_that_are_repeated_report_their_samples_once(folder, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(folder)
    caplog.set_level(logging.INFO, "mesh_transformer")
    run = tmp_path / "run"
    shutil.copytree(folder / "run", run)
    written = (run / "samples.jsonl").read_text()
    for step in (8, 10):
        shutil.rmtree(run / f"step_{step}")
    # a kill leaves half a record
    (run / "samples.jsonl").write_text(written + '{"step": 12, "sam')
    train(run)
    assert (run / "samples.jsonl").read_text() == written
    assert metrics(run)[-1]["train/steps_redone"] == 6
    assert [line for line in caplog.messages if ": sample " in line] == []
    (costs,) = (line for line in caplog.messages if line.startswith("sampling 2 prompts took "))
    assert "memory on each device: parameters " in costs


class Stop(Observer):
    """Sends a SIGTERM before the samples of step 4."""

    def phase(self, name, step):
        if (name, step) == ("validate", 4):
            signal.raise_signal(signal.SIGTERM)


def test_a_run_that_is_stopped_begins_with_the_samples(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    run = train(tmp_path / "run", code=128 + signal.SIGTERM, observer=Stop())
    assert not (run / "samples.jsonl").exists()
    train(run)
    assert records(run) == records(folder / "run")
    # the resumed run completes the record of step 4
    losses = {record["step"]: record["train/loss"] for record in metrics(run)}
    assert losses == {record["step"]: record["train/loss"] for record in metrics(folder / "run")}


def test_a_fine_tuning_begins_with_the_samples_of_its_source(folder, tmp_path, monkeypatch):
    """A temperature draws what device_sample.py --seed 0 draws."""
    monkeypatch.chdir(folder)
    found = records(train(tmp_path / "run", "logging.sample_temperature=1.0", tuned="run"))
    assert [record["step"] for record in found] == [0, 4, 8, 10]
    request = SampleRequest(max_new_tokens=12, temperature=1.0, seed=0)
    of_source = sample_prompts(load_config("config.json"), request, "run", PROMPTS)
    assert [sample["completion"] for sample in found[0]["samples"]] == [sample.completion for (sample,) in of_source]


def config_of(**values):
    return parse_config(
        {"model": {"layers": 1, "d_model": 8, "n_heads": 1, "n_vocab": 257, "seq": 24}, "logging": values}
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sample_prompts": [CHAT]}, "the tokenizer has no chat template: give a text"),
        (
            {"sample_prompts": ["1", "a" * 13], "sample_tokens": 12},
            r"prompt 2 of logging.sample_prompts has 13 tokens.*shorten it to 12",
        ),
        ({"sample_prompts": ["1"]}, "logging.sample_tokens 64 leaves no room .* less than model.seq 24"),
    ],
)
def test_prompts_that_do_not_fit_are_told_before_anything_is_compiled(values, message, tmp_path, monkeypatch, caplog):
    write_run(tmp_path, **GROUPS, logging=values)
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, "mesh_transformer")
    with pytest.raises(UserError, match=message):
        train(tmp_path / "run")
    assert not [line for line in caplog.messages if line.startswith("compiling")]


def test_a_token_that_the_model_does_not_have():
    config = parse_config({"model": {"layers": 1, "d_model": 8, "n_heads": 1, "n_vocab": 100, "seq": 24}})
    prompts = samples.encode_prompts(["~"], ByteTokenizer())
    with pytest.raises(UserError, match=r"has the token 126, but model.n_vocab is 100: set data.tokenizer"):
        samples.check_prompts(prompts, config.model_copy(update={"logging": config_of(sample_tokens=4).logging}))


@pytest.mark.parametrize("prompts", ["Hello", ["Hello"], [CHAT, "Hello"]])
def test_prompts_of_a_config(prompts):
    expected = ("Hello",) if isinstance(prompts, str) else tuple(prompts)
    config = config_of(sample_prompts=prompts)
    assert config.logging.sample_prompts == expected
    assert parse_config(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    "prompts", [7, {}, [""], ["a", 7], [[]], [[{"role": "user"}]], [{"role": "user", "content": "a"}]]
)
def test_other_prompts_are_refused(prompts):
    with pytest.raises(UserError, match=r"logging.sample_prompts = .*: expected a.*\"role\": \"user\""):
        config_of(sample_prompts=prompts)


def test_messages_are_a_prompt_by_the_chat_template(tmp_path):
    """The tokens of transformers, whose template writes the special tokens."""
    import transformers

    chat_folder(tmp_path)
    (prompt,) = samples.encode_prompts([CHAT], load_tokenizer(str(tmp_path)))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert prompt.text == theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert prompt.tokens == theirs(prompt.text, add_special_tokens=False)["input_ids"]


MESHES = {
    "dp2_pp2_tp2": ["mesh.dp=2", "mesh.pp=2", "mesh.tp=2"],
    "fsdp4_pp2_interleaved": [
        "mesh.fsdp=4",
        "mesh.pp=2",
        "mesh.schedule=interleaved",
        "optimizer.gradient_accumulation_steps=2",
    ],
    "dp2_cp4": ["mesh.dp=2", "mesh.cp=4"],
}
MODEL = {"layers": 4, "d_model": 64, "n_heads": 8, "n_vocab": 257, "seq": 64, "pe_rotary_dims": 4}


def found_on(folder: Path, *overrides: str, devices: int = 1) -> list[samples.PromptSample] | None:
    """The samples of a model with random parameters, placed as in training."""
    logged = ['logging.sample_prompts=["1 bottle", "7", "99 bottles of beer"]', "logging.sample_tokens=24"]
    model = hf.model_config(**MODEL)
    session = session_of(model, *logged, "data.tokenizer=bytes", *overrides, devices=devices)
    params = jax.tree.map(
        lambda whole, sharding: jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index]),
        hf.random_params(model), session.placement.shardings,
    )  # fmt: skip
    progress = Progress("training", 1, unit="step", quiet=True)
    report = MetricsReporter([], progress, StepWork(1, 1.0, None), Goodput(0.0, 0, 0), 0, stop=True)
    report.reopen(1, {})
    folder.mkdir(exist_ok=True)
    made = samples.PromptSamples(session, lambda: False)
    # the second time with the compiled programs
    for step in (1, 2):
        assert made.run(params, step, str(folder), report)
    if jax.process_index() == 0:
        assert samples.newest(str(folder), 1) == samples.newest(str(folder), 2)
    return samples.newest(str(folder), 2)


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory):
    return found_on(tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("mesh", covering(MESHES, daily=([list(MESHES)[-1]],)))
def test_a_mesh_gives_the_samples_of_one_device(on_one_device, mesh, tmp_path):
    assert found_on(tmp_path, *MESHES[mesh], devices=8) == on_one_device


PROGRAM = """
import os, sys
from pathlib import Path
from support.xla import cpu_flags
os.environ["XLA_FLAGS"] = cpu_flags(2)
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
process = int(sys.argv[3])
jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, process)
import test_prompt_samples as tests

tests.found_on(Path(sys.argv[1], str(process)), "mesh.dp=2", "mesh.pp=2", devices=4)
"""


@pytest.mark.nightly
@pytest.mark.multiprocess
def test_two_processes_give_the_samples_of_one_device(on_one_device, tmp_path: Path):
    """Process 0 alone writes them."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(free_port())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    outputs_of([[*command, str(n)] for n in range(2)], timeout_s=240, environments=[environment] * 2)
    assert samples.newest(str(tmp_path / "0"), 2) == on_one_device
    assert list((tmp_path / "1").iterdir()) == []
