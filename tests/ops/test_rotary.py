"""The frequencies of rotary encoding against transformers', for the bases, heads and scalings of published models; and
both forms of the rotation."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh_transformer.families import llama
from mesh_transformer.families.hf_keys import ConfigJson
from mesh_transformer.ops.positions import frequencies, rotate_by_product, rotate_by_slices


class Published(NamedTuple):
    """The rotary keys of some models' config.json: rotated dims of a head, base, scaling."""

    models: str
    dims: tuple[int, ...]
    base: float
    scaling: dict[str, Any] = {}
    # torch's vectorized power rounds some numbers wrongly; its scalar one (ATEN_CPU_CAPABILITY=default) gives ours
    most_pairs: int = 2


def _linear(factor: float) -> dict[str, Any]:
    return {"rope_type": "linear", "factor": factor}


def _llama3(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _yarn(factor: float, original_seq: int, **more: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original_seq, **more}


PUBLISHED = [
    Published("Pythia 14M to 12B, GPT-NeoX-20B", (8, 16, 20, 24, 32), 1e4),
    Published("Llama 1 and 2, Mistral v0.1, TinyLlama, OLMoE, Gemma 1 and 2", (64, 128, 256), 1e4),
    Published("Vicuna 16k, LongChat", (128,), 1e4, _linear(4.0)),
    Published("LongChat 32k", (128,), 1e4, _linear(8.0)),
    Published("DeepSeek-Coder 6.7B and 33B", (128,), 1e5, _linear(4.0)),
    Published("SmolLM 1 and 2, 135M and 360M", (64,), 1e5),
    Published("SmolLM2 1.7B", (64,), 1.3e5),
    Published("Llama 3", (128,), 5e5),
    Published("Llama 3.1", (128,), 5e5, _llama3(8.0)),
    Published("Llama 3.2 1B and 3B", (64, 128), 5e5, _llama3(32.0)),
    Published("CodeLlama, Mistral v0.2 and v0.3, NeMo, Mixtral, Qwen2, Qwen3", (64, 128), 1e6),
    Published("Qwen2.5 and Qwen3, stretched as their cards say", (128,), 1e6, _yarn(4.0, 32768)),
    Published("Yi 34B, Yi 1.5, Qwen3 of July 2025", (128,), 5e6),
    Published("Qwen3-Coder", (128,), 1e7),
    Published("Qwen3-Coder, stretched as its card says", (128,), 1e7, _yarn(4.0, 262144)),
    Published("Ministral 8B, Mistral Small 24B", (128,), 1e8, most_pairs=3),
    Published("Yarn-Llama-2 64k", (128,), 1e4, _yarn(16.0, 4096)),
    Published("Yarn-Llama-2 128k", (128,), 1e4, _yarn(32.0, 4096)),
    Published("DeepSeek-V2, V3", (64,), 1e4,
              _yarn(40.0, 4096, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0)),
]  # fmt: skip
CASES = [(one, dims) for one in PUBLISHED for dims in one.dims]


def theirs(published: Published, dims: int) -> np.ndarray:
    """The inverse frequencies of transformers, float32 (dims / 2,)."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_type": "default", "rope_theta": published.base, **published.scaling}
    config = LlamaConfig(
        hidden_size=dims, num_attention_heads=1, head_dim=dims, rope_parameters=rope, max_position_embeddings=131072
    )
    return LlamaRotaryEmbedding(config).inv_freq.numpy()


@pytest.mark.parametrize(("published", "dims"), CASES, ids=[f"{one.models}-{dims}" for one, dims in CASES])
def test_frequencies_are_those_of_transformers(published, dims) -> None:
    """At most one ulp, in few pairs."""
    keys = ConfigJson({"rope_theta": published.base, "rope_scaling": published.scaling or None})
    model = llama.LlamaConfig(
        **llama.LlamaConfig.rotary_from_hf(keys, {}),
        family="llama",
        layers=1,
        d_model=dims,
        n_heads=1,
        n_vocab=8,
        seq=131072,
    )
    found, expected = frequencies(model.rotary()), theirs(published, dims)
    assert found.dtype == expected.dtype == np.float32
    ulps = np.abs(found.view(np.int32) - expected.view(np.int32))
    off = {int(pair): int(ulps[pair]) for pair in np.flatnonzero(ulps)}
    print(f"{published.models}, {dims} dims: pairs that differ, with their ulps: {off}")  # noqa: T201
    assert len(off) <= published.most_pairs
    assert max(off.values(), default=0) <= 1


@pytest.mark.parametrize("style", ["pairs", "halves"])
# all dims of a head and angles of each head; some dims and one row of angles for all sequences
@pytest.mark.parametrize(("dtype", "rotated", "angles"), [(jnp.float32, 16, (2, 5, 3)), (jnp.bfloat16, 6, (1, 5))])
def test_a_rotation_by_a_product_is_exact(style, dtype, rotated, angles) -> None:
    """Operations one by one: a compiler may fuse a product and a sum, and then rounds once less."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, dy = (jax.random.normal(key, (2, 5, 3, 16)).astype(dtype) for key in keys[:2])
    theta = 9 * jax.random.normal(keys[2], (*angles, rotated // 2))
    sin, cos = jnp.sin(theta), jnp.cos(theta)
    expected, by_slices = jax.vjp(lambda x: rotate_by_slices(style, x, sin, cos), x)
    found, by_product = jax.vjp(lambda x: rotate_by_product(style, x, sin, cos), x)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(by_product(dy)[0], by_slices(dy)[0])
