"""A trained model against what transformers computes with it: SmolLM2-135M-Instruct in a GGUF file."""

import hashlib
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from support import hf_folders as hf
from support import loopback
from support.builders import program
from support.commands import run, run_python, start
from support.evaluated import HarnessRequest, ours
from support.processes import PATHS, wait_for_health

from mesh_transformer.checkpoint.load import load
from mesh_transformer.checkpoint.open import Checkpoint
from mesh_transformer.data.tokens.tokenizer import load_tokenizer
from mesh_transformer.infer.scoring.packing import Query
from mesh_transformer.runtime import convert
from mesh_transformer.runtime.evaluation.model import EvalModel

pytestmark = pytest.mark.real

# nats per request, and of a sum over a paragraph: float32 with another order of sums
TOLERANCE = 1e-4
# the flags of most tests compile sooner, and compute this model at half its speed
OPTIMISED = {"XLA_FLAGS": ""}
# in no row of golden/real/questions.jsonl
HELD_OUT = (
    "What is the capital of Norway?",
    "What do bees make?",
    "What is frozen water called?",
)
DTYPES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}


# first: it takes the most memory, and nothing else is loaded yet
def test_two_steps_of_tuning(checkpoint: Checkpoint, values: Any) -> None:
    expected, model = values["tuning"], checkpoint.model
    assert model is not None
    batch = np.array(expected["records"], np.int32)
    optimizer = {
        "lr": expected["learning_rate"], "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0,
        "clip_norm": 1e9, "z_loss": 0.0, "total_steps": 2,
    }  # fmt: skip
    data = {"batch_size": batch.shape[0], "seq": batch.shape[1] - 1}
    made = program({"model": model.model_dump(), "optimizer": optimizer, "data": data})
    params = load(checkpoint.source(model), {"params": made.placement.abstract(np.float32)})["params"]
    state, losses = made.begin(params, made.fresh_optimizer(params), {}), []
    for _ in range(2):
        state, metrics = made.train_step(state, batch[None])
        losses.append(float(jax.device_get(metrics["train/loss"])))
    np.testing.assert_allclose(losses, expected["losses"], rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def exported(real_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that to-hf writes."""
    folder = tmp_path_factory.mktemp("real") / "hf"
    convert.to_hf(None, [], str(real_file), str(folder))
    return folder


def test_tensors_are_those_of_transformers(exported: Path, values: Any) -> None:
    tensors = safetensors.numpy.load_file(exported / "model.safetensors")
    found = {name: hashlib.sha256(tensor.tobytes()).hexdigest()[:16] for name, tensor in tensors.items()}
    assert found == values["tensors"]


def test_round_trips_are_exact(exported: Path, tmp_path: Path) -> None:
    """Hugging Face to native and back, and each shorter dtype."""
    convert.from_hf(str(exported), str(tmp_path / "native"), format="native")
    expected = safetensors.numpy.load_file(exported / "model.safetensors")
    for name, dtype in [("fp32", np.float32), *DTYPES.items()]:
        convert.to_hf(None, [], str(tmp_path / "native"), str(tmp_path / name), dtype=name)
        found = safetensors.numpy.load_file(tmp_path / name / "model.safetensors")
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert found[key].tobytes() == tensor.astype(dtype).tobytes(), (name, key)
    for file in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "fp32" / file).read_bytes() == (exported / file).read_bytes()


def test_tokens(real_file: Path, values: Any) -> None:
    tokenizer = load_tokenizer(str(real_file))
    for row in values["greedy"]:
        assert tokenizer.encode(row["prompt"]) == row["ids"]
    for row in values["paragraphs"]:
        assert len(tokenizer.encode(row["text"])) == row["tokens"]
    assert [tokenizer.token_name(token) for token in tokenizer.end_tokens] == ["<|endoftext|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def evaluated(checkpoint: Checkpoint, real_file: Path) -> EvalModel:
    """The model that evaluate computes with."""
    pytest.importorskip("lm_eval")
    assert checkpoint.model is not None
    parameters = hf.to_tree(hf.read_all(checkpoint.source(checkpoint.model)))
    return ours(checkpoint.model.model_copy(update={"seq": 256}), parameters, load_tokenizer(str(real_file)))


def test_perplexity_of_paragraphs(evaluated: EvalModel, values: Any) -> None:
    rows = values["paragraphs"]
    tokens = [evaluated.tokenizer.encode(row["text"]) for row in rows]
    scores = evaluated.log_likelihoods([Query(ids[:1], ids[1:]) for ids in tokens])
    for ids, (score, _), row in zip(tokens, scores, rows, strict=True):
        assert -score / (len(ids) - 1) == pytest.approx(row["nll"] / (len(ids) - 1), abs=TOLERANCE)


def test_log_likelihoods_of_questions(evaluated: EvalModel, values: Any) -> None:
    from mesh_transformer.runtime.evaluation.adaptor import HarnessLM

    requests = [HarnessRequest((context, continuation)) for context, continuation, _ in values["evaluation"]]
    scores = [score for score, _ in HarnessLM(evaluated).loglikelihood(requests)]
    np.testing.assert_allclose(scores, [score for *_, score in values["evaluation"]], rtol=1e-6, atol=TOLERANCE)


@pytest.fixture(scope="module")
def url(real_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of the file, when it is ready."""
    options = ["--port", "0", "--slots", "1", "--set", "model.seq=128"]
    folder = tmp_path_factory.mktemp("server")
    child = start("device_serve.py", "--ckpt", str(real_file), *options, cwd=folder, fresh=True, **PATHS)
    try:
        assert child.stderr is not None
        lines = iter(child.stderr.readline, "")
        address = next(match[1] for line in lines if (match := re.search(r"listening on (http://\S+) ", line)))
        wait_for_health(address)
        yield address
    finally:
        child.send_signal(signal.SIGTERM)
        child.communicate()


def reused(url: str) -> float:
    """The tokens of prompts that the cache had."""
    counted = re.search(
        r"^mesh_transformer_reused_prompt_tokens_total (\S+)", loopback.get(f"{url}/metrics").text, re.M
    )
    assert counted is not None
    return float(counted[1])


def test_a_chat_of_two_turns(real_file: Path, url: str, values: Any) -> None:
    """Whole and in a stream; the second turn takes the first one's tokens from the cache, and few programs are made."""
    assert loopback.get(f"{url}/health").json()["programs"] == 2
    assert loopback.get(f"{url}/v1/models").json()["data"][0]["id"] == real_file.stem
    for turn, row in enumerate(values["chat"]):
        before = reused(url)
        body = {"messages": row["messages"], "max_tokens": 12, "temperature": 0}
        answer = loopback.post(f"{url}/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"] == row["answer"]
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["prompt_tokens"] == row["prompt_tokens"]
        assert (reused(url) - before > 20) == (turn > 0)
        with loopback.stream("POST", f"{url}/v1/chat/completions", json={**body, "stream": True}) as stream:
            events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
        parts = [event["choices"][0]["delta"].get("content") or "" for event in events]
        assert "".join(parts) == row["answer"]


def test_greedy_tokens(url: str, values: Any) -> None:
    for row in values["greedy"]:
        body = {"prompt": row["prompt"], "max_tokens": 12, "temperature": 0, "return_token_ids": True}
        (choice,) = loopback.post(f"{url}/v1/completions", json=body).json()["choices"]
        assert choice["token_ids"] == row["tokens"]


TUNE_AND_ASK = """
import dataclasses, json, sys
from mesh_transformer import fit
run = fit(json.loads(sys.argv[1]), tune_from=sys.argv[2])
with run.load(context=128, slots=1) as model:
    answers = [model.chat(each, temperature=0, max_tokens=24) for each in sys.argv[3:]]
print(json.dumps([dataclasses.asdict(answer) for answer in answers]))
"""


@pytest.mark.nightly
def test_a_chain_from_questions_to_another_style(real_file: Path, url: str, repo: Path, tmp_path: Path) -> None:
    """docs/first_chat.md with six steps: questions that are in no row have answers of the rows' form."""
    questions = str(repo / "tests/golden/real/questions.jsonl")
    made = ["--instructions", "--tokenizer", str(real_file), "--seq", "64", "--val", "0", "--output", "rows"]
    run("prepare_dataset.py", "--input", questions, *made, "--workers", "1", cwd=tmp_path, fresh=True)
    for question in HELD_OUT:
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 4, "temperature": 0}
        (choice,) = loopback.post(f"{url}/v1/chat/completions", json=body).json()["choices"]
        assert "Log" not in choice["message"]["content"]
    config = {
        "optimizer": {
            "lr": 3e-4, "end_lr": 1e-4, "warmup_steps": 1, "anneal_steps": 5, "total_steps": 6, "z_loss": 0,
        },
        "data": {"train_set": "rows", "seq": 64, "batch_size": 4, "shuffle": True, "val_batches": 0},
        "checkpoint": {"model_dir": "run"},
        "logging": {"tensorboard": False, "plot": False},
    }  # fmt: skip
    output, _ = run_python(TUNE_AND_ASK, json.dumps(config), str(real_file), *HELD_OUT, cwd=tmp_path, **OPTIMISED)
    for answer in json.loads(output):
        assert answer["text"].startswith("Log: ")
        assert answer["text"].endswith(" Over.")
        assert answer["finish_reason"] == "stop"
