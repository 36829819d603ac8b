"""Pure array functions: no parameters, no state, no devices. docs/library.md describes the names here."""

from mesh_transformer.ops.attend.causal import Attend
from mesh_transformer.ops.attend.context import attention
from mesh_transformer.ops.tensor_parallel import column, row

__all__ = ["Attend", "attention", "column", "row"]
