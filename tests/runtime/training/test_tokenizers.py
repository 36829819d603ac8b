"""A fine-tuning warns when its data has a tokenizer other than the model's."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.chat_templates import chat_folder

from mesh_transformer.config import parse_config
from mesh_transformer.data.records.tfrecords import write_records
from mesh_transformer.data.tokens.tokenizer import load_tokenizer
from mesh_transformer.runtime.training.tokenizers import warn_of_other_tokens

MODEL = {"layers": 1, "d_model": 16, "n_heads": 2, "n_vocab": 50400}


@pytest.fixture
def warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    """The warnings for a training set, a tokenizer of the config and one of the model."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("To be, or not to be.")

    def warned(train_set: str, tokenizer: str | None, of_model: str | None) -> list[str]:
        caplog.clear()
        data = parse_config({"model": MODEL, "data": {"train_set": train_set, "tokenizer": tokenizer}}).data
        checkpoint: Any = SimpleNamespace(tokenizer=SimpleNamespace(spec=of_model))
        warn_of_other_tokens(data, checkpoint)
        return caplog.messages

    return warned


def prepared(folder: str, **manifest: Any) -> None:
    Path(folder).mkdir()
    write_records(f"{folder}/train_0.tfrecords", [np.array([1, 2, 3])])
    Path(folder, "train.index").write_text("train_0.tfrecords\n")
    Path(folder, "manifest.json").write_text(json.dumps(manifest))


def test_the_tokenizer_of_a_text(warnings: Any, texts: Path) -> None:
    gpt2 = str(texts / "gpt2_tokenizer")
    (message,) = warnings("text.txt", "bytes", gpt2)
    assert "tokens of bytes, and the model was trained on those of " + gpt2 in message
    assert "'The capital of Norway is Oslo.' begins with [84, 104, 101, 32, 99, 97] in the former" in message
    assert message.endswith("--set data.tokenizer=null takes the model's tokenizer")
    assert warnings("text.txt", gpt2, gpt2) == []
    assert warnings("text.txt", None, gpt2) == []
    # not known, or not here
    assert warnings("text.txt", "bytes", None) == []
    assert warnings("text.txt", "bytes", "nowhere") == []


def test_other_files_with_the_same_ids_are_the_same_tokenizer(warnings: Any, tmp_path: Path) -> None:
    first, second = (str(chat_folder(tmp_path / name)) for name in ("a", "b"))
    config = Path(second, "tokenizer_config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_max_length": 77}))
    assert load_tokenizer(first).fingerprint != load_tokenizer(second).fingerprint
    assert warnings("text.txt", first, second) == []


@pytest.mark.parametrize("train_set", ["set", "set/train.index"])
def test_the_tokenizer_of_records(warnings: Any, texts: Path, train_set: str) -> None:
    gpt2 = str(texts / "gpt2_tokenizer")
    prepared("set", options={"tokenizer": "bytes"}, tokenizer_sha256="bytes")
    (message,) = warnings(train_set, None, gpt2)
    assert message.endswith(f"prepare {train_set} again, with --tokenizer {gpt2}")
    # records stay what they are
    (message,) = warnings(train_set, "bytes", gpt2)
    assert message.endswith(f"make the records again, with --tokenizer {gpt2}")
    fingerprint = load_tokenizer(gpt2).fingerprint
    prepared("same", options={"tokenizer": "gone"}, tokenizer_sha256=fingerprint)
    assert warnings(train_set.replace("set", "same"), None, gpt2) == []


def test_a_manifest_of_another_program_ends_no_run(warnings: Any, texts: Path) -> None:
    prepared("set")
    for text in ("[]", "{", '{"options": [], "tokenizer_sha256": 3}'):
        Path("set/manifest.json").write_text(text)
        assert warnings("set", None, str(texts / "gpt2_tokenizer")) == []
