"""The parameters of a part of a model: names and sizes of their dimensions, and their initial values."""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

Axes = tuple[str | None, ...]
"""The names of the dimensions of an array; None for a dimension that is never split."""
AxesTree = Axes | Mapping[str, "AxesTree"]
"""The dimension names of all arrays of a tree."""
Role = Literal["input", "inner", "output", "other"]


class Array(NamedTuple):
    """A parameter: names and sizes of its dimensions, its initial values, and what it does to a token.

    `used` is the number of elements by which each token is multiplied: all of a matrix, none of a bias, a norm or a
    table, and only the chosen experts' part of the matrices of routed experts. A matrix has a role. input: it
    multiplies what the mechanism reads. output: its product is what the mechanism adds. inner: it stands between inputs
    and outputs. other: a narrow matrix, such as a router.

    The initial values are truncated normal with `stddev`, cut at two standard deviations; uniform between -`bound` and
    `bound`; or `constant`, if both are None.

    `dims` says what each dimension of a matrix is, without a dimension of layers. i: the product sums over it. o: it is
    a dimension of the product. e: it counts matrices. An `adapter` is trained in a run in which all other arrays are
    frozen.
    """

    axes: Axes
    shape: tuple[int, ...]
    used: int = 0
    role: Role = "other"
    stddev: float | None = None
    constant: float = 0.0
    bound: float | None = None
    dims: str = "io"
    adapter: bool = False

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


Arrays = dict[str, Array]
"""Parameters by their path below a module, such as `q/w`, in the order in which a fresh model draws them."""


def matrix(axes: Axes, shape: tuple[int, ...], role: Role, dims: str = "io") -> Array:
    """A matrix by which every token is multiplied: (..., D_in, D_out)."""
    return Array(axes, shape, math.prod(shape), role, lecun_stddev(shape), dims=dims)


def lecun_stddev(shape: tuple[int, ...]) -> float:
    """1 / sqrt(D_in), the standard deviation of a matrix (..., D_in, D_out) whose products are as large as its input
    (LeCun et al. 1998, Efficient BackProp)."""
    return 1 / math.sqrt(shape[-2])


def linear(axes: tuple[str | None, str | None], d_in: int, d_out: int, role: Role, *, bias: bool = False) -> Arrays:
    """The arrays of a linear map: `w`, and `b` if it has a bias."""
    weights: Arrays = {"w": matrix(axes, (d_in, d_out), role)}
    return {**weights, "b": Array(axes[1:], (d_out,))} if bias else weights


def with_outputs(arrays: Arrays, stddev: float) -> Arrays:
    """The arrays, with another standard deviation of the matrices whose products a layer adds."""
    return {path: array._replace(stddev=stddev) if array.role == "output" else array for path, array in arrays.items()}


def below(name: str, arrays: Arrays) -> Arrays:
    """The arrays of a module that is called `name` inside of another."""
    return {f"{name}/{path}": array for path, array in arrays.items()}


def inside(name: str, arrays: Arrays) -> Arrays:
    """The inverse of `below`: the arrays of the module `name`, by their path in it."""
    return {path.removeprefix(f"{name}/"): array for path, array in arrays.items() if path.startswith(f"{name}/")}
