"""Sizes that the mesh must divide, checked before anything is compiled."""

import math
from collections.abc import Iterator, Mapping, Sequence

from mesh_transformer.config.mesh import SWITCHES, MeshConfig, MeshShape, parts
from mesh_transformer.errors import UserError
from mesh_transformer.fields import Size

Sizes = Mapping[str, Sequence[Size]]
"""The sizes that each named dimension has."""


def check_sizes(sizes: Sizes, mesh: MeshConfig, shape: MeshShape) -> None:
    """Refuse a size that the axes of its dimension do not divide, in any of the tables of this mesh.

    Raises:
        UserError: names the field, the axes and what would do.
    """
    for switch, rules_of in SWITCHES.items():
        rules, without = rules_of(mesh), rules_of(mesh.model_copy(update={switch: False}))
        for name, given in sizes.items():
            also = f", or set mesh.{switch}=false" if rules[name] != without[name] else ""
            by_what = " x ".join(f"mesh.{axis}" for axis in sorted(rules[name] or (), key=list(shape).index))
            for size in given:
                _check(size, by_what, parts(shape, rules, name), also)


def _check(size: Size, by_what: str, by: int, also: str) -> None:
    whole = math.ceil(size.value / size.multiple) * size.multiple
    if whole % by == 0:
        return
    what, below, above = f"{size.field} {size.value}", whole // by * by, (whole // by + 1) * by
    change = f"it to {below} or {above}" if below else f"it to {above}"
    if size.multiple_field:
        what += f", rounded up to {whole} by {size.multiple_field} {size.multiple},"
        change = f"{size.multiple_field} to {math.lcm(size.multiple, by)}"
    divisor = max(divisor for divisor in _divisors(whole) if divisor < by)
    raise UserError(
        f"{what} is not divisible by {by_what} {by}: set {change}, or {by_what} to {divisor}{also}"
    )


def _divisors(value: int) -> Iterator[int]:
    for small in range(1, math.isqrt(value) + 1):
        if value % small == 0:
            yield from (small, value // small)
