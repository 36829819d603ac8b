"""A random model with a tokenizer and a chat template, loaded once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import hf_models
from support.chat_templates import chat_folder

import mesh_transformer
from mesh_transformer import Model

LLAMA = {**hf_models.BASE, **hf_models.rope(), "vocab_size": 259, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: Llama with the tokenizer of `chat_folder`, whose start token is 0."""
    path = chat_folder(tmp_path_factory.mktemp("api") / "llama")
    hf_models.save_model("Llama", LLAMA, path)
    # transformers has written its own
    (path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    return path


@pytest.fixture(scope="module")
def model(model_folder: Path) -> Iterator[Model]:
    """The model on all devices, with two slots."""
    with mesh_transformer.load(model_folder, slots=2) as loaded:
        yield loaded
