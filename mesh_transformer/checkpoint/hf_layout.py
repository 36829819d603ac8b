"""Which Hugging Face GPT-J tensor holds which of our parameters.

Their linear weights are (out, in), ours (in, out); they have one tensor a layer, we stack the layers; their vocabulary
is not padded; they have no bias on the embedding. The rotary pairs are the same: (0, 1), (2, 3), ...
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mesh_transformer.config import ModelConfig
from mesh_transformer.errors import UserError

EMBEDDING = "params/embed/tokens/w"
EMBEDDING_BIAS = "params/embed/tokens/b"


class Entry(NamedTuple):
    """One of our parameters: `hf` is their name, with {} for the layer; `shape` is ours, of one layer, not padded."""

    name: str
    hf: str
    shape: tuple[int, ...]
    vocab_axis: int | None = None

    @property
    def stacked(self) -> bool:
        """One tensor a layer on their side, a leading layer dimension on ours."""
        return "{}" in self.hf

    @property
    def transposed(self) -> bool:
        """Their tensor is the transpose of ours: every matrix but the table of embeddings."""
        return len(self.shape) == 2 and self.name != EMBEDDING

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """The shape of their tensor."""
        return self.shape[::-1] if self.transposed else self.shape


def entries(model: ModelConfig) -> list[Entry]:
    """The parameters in the order in which they are computed; the embedding's bias is not among them."""
    c, heads = model, model.n_heads * model.d_head
    block = [
        ("norm/scale", "ln_1.weight", (c.d_model,)),
        ("norm/offset", "ln_1.bias", (c.d_model,)),
        ("attention/q/w", "attn.q_proj.weight", (c.d_model, heads)),
        ("attention/k/w", "attn.k_proj.weight", (c.d_model, heads)),
        ("attention/v/w", "attn.v_proj.weight", (c.d_model, heads)),
        ("attention/o/w", "attn.out_proj.weight", (heads, c.d_model)),
        ("ff/in/w", "mlp.fc_in.weight", (c.d_model, c.d_ff)),
        ("ff/in/b", "mlp.fc_in.bias", (c.d_ff,)),
        ("ff/out/w", "mlp.fc_out.weight", (c.d_ff, c.d_model)),
        ("ff_out/b", "mlp.fc_out.bias", (c.d_model,)),
    ]
    return [
        Entry(EMBEDDING, "transformer.wte.weight", (c.n_vocab, c.d_model), vocab_axis=0),
        *(Entry(f"params/blocks/{ours}", f"transformer.h.{{}}.{hf}", shape) for ours, hf, shape in block),
        Entry("params/head/norm/scale", "transformer.ln_f.weight", (c.d_model,)),
        Entry("params/head/norm/offset", "transformer.ln_f.bias", (c.d_model,)),
        Entry("params/head/logits/w", "lm_head.weight", (c.d_model, c.n_vocab), vocab_axis=1),
        Entry("params/head/logits/b", "lm_head.bias", (c.n_vocab,), vocab_axis=0),
    ]


def padded(entry: Entry, model: ModelConfig) -> tuple[int, ...]:
    """The shape of the whole parameter on our side: with the layers, and with the dead vocabulary rows."""
    shape = [
        model.padded_vocab if axis == entry.vocab_axis else size for axis, size in enumerate(entry.shape)
    ]
    return (model.layers, *shape) if entry.stacked else tuple(shape)


def check_exports(model: Any) -> None:
    """Refuse a model that GPTJForCausalLM cannot compute.

    Raises:
        UserError: the position encoding, the norm or the width of the heads is not GPT-J's.
    """
    reasons = []
    if model.pe != "rotary":
        reasons.append(f"model.pe is {model.pe}, GPTJForCausalLM has rotary alone")
    if model.norm != "layernorm":
        reasons.append(f"model.norm is {model.norm}, GPTJForCausalLM has layernorm alone")
    if model.n_heads * model.d_head != model.d_model:
        reasons.append(
            f"model.n_heads {model.n_heads} x model.d_head {model.d_head} is not model.d_model {model.d_model}, "
            "as GPTJForCausalLM has it"
        )
    if reasons:
        raise UserError(
            f"this model has no Hugging Face form: {'; '.join(reasons)}. Keep it native, or classic"
        )
