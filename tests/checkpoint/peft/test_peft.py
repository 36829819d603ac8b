"""Folders of PEFT against PEFT itself, in float32: what it wrote is read, and it loads what is written."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import hf_folders as hf
from support import hf_models

from mesh_transformer.checkpoint.open import Checkpoint
from mesh_transformer.checkpoint.peft.table import groups_of, sides
from mesh_transformer.checkpoint.peft.writer import write_peft
from mesh_transformer.families.experts import WithExperts

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
safetensors_torch = pytest.importorskip("safetensors.torch")

# of PEFT, about transformers
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # it uses them nevertheless
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning"),
]

# float32 on both sides, of logits up to about 6: 3.6e-7 was measured for small models
TOLERANCE = 2e-5
RANK, ALPHA = 3, 6
DAILY = ("llama2", "gpt2", "mixtral")


def random_adapter(model: Any, **settings: Any) -> Any:
    """The model with adapters of PEFT whose numbers are random."""
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, **settings))
    generator = torch.Generator().manual_seed(hf_models.SEED)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return adapted.eval()


def targets(folder: Path) -> dict[str, Any]:
    """Settings for adapters of every matrix of the layers that PEFT can name."""
    model = Checkpoint.open(str(folder)).model
    names, parameters = [], []
    # PEFT 0.21 takes dense and shared layers for the experts'
    leaves_out = isinstance(model, WithExperts) and model.family != "qwen2_moe"
    for group in groups_of(model):
        _, _, name = group.module(0).partition(".0.")
        name = name.replace("block_sparse_moe", "mlp")
        if group.of_experts:
            parameters.append(f"experts.{group.parameter}")
        elif group.members[0].path == "ff/router/w":
            parameters.append("mlp.gate.weight")
        elif not leaves_out or not name.endswith(("gate_proj", "up_proj", "down_proj")):
            names.append(name)
    fused = {"target_parameters": parameters} if parameters else {}
    return {"target_modules": names, "fan_in_fan_out": model.family == "gpt2", **fused}


def clear_prompt(model: Any, name: str) -> np.ndarray:
    random = np.random.default_rng(hf_models.SEED)
    with torch.no_grad():
        while True:
            prompt = random.integers(1, hf_models.VOCAB, (2, hf_models.PROMPT))
            if name not in hf_models.EXPERTS or hf_models.chooses_clearly(model, torch.tensor(prompt)):
                return prompt


def logits_of(model: Any, prompt: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(prompt)).logits.numpy()


def our_logits(checkpoint: Checkpoint, prompt: np.ndarray) -> np.ndarray:
    source = checkpoint.source(checkpoint.model)
    return hf.model_logits(checkpoint.model, hf.to_tree(hf.read_all(source)), prompt)


@pytest.mark.parametrize(
    "name", [name if name in DAILY else pytest.param(name, marks=pytest.mark.nightly) for name in hf_models.VARIANTS]
)
def test_logits_are_those_of_peft_in_both_directions(tmp_path: Path, name: str) -> None:
    import transformers

    base, theirs, ours = tmp_path / "base", tmp_path / "theirs", tmp_path / "ours"
    adapted = random_adapter(hf_models.save(name, base), **targets(base))
    prompt = clear_prompt(adapted, name)
    expected = logits_of(adapted, prompt)
    adapted.save_pretrained(theirs)
    opened = Checkpoint.open(str(theirs), base=str(base))
    np.testing.assert_allclose(our_logits(opened, prompt), expected, rtol=0, atol=TOLERANCE)

    source, record = opened.adapters(opened.model)
    write_peft(source, record, opened.model, str(ours), dtype=np.dtype(np.float32))
    model = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager", dtype=torch.float32)
    # the default implementation of experts refuses matrices of odd widths
    model.set_experts_implementation("eager")
    assert np.abs(logits_of(model, prompt) - expected).max() > 100 * TOLERANCE
    read = peft.PeftModel.from_pretrained(model, str(ours)).eval()
    np.testing.assert_allclose(logits_of(read, prompt), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["mixtral", pytest.param("olmoe", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("form", ["twice the rank", "each expert"])
def test_other_forms_of_experts(tmp_path: Path, name: str, form: str) -> None:
    """PEFT makes the first of the names of transformers 4, and reads the second, which transformers 4 wrote."""
    import transformers

    base, folder = tmp_path / "base", tmp_path / "adapter"
    hf_models.save(name, base)
    model = Checkpoint.open(str(base)).model
    names = list(model.HF_MATRICES.values())
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["q_proj", *names], task_type="CAUSAL_LM")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager", dtype=torch.float32)
    theirs.set_experts_implementation("eager")
    if form == "each expert":
        folder.mkdir()
        config.save_pretrained(folder)
        random = np.random.default_rng(hf_models.SEED)
        tensors = {}
        for group in groups_of(model):
            for member in group.members:
                inputs, outputs = sides(member, model)
                if not group.of_experts and not member.path.endswith("/q/w"):
                    continue
                for layer in range(model.layers):
                    for expert in range(model.n_experts if group.of_experts else 1):
                        module = member.row.foreign.format(layer, e=expert).removesuffix(".weight")
                        for factor, shape in {"A": (RANK, inputs), "B": (outputs, RANK)}.items():
                            key = f"base_model.model.{module}.lora_{factor}.weight"
                            tensors[key] = torch.tensor(0.2 * random.standard_normal(shape, np.float32))
        safetensors_torch.save_file(tensors, folder / "adapter_model.safetensors")
        adapted = peft.PeftModel.from_pretrained(theirs, str(folder)).eval()
    else:
        adapted = peft.get_peft_model(theirs, config)
        with torch.no_grad():
            for key, parameter in adapted.named_parameters():
                if "lora_B" in key:
                    parameter.copy_(0.05 * torch.randn(parameter.shape))
        adapted.eval().save_pretrained(folder)
        assert json.loads((folder / "adapter_config.json").read_text())["rank_pattern"]
    prompt = clear_prompt(adapted, name)
    expected = logits_of(adapted, prompt)
    found = our_logits(Checkpoint.open(str(folder), base=str(base)), prompt)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


SETTINGS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"q_proj": 5, r"1\.mlp\.up_proj": 2}, "alpha_pattern": {".*2.self_attn.v_proj": 9}},
    "some layers": {"layers_to_transform": [0, 2]},
    "everything": {"target_modules": "all-linear"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_ranks_scales_and_layers(tmp_path: Path, name: str) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    modules = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    adapted = random_adapter(hf_models.save("llama2", base), **{"target_modules": modules, **SETTINGS[name]})
    adapted.save_pretrained(folder)
    prompt = clear_prompt(adapted, "llama2")
    found = our_logits(Checkpoint.open(str(folder), base=str(base)), prompt)
    np.testing.assert_allclose(found, logits_of(adapted, prompt), rtol=0, atol=TOLERANCE)


def test_a_router_with_an_alpha_of_its_own(tmp_path: Path) -> None:
    """PEFT adapts it as a parameter, whose name the pattern has. What we write has it too."""
    base, folder, again = tmp_path / "base", tmp_path / "adapter", tmp_path / "again"
    settings = {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]}
    alphas = {"mlp.gate.weight": 4 * ALPHA, "gate": 9 * ALPHA}
    adapted = random_adapter(hf_models.save("mixtral", base), **settings, alpha_pattern=alphas)
    adapted.save_pretrained(folder)
    prompt = clear_prompt(adapted, "mixtral")
    opened = Checkpoint.open(str(folder), base=str(base))
    found = our_logits(opened, prompt)
    np.testing.assert_allclose(found, logits_of(adapted, prompt), rtol=0, atol=TOLERANCE)
    source, record = opened.adapters(opened.model)
    write_peft(source, record, opened.model, str(again), dtype=np.dtype(np.float32))
    np.testing.assert_array_equal(our_logits(Checkpoint.open(str(again), base=str(base)), prompt), found)


@pytest.mark.parametrize("name", ["mixtral", pytest.param("olmoe", marks=pytest.mark.nightly)])
def test_the_pair_of_a_router(tmp_path: Path, name: str) -> None:
    """all-linear has it in every model with experts."""
    base, folder = tmp_path / "base", tmp_path / "adapter"
    adapted = random_adapter(hf_models.save(name, base), target_modules="all-linear")
    adapted.save_pretrained(folder)
    assert any(".mlp.gate.lora_A" in key for key in safetensors_torch.load_file(folder / "adapter_model.safetensors"))
    prompt = clear_prompt(adapted, name)
    found = our_logits(Checkpoint.open(str(folder), base=str(base)), prompt)
    np.testing.assert_allclose(found, logits_of(adapted, prompt), rtol=0, atol=TOLERANCE)
