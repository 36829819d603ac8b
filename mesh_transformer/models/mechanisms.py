"""The Haiku module of each mechanism. A new mechanism is a class in spec/, a module, and one line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mesh_transformer import spec
from mesh_transformer.models.attention import JointLatentAttention, LatentAttention, SelfAttention
from mesh_transformer.models.feed_forward import Experts, FeedForward
from mesh_transformer.models.modules import Linear


class BlockModule(Protocol):
    """A mechanism between its products. The branch multiplies by the matrices `inputs` and `out`, of all its parts at
    once, and adds the biases of outputs."""

    @property
    def inputs(self) -> Sequence[Linear]:
        """The maps of its input; none: it is called with the input itself."""

    @property
    def keys(self) -> Sequence[Linear]:
        """The `inputs` that all positions need, also where only one position of a sequence is computed further."""

    @property
    def out(self) -> Linear | None:
        """The map of what it returns; None: it returns its output."""

    @property
    def __call__(self) -> Callable[..., Any]:
        """The products of `inputs`, (B, T or 1, ...), or the input (B, T or 1, D); and `ctx`, a `Context` -> the input
        of `out`, or the output (B, T or 1, D); with named means over the tokens, if it has any: a pair."""


MODULES: dict[type[spec.Mechanism], Callable[[Any, int, float, str], BlockModule]] = {
    spec.Attention: SelfAttention,
    spec.LatentAttention: LatentAttention,
    spec.JointLatentAttention: JointLatentAttention,
    spec.Dense: FeedForward,
    spec.Experts: Experts,
}
"""(mechanism, residual width, standard deviation of the output's matrix, name) -> its module."""


def module_of(mechanism: spec.Mechanism, d_model: int, out_stddev: float) -> BlockModule:
    """The module of a mechanism, inside of a Haiku transform."""
    return MODULES[type(mechanism)](mechanism, d_model, out_stddev, mechanism.name)
