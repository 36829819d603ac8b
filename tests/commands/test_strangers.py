"""Models of strangers, by the command as a user types it: greedy tokens as in transformers, or one line."""

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from support import hf_models

from mesh_transformer import logs, platforms
from mesh_transformer.commands import main
from mesh_transformer.runtime import cli

PROMPT = [5, 1, 9, 30]
LLAMA = {**hf_models.BASE, **hf_models.rope(), "num_hidden_layers": 1, "tie_word_embeddings": True}
NEW_FAMILIES = ("seed_oss", "exaone4", "cohere2", "arcee", "hunyuan_v1_dense")


@pytest.fixture
def sample(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs `mesh-transformer sample`. Returns its exit code, output and errors."""
    monkeypatch.setattr(platforms, "CompileCache", contextlib.nullcontext)
    monkeypatch.setattr(logs, "set_up", lambda *_: None)

    def command(folder: Path, *arguments: str) -> tuple[int, str, str]:
        prompt = ",".join(map(str, PROMPT))
        given = ["sample", "--ckpt", str(folder), "--prompt-tokens", prompt, "--json", "--set", "mesh.dp=8"]
        monkeypatch.setattr(sys, "argv", ["mesh-transformer", *given, "--max-new-tokens", "6", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.run(main)
        output = capsys.readouterr()
        return int(ended.value.code or 0), output.out, output.err

    return command


def greedy(folder: Path) -> list[int]:
    """The greedy tokens of transformers after the prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="eager")
    # the default implementation of experts refuses matrices of odd widths
    model.set_experts_implementation("eager")
    with torch.no_grad():
        answer = model.generate(
            torch.tensor([PROMPT]), max_new_tokens=6, do_sample=False, repetition_penalty=1.0, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
    tokens: list[int] = answer[0, len(PROMPT) :].tolist()
    return tokens


@pytest.mark.parametrize("case", ["unsloth_fixed", "attn_implementation", "generation_defaults"])
def test_cases_that_are_read(shared: Path, sample: Any, case: str) -> None:
    folder = shared / "cases/world" / case
    code, output, _ = sample(folder, "--temperature", "0", "--repetition-penalty", "1")
    assert (code, json.loads(output)["tokens"]) == (0, greedy(folder))


@pytest.mark.parametrize(
    ("case", "words"), [("orig_mod_prefix", "_orig_mod."), ("reward_model", "sequence classification")]
)
def test_cases_that_are_refused_in_one_line(shared: Path, sample: Any, case: str, words: str) -> None:
    code, output, errors = sample(shared / "cases/world" / case)
    assert (code, output) == (2, "")
    (line,) = errors.splitlines()
    assert words in line


@pytest.mark.parametrize("name", NEW_FAMILIES)
def test_new_families(tmp_path: Path, sample: Any, name: str) -> None:
    hf_models.save(name, tmp_path)
    code, output, _ = sample(tmp_path, "--temperature", "0")
    assert (code, json.loads(output)["tokens"]) == (0, greedy(tmp_path))


@pytest.mark.parametrize("form", ["head alone", "both in float64", "fused experts"])
def test_forms_of_weights(tmp_path: Path, sample: Any, form: str) -> None:
    if form == "fused experts":
        hf_models.save("mixtral", tmp_path).save_pretrained(tmp_path, save_original_format=False)
    else:
        hf_models.save_model("Llama", LLAMA, tmp_path)
        path = tmp_path / "model.safetensors"
        tensors = safetensors.numpy.load_file(path)
        table = tensors["model.embed_tokens.weight"]
        if form == "head alone":
            tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
        else:
            # not a float32 number: both tensors are rounded in the same way
            tensors["model.embed_tokens.weight"] = tensors["lm_head.weight"] = table.astype(np.float64) + 2.0**-40
        safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
    code, output, _ = sample(tmp_path, "--temperature", "0")
    assert (code, json.loads(output)["tokens"]) == (0, greedy(tmp_path))
