"""A tiny model with GPT-2's vocabulary, as our EvalModel and as the harness's `hf` model."""

import json
from pathlib import Path
from typing import Any

import pytest
from support import hf_folders as hf
from support.evaluated import gpt2_model, ours, theirs

from mesh_transformer.data.tokens.tokenizer import Tokenizer, load_tokenizer
from mesh_transformer.runtime.evaluation.model import EvalModel

pytest.importorskip("lm_eval")


@pytest.fixture(scope="session")
def tokenizer(texts: Path) -> Tokenizer:
    return load_tokenizer(str(texts / "gpt2_tokenizer"))


@pytest.fixture(scope="session")
def our_model(tokenizer: Tokenizer) -> EvalModel:
    model = gpt2_model()
    return ours(model, hf.random_params(model), tokenizer)


@pytest.fixture(scope="session")
def their_lm(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("torch")
    pytest.importorskip("accelerate")
    model = gpt2_model()
    folder = tmp_path_factory.mktemp("hf") / "model"
    return theirs(model, hf.random_params(model), texts / "gpt2_tokenizer", folder)


TASKS = {
    "rolled": """
task: rolled
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: byte_perplexity}}, {{metric: bits_per_byte}}]
""",
    "written": """
task: written
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "the"
generation_kwargs: {{until: ["e", ".\\n"], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match}}]
""",
    "bare": """
task: bare
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: ""
doc_to_target: "{{{{text.split()[0]}}}}"
metric_list: [{{metric: acc}}, {{metric: perplexity}}]
""",
}


@pytest.fixture(scope="session")
def task_files(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of task files: a rolling task, a generation task and a task without contexts."""
    folder = tmp_path_factory.mktemp("tasks")
    text = (repo / "data/tiny_shakespeare/train.txt").read_text()[:20_000]
    pieces = [text[start : start + 40 * (1 + i % 15)] for i, start in enumerate(range(0, len(text), 600))]
    data = folder / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    for name, source in TASKS.items():
        (folder / f"{name}.yaml").write_text(source.format(file=data))
    return folder


@pytest.fixture(autouse=True)
def data_sets_here(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Download nothing, and keep no converted data."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
