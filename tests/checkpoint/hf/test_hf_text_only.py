"""A folder of Gemma 3 with its vision tower: the text model alone."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import hf_folders as hf
from support.hf_models import VARIANTS

from mesh_transformer.checkpoint.hf.config import read_model
from mesh_transformer.checkpoint.hf.source import HFSource
from mesh_transformer.checkpoint.hf.writer import write_hf
from mesh_transformer.checkpoint.open import Checkpoint
from mesh_transformer.errors import UserError
from mesh_transformer.runtime.convert import from_hf

TOLERANCE = 2e-5
VISION = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
TOKENS = {"image_token_index": 300, "boi_token_index": 301, "eoi_token_index": 302, "mm_tokens_per_image": 4}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder, its model, and a prompt without images."""
    import torch
    import transformers

    torch.manual_seed(3)
    # transformers does not cap the logits of this class
    text = {**VARIANTS["gemma3"][1], "final_logit_softcapping": None}
    config = transformers.Gemma3Config(text_config=text, vision_config=VISION, **TOKENS)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    folder = tmp_path_factory.mktemp("gemma3")
    model.save_pretrained(folder)
    prompt = np.random.default_rng(4).integers(1, 299, (2, 40))
    with torch.no_grad():
        logits = model(torch.tensor(prompt)).logits.numpy()
    return folder, prompt, logits


def test_the_text_model_is_read(theirs: Any, caplog: pytest.LogCaptureFixture) -> None:
    folder, prompt, logits = theirs
    with caplog.at_level(logging.INFO):
        source = HFSource(str(folder), text_only=True)
    assert "left out: 2 of multi_modal_projector, " in caplog.text
    assert " of vision_tower" in caplog.text
    assert source.model.family == "gemma3"
    found = hf.model_logits(source.model, hf.to_tree(hf.read_all(source)), prompt)
    np.testing.assert_allclose(found, logits, rtol=0, atol=TOLERANCE)


def test_a_conversion_is_exported_as_a_text_model(theirs: Any, tmp_path: Path) -> None:
    folder, prompt, logits = theirs
    from_hf(str(folder), str(tmp_path / "native"), format="native", text_only=True)
    step = Checkpoint.open(str(tmp_path / "native/step_0"))
    model = read_model(str(folder), text_only=True)
    source = step.source(model)
    write_hf(source, model, str(tmp_path / "hf"), origin=step.origin(source))
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("gemma3_text", ["Gemma3ForCausalLM"])
    found = hf.transformers_logits(tmp_path / "hf", prompt)
    np.testing.assert_allclose(found, logits, rtol=0, atol=TOLERANCE)


def test_other_readers_refuse_the_folder(theirs: Any) -> None:
    with pytest.raises(UserError, match=r"'gemma3': this is the text model gemma3_text beside a vision tower.*--text-"):
        read_model(str(theirs[0]))


def test_the_text_model_of_mistral3_is_read(tmp_path: Path) -> None:
    """Its head is not tied."""
    import torch
    import transformers

    torch.manual_seed(5)
    text = {**VARIANTS["mistral"][1], "model_type": "mistral"}
    config = transformers.Mistral3Config(
        text_config=text, vision_config={**VISION, "model_type": "pixtral", "head_dim": 8}, image_token_index=300
    )
    model = transformers.Mistral3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    prompt = np.random.default_rng(4).integers(1, 299, (2, 40))
    with torch.no_grad():
        logits = model(torch.tensor(prompt)).logits.numpy()
    with pytest.raises(
        UserError, match=r"'mistral3': this is the text model mistral beside a vision tower.*--text-only"
    ):
        read_model(str(tmp_path))
    source = HFSource(str(tmp_path), text_only=True)
    found = hf.model_logits(source.model, hf.to_tree(hf.read_all(source)), prompt)
    np.testing.assert_allclose(found, logits, rtol=0, atol=TOLERANCE)


def test_a_text_model_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    config = {"model_type": "llama4", "text_config": {"model_type": "llama4_text"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UserError, match="a text model of the type 'llama4_text' beside others, and .* near it are .*llama"
    ):
        read_model(str(tmp_path))


def test_a_folder_of_one_model_needs_no_request(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match=r"config.json has no text_config: .* without --text-only"):
        read_model(str(tmp_path), text_only=True)
