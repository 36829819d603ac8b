"""The GPT-J family (Wang and Komatsuzaki 2021), with the classic switches for position encoding and norm.

Attention and feed-forward run in parallel from one norm; the head is untied, with a bias. Parameter names say
what each array is; checkpoint/classic.py and checkpoint/hf.py translate them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from mesh_transformer.config import ModelConfig
from mesh_transformer.layers import (
    Attention,
    Bias,
    Embedding,
    FeedForward,
    Linear,
    Norm,
    PositionTable,
    T5Bias,
    at_position,
)
from mesh_transformer.models.base import Stages
from mesh_transformer.ops.cache import Keys
from mesh_transformer.parallel.sharding import constrain


def stages(config: ModelConfig) -> Stages:
    """The embedding, block and head of a GPT-J-style model."""
    c = config
    out_stddev = 2 / c.layers / np.sqrt(c.d_model)

    def embed(
        tokens_BT: jax.Array, positions_BT: jax.Array, keys_BS: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        x_BTD = Embedding(c.padded_vocab, c.d_model, 1 / np.sqrt(c.n_vocab), name="tokens")(tokens_BT)
        if c.pe == "fixed":
            x_BTD = x_BTD + PositionTable(c.seq, c.d_model, name="positions")(positions_BT)
        bias = T5Bias(c.n_heads, c.seq, name="relative")(positions_BT, keys_BS) if c.pe == "t5" else None
        return x_BTD, bias

    def block(
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        bias_BHTS: jax.Array | None,
        cache: Keys | None,
        layer: jax.Array,
        only_B: jax.Array | None = None,
    ) -> tuple[jax.Array, Keys | None]:
        y_BTD = constrain(Norm(c.norm, name="norm")(x_BTD), "batch", "seq", "act_embed")
        rotary = (c.seq, c.pe_rotary_dims) if c.pe == "rotary" else None
        attention = Attention(c.n_heads, c.d_head, rotary, out_stddev, name="attention")
        attn_BTD, cache = attention(y_BTD, positions_BT, bias_BHTS, cache, layer, only_B)
        if only_B is not None:
            x_BTD, y_BTD = at_position(x_BTD, only_B), at_position(y_BTD, only_B)
        ff_BTD = FeedForward(c.d_ff, out_stddev, name="ff")(y_BTD)
        # One sum over tensor-parallel shards: of the two branches together, before the bias.
        return x_BTD + Bias(name="ff_out")(attn_BTD + ff_BTD), cache

    def final_norm(x_BTD: jax.Array) -> jax.Array:
        return Norm(c.norm, name="norm")(x_BTD)

    def unembed(y_BTD: jax.Array) -> jax.Array:
        return Linear(c.padded_vocab, ("embed", "vocab"), bias=True, name="logits")(y_BTD, jnp.float32)

    same_input = [["attention/q", "attention/k", "attention/v", "ff/in"]]
    return Stages(embed, block, final_norm, unembed, same_input)
