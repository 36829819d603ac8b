"""JAXformer (Makkar et al. 2025, jaxformer.com): latent attention, and blocks of layers that end with experts."""

from dataclasses import replace
from typing import Literal, Self

from pydantic import model_validator

from mesh_transformer.errors import UserError
from mesh_transformer.families.base import MOST_ROTARY_DIMS
from mesh_transformer.families.experts import ExpertCounts
from mesh_transformer.fields import Dims, Layers, Positive
from mesh_transformer.spec import (
    Decoder,
    Dense,
    ExpertsSpec,
    JointLatentAttentionSpec,
    NormSpec,
    Rotary,
    RouterSpec,
    sequential,
)


class JaxformerConfig(ExpertCounts):
    """JAXformer's function on one device, without its shared expert, whose output it does not add.

    The last layer of each block has experts, and no rotary encoding.
    """

    family: Literal["jaxformer"] = "jaxformer"
    """model family: a file in mesh_transformer/families"""
    block_layers: Layers = 6
    """layers of a block; the last one has experts and no rotary encoding; divides model.layers"""
    latent_dim: Dims
    """width of each of the two latents: queries are made from one, keys and values from the other"""
    rotary_dims: Dims
    """dims that are rotated in a head of queries and keys, besides the d_head others; keys share them between heads"""
    norm_eps: Positive = 1e-6
    """epsilon that each norm adds to the mean square"""

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        if self.layers % self.block_layers:
            raise UserError(
                f"model.layers {self.layers} is not divisible by model.block_layers {self.block_layers}: a block is "
                "whole; change one of them"
            )
        if self.rotary_dims % 2:
            raise UserError(f"model.rotary_dims {self.rotary_dims} must be even: pairs of dims are rotated")
        if self.n_heads * self.rotary_dims > MOST_ROTARY_DIMS:
            raise UserError(
                f"model.n_heads {self.n_heads} x model.rotary_dims {self.rotary_dims} is too large: at most "
                f"{MOST_ROTARY_DIMS} dims are rotated"
            )
        return self

    def decoder(self) -> Decoder:
        """See `ModelConfig`."""
        norm, ff = NormSpec(kind="rms", eps=self.norm_eps), Dense(d_ff=self.d_ff, activation="gelu_tanh")
        attention = JointLatentAttentionSpec(
            heads=self.n_heads,
            q_rank=self.latent_dim,
            kv_rank=self.latent_dim,
            nope_dims=self.d_head,
            v_dims=self.d_head,
            # of the queries of all heads; the first position is 1
            positions=Rotary(dims=self.n_heads * self.rotary_dims, style="pairs", first=1),
        )
        experts = ExpertsSpec(
            count=self.n_experts,
            d_ff=self.d_ff,
            d_ff_field="d_ff",
            activation="gelu_tanh",
            router=RouterSpec(scores="sigmoid", chosen=self.experts_per_token, normalize=True, logit_bias=True),
            gated=False,
            bias=True,
        )
        block = (self.block_layers - 1) * [sequential(norm, attention, ff)]
        block.append(sequential(norm, replace(attention, positions=None), experts))
        return self.decoder_of(block * (self.layers // self.block_layers), norm, tied=True)
