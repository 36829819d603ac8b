"""The products of matrices in the forms of spec/forms.py: the table of the terms of each form.

Shapes: D input dims, F output dims, R rank.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import cast

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.experimental.layout import Layout, with_layout_constraint

from mesh_transformer import spec
from mesh_transformer.ops.linear import Matrix, SumOfTerms, Term, dense
from mesh_transformer.parallel.sharding import Block, active
from mesh_transformer.spec.forms import WHOLE_MATRIX, Form, name_of
from mesh_transformer.spec.lora import LORA_A, LORA_B, Lora

Dropout = Callable[[jax.Array], jax.Array]
"""x with some numbers as 0."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["form", "path", "array", "axes", "dropout"]
)
@dataclasses.dataclass(frozen=True)
class FormMatrix(SumOfTerms):
    """A matrix in a form."""

    arrays: dict[str, Matrix]
    """Its arrays by the ends of their names, with those that it shares. `WHOLE_MATRIX` may be a `StoredMatrix`."""
    form: Form
    path: str
    array: spec.Array
    """The matrix as its module reads it."""
    axes: tuple[tuple[str, spec.Axes], ...]
    """The names of the dimensions of each of `arrays`."""
    dropout: Dropout | None = None

    @property
    def terms(self) -> Sequence[Term]:
        """See `SumOfTerms`."""
        return TERMS[type(self.form)](self.form, self)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix; inside of a `shard_map`, of the device's part."""
        first, last = (self.terms[0].factors[at] for at in (0, -1))
        if first is last:
            return first.shape
        return tuple(first.shape[-2] if dim == "i" else last.shape[at] for at, dim in enumerate(self.array.dims))

    def dense(self) -> jax.Array:
        """See `StoredMatrix`."""
        products = (_multiplied(self.array.dims, *map(dense, term.factors)) * term.scale for term in self.terms)
        return functools.reduce(jnp.add, products)

    def joined(self) -> SumOfTerms:
        """The matrix with all dimensions of its outputs as one, (D, F)."""
        letters = [f"{dim}{at}" for at, dim in enumerate(self.array.dims)]
        (inputs,) = (letter for letter in letters if letter.startswith("i"))
        outputs = " ".join(letter for letter in letters if letter.startswith("o"))
        pattern = f"{' '.join(letters)} -> {inputs} ({outputs})"
        return _Terms(
            [
                term._replace(factors=(*term.factors[:-1], rearrange(dense(term.factors[-1]), pattern)))
                for term in self.terms
            ]
        )

    def names(self) -> FormMatrix:
        """A tree like this one, with the names of the dimensions in place of each array."""
        axes = dict(self.axes)
        names: dict[str, object] = {
            end: array.names() if isinstance(array, FormMatrix) else axes[end] for end, array in self.arrays.items()
        }
        return dataclasses.replace(self, arrays=cast(dict[str, Matrix], names))


class _Terms(SumOfTerms):
    """A sum of terms (D, F)."""

    def __init__(self, terms: Sequence[Term]):
        self._terms = terms

    @property
    def terms(self) -> Sequence[Term]:
        """See `SumOfTerms`."""
        return self._terms

    @property
    def shape(self) -> tuple[int, ...]:
        """See `StoredMatrix`."""
        first, *_, last = (self.terms[0].factors[0], *self.terms[0].factors)
        return first.shape[0], last.shape[1]

    def dense(self) -> jax.Array:
        """See `StoredMatrix`."""
        products = (_multiplied("io", *map(dense, term.factors)) * term.scale for term in self.terms)
        return functools.reduce(jnp.add, products)


def _multiplied(dims: str, *factors: jax.Array) -> jax.Array:
    """The product of the factors of a matrix whose dimensions are `dims`."""
    if len(factors) == 1:
        return factors[0]
    letters = "abcdefgh"[: len(dims)]
    first = "".join(letter for letter, dim in zip(letters, dims, strict=True) if dim != "o") + "r"
    last = "".join("r" if dim == "i" else letter for letter, dim in zip(letters, dims, strict=True))
    return jnp.einsum(f"{first},{last}->{letters}", *factors)


def _lora(form: Lora, matrix: FormMatrix) -> Sequence[Term]:
    arrays, scale = matrix.arrays, form.by_path[matrix.path].scale
    low_rank = Term((arrays[LORA_A], arrays[LORA_B]), float(scale), matrix.dropout)
    return Term((_as_stored(arrays[WHOLE_MATRIX], dict(matrix.axes)[WHOLE_MATRIX]),)), low_rank


def _as_stored(w: Matrix, axes: spec.Axes) -> Matrix:
    """A frozen matrix in the layout of the array that holds it. A TPU's compiler would copy the stack of a matrix of
    all layers to the layout that one product likes: 2.6 GiB for GPT-J-6B, whose whole step needs 12.8 GiB without."""
    partition = active()
    if not isinstance(w, jax.Array) or partition is None or partition.target.platform != "tpu":
        return w
    # it would gather a matrix that is split; fsdp's parts ("embed") have been gathered
    split = any(partition.size(name) > 1 for name in axes if name != "embed")
    return w if split else with_layout_constraint(w, Layout(tuple(range(w.ndim))))


TERMS: dict[type[Form], Callable[..., Sequence[Term]]] = {
    Lora: _lora,
}
"""(form, matrix) -> the terms of a matrix in this form. The first term has the scale 1."""


def with_matrices(
    block: Block,
    matrices: spec.Arrays,
    forms: Sequence[Form],
    dropout: Callable[[float, int, spec.Array], Dropout | None],
) -> Block:
    """The parameters of a layer as its modules read them: one value for each matrix.

    Args:
        block: the parameters as the forms store them, by module and name.
        matrices: the result of `spec.Decoder.matrices`.
        dropout: (`Form.dropout`, number of the matrix, matrix) -> the dropout of its input, if there is one.
    """
    modules = {module: dict(leaves) for module, leaves in block.items()}
    for number, (path, array) in enumerate(matrices.items()):
        module, _, name = path.rpartition("/")
        for form in forms:
            of_matrix = form.arrays(path, array)
            if of_matrix is None:
                continue
            axes = {end: stored.axes for end, stored in of_matrix.items()}
            arrays = {end: modules[module].pop(name_of(name, end)) for end in of_matrix if end != WHOLE_MATRIX}
            for end, other in form.shared(path).items():
                owner, _, other_name = other.rpartition("/")
                arrays[end] = block[owner][name_of(other_name, end)]
                shared = form.arrays(other, matrices[other])
                assert shared is not None
                axes[end] = shared[end].axes
            if WHOLE_MATRIX in of_matrix:
                arrays[WHOLE_MATRIX] = modules[module][name]
            matrix = FormMatrix(arrays, form, path, array, tuple(axes.items()), dropout(form.dropout, number, array))
            modules[module][name] = matrix
    return modules
