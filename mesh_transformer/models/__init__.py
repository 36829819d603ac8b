"""The model that any family describes, in Haiku: modules, stack of layers, head and placement on a mesh; and a model of
one's own. docs/library.md describes the names here."""

from mesh_transformer.models.attention import Attention
from mesh_transformer.models.haiku_model import HaikuModel
from mesh_transformer.models.modules import Context, Embedding, Linear, Norm, OutputBias, columns
from mesh_transformer.models.stack import Stream
from mesh_transformer.spec import AttentionSpec, NormSpec, RouterSpec

__all__ = [
    "AttentionSpec",
    "Context",
    "Embedding",
    "HaikuModel",
    "Linear",
    "Norm",
    "NormSpec",
    "OutputBias",
    "RouterSpec",
    "Attention",
    "Stream",
    "columns",
]
