"""Each family against transformers: logits, greedy tokens with a cache, one device and four, and the export."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support import hf_folders as hf
from support import hf_models
from support.builders import program
from support.covering import covering

from mesh_transformer.checkpoint.hf.source import HFSource, open_tensors
from mesh_transformer.checkpoint.hf.writer import write_hf
from mesh_transformer.checkpoint.load import load
from mesh_transformer.families import ALIASES, FAMILIES
from mesh_transformer.parallel.sharding import use

# float32 on both sides; logits are up to about 6, and the two programs differ by some 2e-6
TOLERANCE = 2e-5
# tokens of the prompt in one call; the prompt is three of them and one token more
CHUNK = 20
MESHES = {"one": (1, []), "tp2-fsdp2": (4, ["mesh.tp=2", "mesh.fsdp=2"])}
WITH_EXPERTS = {"tp2-ep2": (4, ["mesh.tp=2", "mesh.ep=2"])}
# its heads have 128 dims
LLAMA_3_1 = hf_models.rope(
    "llama3", 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)


RUNS = [
    *covering(hf_models.VARIANTS, MESHES),
    *covering(hf_models.EXPERTS, WITH_EXPERTS, daily=(["mixtral", "qwen2_moe", "deepseek_v3"], WITH_EXPERTS)),
]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, hf_models.Theirs] = {}

    def get(name: str) -> hf_models.Theirs:
        if name not in made:
            made[name] = hf_models.make(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


# a class of transformers for each alias; for kimi_k2 its code on the hub is DeepSeek-V3's
OF_ALIASES = {
    "gpt-sw3": ("GPT2", hf_models.VARIANTS["gpt2"][1]),
    "internlm3": ("Llama", {**hf_models.BASE, **hf_models.rope("dynamic", factor=6.0), "num_key_value_heads": 2,
                                "head_dim": 14, "attention_bias": True, "mlp_bias": True}),
    "kimi_k2": hf_models.VARIANTS["deepseek_v3"],
    "ministral": ("Ministral", {**hf_models.BASE, **hf_models.rope(), "num_key_value_heads": 2, "head_dim": 14,
                                "sliding_window": 9}),
}  # fmt: skip


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_is_read_as_its_family(tmp_path: Path, alias: str) -> None:
    hf_models.save_model(*OF_ALIASES[alias], tmp_path)
    prompt = np.random.default_rng(hf_models.SEED).integers(1, hf_models.VOCAB, (1, 40))
    logits = hf.transformers_logits(tmp_path, prompt)
    path, theirs = tmp_path / "config.json", {ours: name for name, ours in ALIASES[alias].keys.items()}
    keys = {theirs.get(name, name): value for name, value in json.loads(path.read_text()).items()}
    path.write_text(json.dumps({**keys, "model_type": alias}))
    if alias != "kimi_k2":
        # transformers reads the other name too
        np.testing.assert_array_equal(hf.transformers_logits(tmp_path, prompt), logits)
    source = HFSource(str(tmp_path))
    assert ALIASES[alias].family == FAMILIES[source.model.family].HF_MODEL_TYPE
    found = hf.model_logits(source.model, hf.to_tree(hf.read_all(source)), prompt)
    np.testing.assert_allclose(found, logits, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("name", "mesh"), RUNS)
def test_logits_and_greedy_tokens_are_theirs(theirs, name, mesh) -> None:
    expected = theirs(name)
    prompt, new = expected.prompt.astype(np.int32), expected.tokens.shape[1]
    source, (devices, axes) = HFSource(str(expected.folder)), (MESHES | WITH_EXPERTS)[mesh]
    run = program({"model": source.model.model_dump()}, *axes, devices=devices)
    model, length = run.placement.model, prompt.shape[1] + new
    params = load(source, {"params": run.placement.abstract(np.float32)})["params"]

    @jax.jit
    def step(params: Any, tokens: Any, cache: Any, start: Any) -> tuple[Any, Any]:
        logits, view = model.apply(params, tokens, cache.view(None, length), start)
        return logits, view.cache

    with use(run.placement.partition):
        logits, _ = jax.jit(model.apply)(params, prompt)
        np.testing.assert_allclose(logits[..., : hf_models.VOCAB], expected.logits, rtol=0, atol=TOLERANCE)
        # layers with a window keep the positions of a ring, which the prompt fills more than once
        cache, found = model.new_cache(2, length, longest_chunk=CHUNK), []
        for start in range(0, prompt.shape[1], CHUNK):
            logits, cache = step(params, prompt[:, start : start + CHUNK], cache, np.full(2, start, np.int32))
            chunk = expected.logits[:, start : start + CHUNK]
            np.testing.assert_allclose(logits[..., : hf_models.VOCAB], chunk, rtol=0, atol=TOLERANCE)
        for position in range(prompt.shape[1], length):
            found.append(np.asarray(logits[:, -1].argmax(-1)))
            logits, cache = step(params, found[-1][:, None], cache, np.full(2, position, np.int32))
    np.testing.assert_array_equal(np.stack(found, 1), expected.tokens)


def test_logits_of_a_long_sequence_are_theirs(tmp_path: Path) -> None:
    """A frequency that is one ulp off shows at a late position: logits were 1e-4 off with numpy's power."""
    import torch

    sizes = {"hidden_size": 128, "num_attention_heads": 1, "num_hidden_layers": 2, "max_position_embeddings": 131072}
    model = hf_models.save_model("Llama", {**hf_models.BASE, **LLAMA_3_1, **sizes}, tmp_path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # random heads attend to all positions alike; these look at some
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(1.5)
        prompt = np.random.default_rng(hf_models.SEED).integers(1, hf_models.VOCAB, (1, 4096))
        expected = model(torch.tensor(prompt)).logits.numpy()
    model.save_pretrained(tmp_path)
    source = HFSource(str(tmp_path))
    found = hf.model_logits(source.model, hf.to_tree(hf.read_all(source)), prompt)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", hf_models.VARIANTS)
def test_the_export_is_their_folder(theirs, name, tmp_path: Path) -> None:
    expected = theirs(name)
    source = HFSource(str(expected.folder))
    write_hf(source, source.model, str(tmp_path))
    ours, stored = open_tensors(str(tmp_path)), open_tensors(str(expected.folder))
    assert ours.keys() == stored.keys()
    for tensor_name, tensor in stored.items():
        whole = tuple(slice(None) for _ in tensor.shape)
        np.testing.assert_array_equal(ours[tensor_name].read(whole), tensor.read(whole), err_msg=tensor_name)
    found = hf.transformers_logits(tmp_path, expected.prompt)
    # with experts, torch's products of a few rows differ by 6e-7 between two models of the same numbers
    np.testing.assert_allclose(found, expected.logits, rtol=0, atol=TOLERANCE if name in hf_models.EXPERTS else 0)


@pytest.mark.parametrize("name", ["gpt_neox", "gpt2"])
def test_slices_of_a_fused_matrix_are_those_of_the_whole(theirs, name) -> None:
    source = HFSource(str(theirs(name).folder))
    for tensor_name, array in hf.read_all(source).items():
        if "attention" in tensor_name:
            index = tuple(slice(n // 3, n - n // 4) for n in array.shape)
            np.testing.assert_array_equal(source.read(tensor_name, index), array[index], err_msg=tensor_name)


@pytest.mark.parametrize("name", ["gpt2", "llama3_tied"])
def test_a_file_of_the_model_without_its_head_is_read(theirs, name, tmp_path: Path) -> None:
    """gpt2's file on the hub has such names."""
    from transformers import AutoModelForCausalLM

    folder = theirs(name).folder
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    model.base_model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    found, expected = (hf.read_all(HFSource(str(path))) for path in (tmp_path, folder))
    assert found.keys() == expected.keys()
    for tensor_name, array in expected.items():
        np.testing.assert_array_equal(found[tensor_name], array, err_msg=tensor_name)
