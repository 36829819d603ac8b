"""How GGUF files hold the models of a family: a row of its class, `GGUF`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

Rule = Literal["permuted_heads", "parts_of_qkv", "norm_plus_one", "transposed"]
"""A change of values by llama.cpp's converter, which checkpoint/gguf/rules.py reverts:

- permuted_heads: the rows of q and k in each head alternate between the halves that rotary encoding pairs
- parts_of_qkv: all rows of q, then of k, then of v; in the family's own file they are grouped by heads
- norm_plus_one: one is added to the scales of norms
- transposed: the matrices of the layers are (out, in); in the family's own file (in, out)
"""


@dataclasses.dataclass(frozen=True)
class Gguf:
    """How GGUF files hold a family's models.

    Args:
        architecture: general.architecture.
        fields: fields by metadata key without the architecture, where they are not those of `COMMON`.
        assumed: fields that a file does not say, as llama.cpp assumes them (src/models in its repository).
        needs: a metadata key, or the end of a tensor's name, that a file of this family has. Families may share an
            architecture.
        rules: the changes of values.
        names: the family's names of tensors as the package `gguf` knows them: patterns and replacements.
        required: further metadata keys that llama.cpp needs.
        gating: the router's scores: 1, softmax; 2, sigmoid.
        wide_queries: the layers of the model whose query_scale_dims is d_model / n_heads, which no file says.
        split_kv_b: k_b, (heads, rank, nope), and v_b, (heads, v, rank), are in place of kv_b.
    """

    architecture: str
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    assumed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    needs: str | None = None
    rules: tuple[Rule, ...] = ()
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    split_kv_b: bool = False
    required: tuple[str, ...] = ()
    gating: int = 1
    wide_queries: int | None = None


COMMON: Mapping[str, str] = {
    "block_count": "layers",
    "embedding_length": "d_model",
    "feed_forward_length": "d_ff",
    "context_length": "seq",
    "attention.head_count": "n_heads",
    "attention.head_count_kv": "n_kv_heads",
    "attention.key_length": "d_head",
    "attention.layer_norm_rms_epsilon": "norm_eps",
    "attention.layer_norm_epsilon": "norm_eps",
    "attention.sliding_window": "window",
    "attention.q_lora_rank": "q_rank",
    "attention.kv_lora_rank": "kv_rank",
    "attention.clamp_kqv": "clip_qkv",
    "rope.freq_base": "rotary_base",
    "rope.freq_base_swa": "local_rotary_base",
    "rope.dimension_count": "rotary_dims",
    "expert_count": "n_experts",
    "expert_used_count": "experts_per_token",
    "expert_feed_forward_length": "expert_d_ff",
    "expert_shared_feed_forward_length": "shared_d_ff",
    "expert_weights_scale": "router_scale",
    "expert_weights_norm": "router_normalize",
    "expert_group_count": "router_groups",
    "expert_group_used_count": "router_top_groups",
    "use_parallel_residual": "parallel_residual",
    "attn_logit_softcapping": "attention_softcap",
    "final_logit_softcapping": "softcap",
}
"""Fields by metadata key, for families that have the field. A family without it takes only the value that says what it
is anyway, or the file is refused."""
