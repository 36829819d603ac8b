"""A mechanism: attention whose mixed values are multiplied by sigmoid(x w_gate)."""

from dataclasses import dataclass

import jax

from mesh_transformer.models.attention import Attention
from mesh_transformer.models.modules import Context
from mesh_transformer.spec import AttentionSpec


@dataclass(frozen=True, kw_only=True)
class GatedAttention(AttentionSpec):
    """Attention with a gate for each element of the mixed values."""

    @property
    def maps(self) -> tuple[tuple[str, str, int], ...]:
        """See `AttentionSpec`."""
        return (*super().maps, ("gate", "heads", self.heads))


class GatedSelfAttention(Attention):
    """Its module."""

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, gate: jax.Array, ctx: Context) -> jax.Array:
        return super().__call__(q, k, v, ctx) * jax.nn.sigmoid(gate)
