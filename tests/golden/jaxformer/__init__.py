"""JAXformer's own numbers, and its parameters under the names of this program: README.md of the folder above."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

NUMBERS = Path(__file__).with_name("numbers.npz")
BLOCKS, LAYERS, HEADS, WIDTH, LATENT = 2, 3, 4, 16, 8
MODEL: dict[str, Any] = {
    "family": "jaxformer",
    "layers": BLOCKS * LAYERS,
    "block_layers": LAYERS,
    "d_model": WIDTH,
    "n_heads": HEADS,
    "latent_dim": LATENT,
    "rotary_dims": 4,
    "n_experts": 4,
    "experts_per_token": 2,
    "n_vocab": 61,
    "vocab_multiple": 4,
    "seq": 16,
}
Read = Callable[[str], np.ndarray]
"""The array of one layer, by JAXformer's name below Layer_i/."""


@functools.cache
def numbers() -> dict[str, np.ndarray]:
    """All arrays by name."""
    with np.load(NUMBERS, allow_pickle=False) as file:
        return dict(file)


def parameters(prefix: str) -> dict[str, Any]:
    """The arrays below `prefix`, such as params or gradient, as a tree like this program's parameters."""
    arrays = {name.removeprefix(f"{prefix}/"): x for name, x in numbers().items() if name.startswith(f"{prefix}/")}
    stacks: dict[str, list[np.ndarray]] = {}
    for block in range(BLOCKS):
        for layer in range(LAYERS):
            read = functools.partial(_of_layer, arrays, layer, block)
            for name, array in {**_attention(read, layer), **_feed_forward(read, layer)}.items():
                stacks.setdefault(name, []).append(array)
    tree: dict[str, Any] = {"embed": {}, "blocks": {}, "head": {}}
    table = np.pad(arrays["embed/embedding/embedding"], ((0, 3), (0, 0)))
    tree["embed"]["tokens"] = {"w": table}
    for name, array in _norm("norm", lambda leaf: arrays[f"embed/norm/{leaf}"]).items():
        tree["head"].setdefault("norm", {})[name.rpartition("/")[2]] = array
    for name, each in stacks.items():
        module, _, leaf = name.rpartition("/")
        tree["blocks"].setdefault(module, {})[leaf] = np.stack(each)
    return tree


def _of_layer(arrays: dict[str, np.ndarray], layer: int, block: int, name: str) -> np.ndarray:
    return arrays[f"blocks/Layer_{layer}/{name}"][block]


def _norm(name: str, read: Read) -> dict[str, np.ndarray]:
    return {f"{name}/scale": read("gamma").reshape(-1), f"{name}/offset": read("beta").reshape(-1)}


def _linear(name: str, read: Read, theirs: str, bias: str | None = None) -> dict[str, np.ndarray]:
    return {f"{name}/w": read(f"{theirs}/kernel"), f"{bias or name}/b": read(f"{theirs}/bias")}


def _attention(read: Read, layer: int) -> dict[str, np.ndarray]:
    """The norms, and the attention: its first map makes the latent of keys and values, then that of queries."""
    found = {
        **_norm("norm", lambda leaf: read(f"RMSNorm_0/{leaf}")),
        **_norm("ff_norm", lambda leaf: read(f"RMSNorm_1/{leaf}")),
    }
    for leaf, theirs in (("w", "kernel"), ("b", "bias")):
        latents = read(f"MLA_0/Dense_0/{theirs}")
        found |= {f"attention/kv_a/{leaf}": latents[..., :LATENT], f"attention/q_a/{leaf}": latents[..., LATENT:]}
    keys, queries, out = (1, 2, 3) if layer == LAYERS - 1 else (3, 4, 5)
    if layer < LAYERS - 1:
        found |= _linear("attention/k_r", read, "MLA_0/Dense_1") | _linear("attention/q_r", read, "MLA_0/Dense_2")
    found |= _linear("attention/q_b", read, f"MLA_0/Dense_{queries}")
    found |= _linear("attention/o", read, f"MLA_0/Dense_{out}", "attention_out")
    # the keys of all heads, then the values of all heads
    w = read(f"MLA_0/Dense_{keys}/kernel").reshape(LATENT, 2, HEADS, -1)
    b = read(f"MLA_0/Dense_{keys}/bias").reshape(2, HEADS, -1)
    found["attention/kv_b/w"] = np.concatenate([w[:, 0], w[:, 1]], axis=-1).swapaxes(0, 1)
    found["attention/kv_b/b"] = np.concatenate([b[0], b[1]], axis=-1).reshape(-1)
    return found


def _feed_forward(read: Read, layer: int) -> dict[str, np.ndarray]:
    if layer < LAYERS - 1:
        into = _linear("ff/in", read, "FeedForward_0/Dense_0")
        return into | _linear("ff/out", read, "FeedForward_0/Dense_1", "ff_out")
    found = _linear("ff/router", read, "MoE_0/NoisyKGate_0/centroids")
    for ours, theirs in (("in", "Dense_0"), ("out", "Dense_1")):
        found[f"ff/experts/{ours}"] = read(f"MoE_0/FeedForward_0/{theirs}/kernel")
        found[f"ff/experts/{ours}_b"] = read(f"MoE_0/FeedForward_0/{theirs}/bias")
    return found
