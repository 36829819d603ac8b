"""The model of a chat that writes given answers."""

from typing import Any

import pytest
from support import fake_engine
from support.chat_templates import chat_folder

from mesh_transformer.data.tokens.tokenizer import Tokenizer, load_tokenizer
from mesh_transformer.infer.requests import Token


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(str(chat_folder(tmp_path_factory.mktemp("chat"))))


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, chat_tokenizer: Tokenizer) -> list[str]:
    """The model's answers. It writes the one with the number of messages in the prompt, then its end token."""
    texts = ["no message", "Four.\nYes <b>four</b>.", "no answer", "The second answer."]

    encoded: dict[str, list[int]] = {}

    def draw(tokens: Any, generated: int, params: Any, vocab: int) -> Any:
        asked = texts[list(tokens).count(1) - 1]
        if asked not in encoded:
            encoded[asked] = [*chat_tokenizer.encode(asked), 2]
        ids = encoded[asked]
        end = "length" if generated + 1 == params.max_tokens else None
        return Token(ids[generated], -0.1), "stop" if generated + 1 == len(ids) else end

    monkeypatch.setattr(fake_engine, "draw", draw)
    return texts
