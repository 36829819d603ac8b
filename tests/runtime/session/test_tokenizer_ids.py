"""A tokenizer with more IDs than the model is one warning; only a text with such an ID is refused."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from support.builders import TINY

from mesh_transformer.checkpoint.open import Checkpoint
from mesh_transformer.config import parse_config
from mesh_transformer.data.batches.loader import make_train_loader, make_val_loader
from mesh_transformer.data.tokens import tokenizer as tokenizers
from mesh_transformer.errors import UserError
from mesh_transformer.runtime import convert
from mesh_transformer.runtime.evaluation import command
from mesh_transformer.runtime.sampling.sampler import Sampler, SampleRequest
from mesh_transformer.runtime.serving.loop import EngineLoop
from mesh_transformer.runtime.serving.model import ServedModel
from mesh_transformer.runtime.serving.responses import ApiError
from mesh_transformer.runtime.session.session import Session
from mesh_transformer.runtime.session.tokenizer import open_tokenizer

WARNING = "the tokenizer has IDs up to 600, model.n_vocab is 512: a text with an ID above 511 is refused"


@pytest.fixture
def config(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Any:
    """A model with 512 tokens, and a tokenizer with IDs up to 600, some of them without a token."""
    tokenizers._warn_of_more_ids.cache_clear()
    special = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    vocabulary = {"<|endoftext|>": 0, "a": 1, "b": 511, "c": 512, "d": 600}
    content = {
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": "<|endoftext|>", **special}],
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        **dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")),
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    return parse_config({**TINY, "mesh": {"tp": 1}, "data": {"tokenizer": str(tmp_path)}})


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_sampling_serving_and_evaluation_warn(config: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The three commands open it so."""
    found = open_tokenizer(config, Checkpoint.open("no checkpoint"))
    assert found.encode("abd") == [1, 511, 600]
    assert found.decode([1, 599, 600, 601]) == "a d"
    (warned,) = warnings(caplog)
    assert warned.startswith(WARNING)


def test_a_training_run_warns_once(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("ab" * 100)
    options: dict[str, Any] = {"seq": 8, "batch": 2, "n_vocab": 512, "tokenizer": config.data.tokenizer}
    make_train_loader(str(tmp_path / "text.txt"), rows=[1], **options)
    assert not warnings(caplog), "the host with row 0 warns"
    make_train_loader(str(tmp_path / "text.txt"), rows=[0], **options)
    make_val_loader(str(tmp_path / "text.txt"), rows=[0], **options)
    (warned,) = warnings(caplog)
    assert warned.startswith(WARNING)
    (tmp_path / "other.txt").write_text("abd" * 100)
    with pytest.raises(UserError, match=r"other-.*: record 0 at byte 0 has the token 600, and model.n_vocab is 512"):
        make_train_loader(str(tmp_path / "other.txt"), rows=[0], **options)


def test_evaluation_during_training_warns(
    config: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class NoTasks:
        names = ("none",)

        def __init__(self, *_: Any, **__: Any): ...

        def requests(self) -> dict[str, Any]:
            return {}

    pytest.importorskip("lm_eval")
    monkeypatch.setattr(command, "Tasks", NoTasks)
    raw = config.model_dump(mode="json")
    raw["data"]["eval_harness_tasks"] = ["none"]
    raw["mesh"]["dp"] = 8
    command.RunEvaluation(Session.open(parse_config(raw)), lambda: False)
    (warned,) = warnings(caplog)
    assert warned.startswith(WARNING)


def test_an_export_warns_or_refuses_an_end_token_that_the_model_does_not_have(
    config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert convert._end_of_text(config.data.tokenizer, config.model) == 0
    (warned,) = warnings(caplog)
    assert warned.startswith(WARNING)
    path = Path(config.data.tokenizer) / "tokenizer.json"
    path.write_text(
        path.read_text().replace('"<|endoftext|>": 0', '"<|endoftext|>": 700').replace('"id": 0', '"id": 700')
    )
    with pytest.raises(UserError, match=r"ends a text with the token 700, but model\.n_vocab is 512"):
        convert._end_of_text(config.data.tokenizer, config.model)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("abcd", "the prompt has the token 512, but model.n_vocab is 512: set data.tokenizer to the model's"),
        ([1, 511, 513, -1], "the prompt has the token 513, but model.n_vocab is 512: give token IDs of 0 to 511"),
        ([1, -1, 513], "the prompt has the token -1, but model.n_vocab is 512: give token IDs of 0 to 511"),
    ],
)
def test_a_prompt_with_such_an_id_is_refused_with_it(config: Any, prompt: str | list[int], message: str) -> None:
    config = parse_config({**config.model_dump(mode="json"), "mesh": {"tp": 1, "dp": 8}})
    with pytest.raises(UserError) as refused:
        Sampler(config, SampleRequest(), Checkpoint.open("no checkpoint"), [prompt])
    assert str(refused.value) == message


def test_a_text_sent_to_the_server_is_refused_with_the_id(config: Any) -> None:
    tokenizer = open_tokenizer(config, Checkpoint.open("no checkpoint"))
    served = ServedModel("model", 512, tokenizer, EngineLoop(None, slots=1, max_queue=1), 1)  # type: ignore[arg-type]
    with pytest.raises(ApiError, match="prompt: there is no token 600; token IDs are 0 to 511"):
        asyncio.run(served.encode(["abd"], "prompt"))
    served.close()
