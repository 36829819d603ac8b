"""GPT-NeoX against transformers: logits, greedy tokens with a cache, one device and four, and the export."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from support import hf_folders as hf
from support.builders import program

from mesh_transformer.checkpoint.hf.source import HFSource, open_tensors
from mesh_transformer.checkpoint.hf.writer import write_hf
from mesh_transformer.checkpoint.load import load
from mesh_transformer.parallel.sharding import use

# float32 on both sides; logits are up to about 6, and the two programs differ by some 2e-6
TOLERANCE = 2e-5
NEW = 8
VARIANTS: dict[str, dict[str, Any]] = {
    # 0.45 x 14 dims is 6.3: 6 are rotated
    "parallel": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.45}},
    "sequential": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
        "use_parallel_residual": False,
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-3,
    },
    "tied": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.6},
        "attention_bias": False,
        "tie_word_embeddings": True,
    },
}


class Theirs(NamedTuple):
    """A folder of transformers, and what its model answers."""

    folder: Path
    prompt: np.ndarray
    logits: np.ndarray
    tokens: np.ndarray  # greedy ones after the prompt


@pytest.fixture(scope="module", params=VARIANTS)
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    import torch
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 84, "num_attention_heads": 6, "intermediate_size": 118, "num_hidden_layers": 3}
    config = GPTNeoXConfig(
        **sizes,
        vocab_size=307,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",  # as `hf.transformers_logits` has it
        **VARIANTS[request.param],
    )
    model = GPTNeoXForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # else norms are 1 and biases 0, and one left out would not be seen
            parameter.add_(0.06 * torch.randn(parameter.shape))
    folder = tmp_path_factory.mktemp("neox")
    model.save_pretrained(folder)
    prompt = np.random.default_rng(3).integers(1, 307, (2, 21))
    with torch.no_grad():
        logits = model(torch.tensor(prompt)).logits.numpy()
        whole = model.generate(
            torch.tensor(prompt), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return Theirs(folder, prompt, logits, whole[:, prompt.shape[1] :].numpy())


@pytest.mark.parametrize("mesh", [["mesh.tp=1"], ["mesh.tp=2", "mesh.fsdp=2"]], ids="-".join)
def test_logits_and_greedy_tokens_are_theirs(theirs, mesh) -> None:
    source = HFSource(str(theirs.folder))
    run = program({"model": source.model.model_dump()}, *mesh, devices=1 if len(mesh) == 1 else 4)
    model = run.placement.model
    params = load(source, {"params": run.placement.abstract(np.float32)})["params"]
    with use(run.placement.partition):
        logits, _ = jax.jit(model.apply)(params, theirs.prompt)
        np.testing.assert_allclose(logits[..., :307], theirs.logits, rtol=0, atol=TOLERANCE)

        length = theirs.prompt.shape[1] + NEW

        @jax.jit
        def step(params: Any, tokens: Any, cache: Any, start: Any) -> tuple[Any, Any]:
            logits, view = model.apply(params, tokens, cache.view(None, length), start)
            return logits, view.cache

        cache, found = model.new_cache(2, length), []
        logits, cache = step(params, theirs.prompt, cache, np.zeros(2, np.int32))
        np.testing.assert_allclose(logits[..., :307], theirs.logits, rtol=0, atol=TOLERANCE)
        for position in range(theirs.prompt.shape[1], length):
            found.append(np.asarray(logits[:, -1].argmax(-1)))
            logits, cache = step(params, found[-1][:, None], cache, np.full(2, position, np.int32))
    np.testing.assert_array_equal(np.stack(found, 1), theirs.tokens)


def test_the_export_is_their_folder(theirs, tmp_path) -> None:
    source = HFSource(str(theirs.folder))
    write_hf(source, source.model, str(tmp_path))
    ours, expected = open_tensors(str(tmp_path)), open_tensors(str(theirs.folder))
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        whole = tuple(slice(None) for _ in tensor.shape)
        np.testing.assert_array_equal(ours[name].read(whole), tensor.read(whole), err_msg=name)
    np.testing.assert_array_equal(hf.transformers_logits(tmp_path, theirs.prompt), theirs.logits)


def test_slices_of_a_fused_matrix_are_those_of_the_whole(theirs) -> None:
    source = HFSource(str(theirs.folder))
    for name, array in hf.read_all(source).items():
        if "attention" in name:
            index = tuple(slice(n // 3, n - n // 4) for n in array.shape)
            np.testing.assert_array_equal(source.read(name, index), array[index], err_msg=name)
