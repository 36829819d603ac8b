"""The sampling options of generation_config.json: in both commands, in requests, and after tuning."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.fake_engine import RecordingEngine
from support.hf_folders import model_config, save_transformers_model
from support.served import serve

import device_sample
from mesh_transformer import logs, platforms
from mesh_transformer.checkpoint.open import Checkpoint
from mesh_transformer.errors import UserError
from mesh_transformer.infer.requests import SamplingParams
from mesh_transformer.runtime import cli, convert
from mesh_transformer.runtime.sampling import sampler
from mesh_transformer.runtime.session.generation_defaults import generation_defaults

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 257,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
PROPOSED = {
    "eos_token_id": 256, "do_sample": False, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05,
    "max_length": 4096, "min_p": 0.3,
}  # fmt: skip
DEFAULTS = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05}


def hf_folder(path: Path, generation_config: Any = PROPOSED) -> Path:
    """A Hugging Face folder whose weights nobody reads."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "model.safetensors").touch()
    if generation_config is not None:
        text = generation_config if isinstance(generation_config, str) else json.dumps(generation_config)
        (path / "generation_config.json").write_text(text)
    return path


@pytest.fixture
def sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command. Returns the options of its sample."""
    hf_folder(tmp_path / "hf")
    monkeypatch.setattr(platforms, "CompileCache", contextlib.nullcontext)
    monkeypatch.setattr(logs, "set_up", lambda *_: None)
    monkeypatch.setattr(
        sampler, "open_engine", lambda config, source, slots, context: RecordingEngine(slots=slots, vocab=257)
    )

    def command(*arguments: str) -> dict[str, Any]:
        RecordingEngine.recorded.clear()
        given = ["--ckpt", str(tmp_path / "hf"), "--set", "mesh.dp=8", "--prompt-tokens", "97,98", "--json"]
        monkeypatch.setattr(sys, "argv", ["device_sample.py", *given, "--max-new-tokens", "2", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.run(device_sample.main)
        assert not ended.value.code
        return RecordingEngine.recorded[0].options

    return command


def test_a_sample_has_the_options_of_the_file(sampled: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert sampled() == {**SamplingParams().options, **DEFAULTS}
    assert "defaults of generation_config.json: temperature 0.6, top_p 0.9, top_k 20, repetition_penalty 1.05" in (
        caplog.text
    )


def test_a_given_option_wins_also_with_the_value_of_this_program(sampled: Any) -> None:
    given = sampled("--temperature", "1", "--top-k", "0")
    assert given == {**SamplingParams().options, **DEFAULTS, "temperature": 1.0, "top_k": 0}


@pytest.mark.parametrize("word", ["none", "vllm"])
def test_no_file_is_read_if_the_command_says_so(sampled: Any, word: str) -> None:
    assert sampled("--generation-config", word) == SamplingParams().options


def test_requests_have_the_defaults_unless_they_name_the_option() -> None:
    with serve(defaults=DEFAULTS) as server:
        recorded: list[SamplingParams] = []
        insert = server.engine.insert

        def recording(slot: int, prompt: Any, params: SamplingParams, **how: Any) -> None:
            recorded.append(params)
            insert(slot, prompt, params, **how)

        server.engine.insert = recording
        server.complete("a", max_tokens=1)
        server.complete("a", max_tokens=1, temperature=1, top_p=None)
        server.post({"context": "a", "top_p": 1, "temp": 1, "length": 1}, "/complete")
        # llama.cpp's name of an option may repeat its default too
        server.complete("a", max_tokens=1, repeat_penalty=DEFAULTS["repetition_penalty"])
    named, other, classic, _ = (params.options for params in recorded)
    assert named == {**SamplingParams().options, **DEFAULTS}
    assert other == {**named, "temperature": 1}
    assert classic == {**SamplingParams().options, "temperature": 1, "top_p": 1}


def test_a_step_that_was_tuned_from_the_model_keeps_the_file(tmp_path: Path) -> None:
    """A native step has the files of the folder that it came from, and the export writes them."""
    save_transformers_model(tmp_path / "hf", model_config())
    (tmp_path / "hf/generation_config.json").write_text(json.dumps(PROPOSED))
    convert.from_hf(str(tmp_path / "hf"), str(tmp_path / "run"), format="native")
    assert generation_defaults(Checkpoint.open(str(tmp_path / "run")), "auto") == DEFAULTS
    convert.to_hf(None, [], str(tmp_path / "run"), str(tmp_path / "exported"))
    assert generation_defaults(Checkpoint.open(str(tmp_path / "exported")), "auto") == DEFAULTS


def test_a_folder_without_the_file_has_no_defaults(tmp_path: Path) -> None:
    assert generation_defaults(Checkpoint.open(str(hf_folder(tmp_path / "hf", None))), "auto") == {}
    neutral = hf_folder(tmp_path / "neutral", {"temperature": 1.0, "top_p": None, "top_k": -1})
    assert generation_defaults(Checkpoint.open(str(neutral)), "auto") == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"temperature": -1}, "generation_config.json: temperature must be 0"),
        ({"top_p": "0.9"}, "generation_config.json: top_p must be a number; got '0.9'"),
        ({"top_k": 2.5}, "generation_config.json: top_k must be a whole number; got 2.5"),
        ('{"top_k": 1e400}', "generation_config.json: top_k must be a whole number; got inf"),
        ({"repetition_penalty": True}, "generation_config.json: repetition_penalty must be a number; got true"),
        ([1], "generation_config.json"),
    ],
)
def test_a_value_that_is_not_allowed_is_one_line(tmp_path: Path, content: Any, message: str) -> None:
    folder = Checkpoint.open(str(hf_folder(tmp_path / "hf", content)))
    with pytest.raises(UserError) as refused:
        generation_defaults(folder, "auto")
    assert message in str(refused.value)
    assert generation_defaults(folder, "none") == {}
