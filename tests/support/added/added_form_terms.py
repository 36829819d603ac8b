"""The terms of the added form."""

from collections.abc import Sequence

from added_form import Factored

from mesh_transformer.ops.forms import FormMatrix
from mesh_transformer.ops.linear import Term


def terms(form: Factored, matrix: FormMatrix) -> Sequence[Term]:
    """u v."""
    return (Term((matrix.arrays["u"], matrix.arrays["v"])),)
