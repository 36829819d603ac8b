"""How a matrix is stored, if not as one array: a form says which arrays it becomes. ops/forms.py has their products.

The arrays are ordinary parameters of the module that has the matrix: devices split them by the names of their
dimensions, and optimizers and checkpoints hold them, without knowledge of forms. A new form is a subclass of `Form` and
one line of the table in ops/forms.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mesh_transformer.spec.arrays import Array, Arrays

WHOLE_MATRIX = ""
"""In place of the end of a name: the matrix itself, as the forms before this one store it."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """A way to store matrices of the layers."""

    dropout: float = 0.0
    """The share of the numbers of a matrix's input that its terms of low rank read as 0, in training."""

    def arrays(self, path: str, array: Array) -> Mapping[str, Array] | None:
        """The arrays of a matrix, by the ends of their names, such as `lora_a` of `attention/q/w_lora_a`; None if the
        matrix at this path of a layer does not have this form. `WHOLE_MATRIX` among them: the matrix stays."""
        raise NotImplementedError

    def shared(self, path: str) -> Mapping[str, str]:
        """Further arrays of a matrix, which belong to other matrices of the layer: the path of these, by the ends of
        the arrays' names."""
        return {}


def stored(arrays: Arrays, forms: Sequence[Form]) -> Arrays:
    """The arrays of a layer as these forms store them. Those that forms add follow all others, whose initial values are
    then the same without forms."""
    if not forms:
        return arrays
    others: Arrays = {}
    added: Arrays = {}
    for path, array in arrays.items():
        stays = True
        for form in forms:
            of_matrix = form.arrays(path, array)
            if of_matrix is not None:
                stays = stays and WHOLE_MATRIX in of_matrix
                added |= {name_of(path, end): part for end, part in of_matrix.items() if end != WHOLE_MATRIX}
        if stays:
            others[path] = array
    return {**others, **added}


def name_of(path: str, end: str) -> str:
    """The path of an array that a form makes of the matrix at `path`."""
    return f"{path}_{end}"


def with_inputs(array: Array, size: int, name: str | None) -> Array:
    """A matrix with another number of inputs, and another name of that dimension."""
    at = array.dims.index("i")
    axes, shape = list(array.axes), list(array.shape)
    axes[at], shape[at] = name, size
    return _resized(array, tuple(axes), tuple(shape), array.dims)


def with_outputs_joined(array: Array, size: int, name: str | None) -> Array:
    """A matrix (..., i, `size`) with the inputs of another one, and one dimension of outputs."""
    kept = [at for at, dim in enumerate(array.dims) if dim != "o"]
    axes, shape = [array.axes[at] for at in kept], [array.shape[at] for at in kept]
    return _resized(array, (*axes, name), (*shape, size), "".join(array.dims[at] for at in kept) + "o")


def _resized(array: Array, axes: tuple[str | None, ...], shape: tuple[int, ...], dims: str) -> Array:
    """An array of this shape, of which a token uses the same share."""
    resized = Array(axes, shape, dims=dims)
    return resized._replace(used=resized.size * array.used // array.size)
