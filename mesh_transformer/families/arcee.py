"""AFM of Arcee (2025): Llama whose feed-forward layer has no gate and squares a rectifier."""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from mesh_transformer.families.gguf_rows import Gguf
from mesh_transformer.families.hf_keys import Hf, Only
from mesh_transformer.families.llama import GATED, BiasedLlama
from mesh_transformer.families.rows import matrix_rows
from mesh_transformer.fields import Positive
from mesh_transformer.spec import Dense, Tensor


class ArceeConfig(BiasedLlama):
    """AFM: Llama whose feed-forward layer has no gate and squares a rectifier."""

    HF_MODEL_TYPE: ClassVar = "arcee"
    HF_ARCHITECTURE: ClassVar = "ArceeForCausalLM"
    GGUF: ClassVar = Gguf("arcee", rules=("permuted_heads",))
    HF_HEADS_DIVIDE_WIDTH: ClassVar = True
    HF_END_OF_TEXT: ClassVar = 128001
    HF_FIXED: ClassVar = {"hidden_act": Only("relu2")}
    HF_DEFAULTS: ClassVar = {
        "num_hidden_layers": 32,
        "hidden_size": 2560,
        "num_attention_heads": 32,
        "intermediate_size": 18432,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    }

    family: Literal["arcee"] = "arcee"
    """model family: a file in mesh_transformer/families"""
    norm_eps: Annotated[Positive, Hf("rms_norm_eps")] = 1e-5
    """epsilon that each norm adds to the mean square"""

    def ff(self) -> Dense:
        """See `LlamaLike`."""
        return replace(super().ff(), activation="relu_squared", gated=False)

    def ff_tensors(self, block: str) -> list[Tensor]:
        """See `LlamaLike`."""
        rows = list[Tensor]()
        for name in ("in", "out"):
            rows += matrix_rows(f"ff/{name}", f"{block}mlp.{GATED[name]}", bias=self.ff_bias)
        return rows
