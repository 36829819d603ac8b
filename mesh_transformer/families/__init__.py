"""Model families as data. A family is one file in this folder and one line here."""

from mesh_transformer.families import gpt_neox, gptj
from mesh_transformer.families.base import ModelConfig

FAMILIES: dict[str, type[ModelConfig]] = {
    "gptj": gptj.Config,
    "gpt_neox": gpt_neox.Config,
}
