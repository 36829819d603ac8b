"""A layer as plain data: branches around a residual stream, made of norms and mechanisms."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from mesh_transformer.spec.arrays import Array, Arrays, below
from mesh_transformer.spec.mechanism import AttentionMixer, Mechanism, PerLayer
from mesh_transformer.spec.norm import NormSpec


@dataclass(frozen=True, kw_only=True)
class Sublayer:
    """A mechanism in a branch, and the norm of its input. Without a norm it reads the output of the branch's `pre`."""

    mechanism: Mechanism
    norm: NormSpec | None = None

    @property
    def norm_name(self) -> str:
        """The module of a norm before this part."""
        return "norm" if self.mechanism.name == "attention" else f"{self.mechanism.name}_norm"


class Reading(NamedTuple):
    """Parts of a branch that read one input: x normalized by `norm`, whose module is `name`; x itself if `norm` is
    None."""

    norm: NormSpec | None
    name: str
    parts: tuple[Sublayer, ...]


@dataclass(frozen=True, kw_only=True)
class Branch:
    """What a layer adds to its residual stream x: x += scale * post(sum of part(pre(x))). A norm that is None is left
    out. A part with a norm reads norm(x) instead of pre(x)."""

    parts: tuple[Sublayer, ...]
    pre: NormSpec | None = None
    post: NormSpec | None = None
    scale: float = 1.0

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """The mechanisms of all parts."""
        return tuple(part.mechanism for part in self.parts)

    @property
    def post_name(self) -> str:
        """The module of the norm `post`."""
        return f"{self.parts[0].mechanism.name}_post_norm"

    @property
    def readings(self) -> tuple[Reading, ...]:
        """The inputs of the parts, each with the parts that read it."""
        shared = tuple(part for part in self.parts if part.norm is None)
        alone = [Reading(part.norm, part.norm_name, (part,)) for part in self.parts if part.norm is not None]
        return (*([Reading(self.pre, shared[0].norm_name, shared)] if shared else []), *alone)

    @property
    def norms(self) -> dict[str, NormSpec]:
        """The norms by the names of their modules."""
        before = {reading.name: reading.norm for reading in self.readings if reading.norm is not None}
        return before if self.post is None else {**before, self.post_name: self.post}


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Branches, one after the other."""

    branches: tuple[Branch, ...]

    def __post_init__(self) -> None:
        names = [mechanism.name for mechanism in self.mechanisms]
        assert len(names) == len(set(names)), f"two mechanisms of a layer have one name: {names}"
        attend = [mechanism for mechanism in self.mechanisms if isinstance(mechanism, AttentionMixer)]
        assert len(attend) == 1, f"one mechanism of a layer must attend, and {len(attend)} do: {names}"

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """The mechanisms of all branches."""
        return tuple(mechanism for branch in self.branches for mechanism in branch.mechanisms)

    @functools.cached_property
    def attention(self) -> AttentionMixer:
        """The mechanism that attends."""
        return next(mechanism for mechanism in self.mechanisms if isinstance(mechanism, AttentionMixer))

    @property
    def numbers(self) -> PerLayer:
        """The numbers that may differ between layers of one kind."""
        return self.attention.numbers

    @functools.cached_property
    def kind(self) -> "Layer":
        """The layer without its numbers. Layers of one kind have parameters of the same shapes."""
        return self.mapped(lambda mechanism: mechanism.kind)

    def mapped(self, function: Callable[[Mechanism], Mechanism]) -> "Layer":
        """The layer with function(mechanism) in place of each mechanism."""
        branches = []
        for branch in self.branches:
            parts = tuple(replace(part, mechanism=function(part.mechanism)) for part in branch.parts)
            branches.append(replace(branch, parts=parts))
        return Layer(branches=tuple(branches))

    def arrays(self, width: int) -> Arrays:
        """The parameters of one layer in a residual stream of this width, by module and name, such as
        `attention/q/w`."""
        arrays: Arrays = {}
        for branch in self.branches:
            for name, norm in branch.norms.items():
                arrays |= below(name, norm.arrays("embed", width))
        for mechanism in self.mechanisms:
            arrays |= below(mechanism.name, mechanism.arrays(width))
            if mechanism.out_bias:
                arrays[f"{mechanism.name}_out/b"] = Array(("embed",), (width,))
        return arrays


def sequential(norm: NormSpec, *mechanisms: Mechanism) -> Layer:
    """x += mechanism(norm(x)), for each mechanism in turn."""
    return Layer(branches=tuple(Branch(pre=norm, parts=(Sublayer(mechanism=mechanism),)) for mechanism in mechanisms))


def sandwich(norm: NormSpec, *mechanisms: Mechanism) -> Layer:
    """x += norm(mechanism(norm(x))), for each mechanism in turn."""
    return Layer(branches=tuple(replace(branch, post=norm) for branch in sequential(norm, *mechanisms).branches))


def post(norm: NormSpec, *mechanisms: Mechanism) -> Layer:
    """x += norm(mechanism(x)), for each mechanism in turn."""
    return Layer(branches=tuple(Branch(post=norm, parts=(Sublayer(mechanism=mechanism),)) for mechanism in mechanisms))


def parallel(norm: NormSpec, *mechanisms: Mechanism) -> Layer:
    """x += the sum of mechanism(norm(x)), with one norm for all mechanisms."""
    return Layer(branches=(Branch(pre=norm, parts=tuple(Sublayer(mechanism=mechanism) for mechanism in mechanisms)),))


def parallel_norms(norm: NormSpec, *mechanisms: Mechanism) -> Layer:
    """x += the sum of mechanism(norm(x)), with a norm for each mechanism."""
    parts = tuple(Sublayer(mechanism=mechanism, norm=norm) for mechanism in mechanisms)
    return Layer(branches=(Branch(parts=parts),))
