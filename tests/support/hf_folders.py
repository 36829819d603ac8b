"""Random models in memory, as sources, and as Hugging Face folders written by transformers."""

from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from mesh_transformer.checkpoint.native.manifest import flatten
from mesh_transformer.checkpoint.tensors import Index, UpdateCounts
from mesh_transformer.config import ModelConfig
from mesh_transformer.families import gptj
from mesh_transformer.parallel.sharding import Params
from support.array_source import ArraySource
from support.builders import float32_model

ODD = {"layers": 3, "d_model": 48, "n_heads": 3, "n_vocab": 131, "seq": 24, "pe_rotary_dims": 6}
ALL = slice(None)


class MemorySource(ArraySource):
    """A parameter tree as a TensorSource; `read_bytes` lists the size of each slice that was read."""

    def __init__(self, params: Params, dtype: Any = np.float32) -> None:
        leaves = flatten({"params": params})
        super().__init__({name: np.asarray(leaf).astype(dtype) for name, leaf in leaves.items()}, UpdateCounts(0))
        self.read_bytes: list[int] = []

    def read(self, name: str, index: Index) -> np.ndarray:
        found = super().read(name, index)
        self.read_bytes.append(found.nbytes)
        return found


def model_config(**values: Any) -> ModelConfig:
    """A small model of odd sizes."""
    return gptj.GptJConfig(**{**ODD, **values})


def random_params(model: ModelConfig, seed: int = 0) -> Params:
    """Random parameters, including biases and norms; the padding of the vocabulary is zero, as read from a folder."""
    random = np.random.default_rng(seed)
    shapes = jax.eval_shape(float32_model(model).init, jax.random.key(0))

    def draw(path: Any, leaf: Any) -> np.ndarray:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        values = 0.3 * random.standard_normal(leaf.shape, np.float32) + name.endswith("scale")
        if name.endswith(("tokens/w", "logits/b")):
            values[model.n_vocab :] = 0
        if name.endswith("logits/w"):
            values[:, model.n_vocab :] = 0
        return values.astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def read_all(source: Any) -> dict[str, np.ndarray]:
    """Every tensor of a source."""
    return {name: source.read(name, (ALL,) * len(info.shape)) for name, info in source.tensors.items()}


def to_tree(arrays: dict[str, np.ndarray]) -> Params:
    """The parameter tree, float32, of arrays by name."""
    tree: Params = {}
    for name, array in arrays.items():
        _, stage, *module, field = name.split("/")
        tree.setdefault(stage, {}).setdefault("/".join(module), {})[field] = array.astype(np.float32)
    return tree


def model_logits(model: ModelConfig, params: Params, tokens: np.ndarray) -> np.ndarray:
    """Logits of this program: (B, T, n_vocab), float32."""
    logits, _ = jax.jit(float32_model(model).apply)(params, tokens.astype(np.int32))
    return np.asarray(logits)[..., : model.n_vocab]


def transformers_logits(folder: Path, tokens: np.ndarray, dtype: str = "float32") -> np.ndarray:
    """Logits of transformers for a folder. No tensor may be missing or unexpected."""
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        attn_implementation="eager",
        dtype=getattr(torch, dtype),
        output_loading_info=True,
        local_files_only=True,
    )
    assert not any(info.values()), info
    # the default implementation of experts refuses matrices of odd widths
    model.set_experts_implementation("eager")
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens.astype(np.int64))).logits.float().numpy()


def save_transformers_model(
    folder: Path,
    model: ModelConfig,
    seed: int = 0,
    dtype: str = "float32",
    tied: bool = False,
    **options: Any,
) -> Any:
    """A random GPTJForCausalLM that transformers saves to `folder`."""
    import torch
    from transformers import GPTJConfig, GPTJForCausalLM

    torch.manual_seed(seed)
    gptj_model = GPTJForCausalLM(
        GPTJConfig(
            vocab_size=model.n_vocab,
            n_positions=model.seq,
            n_embd=model.d_model,
            n_layer=model.layers,
            n_head=model.n_heads,
            rotary_dim=model.pe_rotary_dims,
            n_inner=model.d_ff,
            bos_token_id=None,
            eos_token_id=None,
            tie_word_embeddings=tied,
        )
    ).to(getattr(torch, dtype))
    for parameter in gptj_model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    gptj_model.save_pretrained(folder, **options)
    return gptj_model


def to_numpy(tensor: Any) -> np.ndarray:
    """A torch tensor, including bfloat16, as a numpy array."""
    import torch

    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
