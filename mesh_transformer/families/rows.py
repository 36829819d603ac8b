"""The rows of `hf_tensors` that families have in common."""

from collections.abc import Iterable

from mesh_transformer.spec import TRANSPOSED, Tensor

# the modules with the biases of matrices whose outputs are summed over devices; other biases stand beside their matrix
_BIASES = {"attention/o": "attention_out", "ff/out": "ff_out"}


def norm_rows(ours: str, theirs: str, *, offset: bool = True) -> list[Tensor]:
    """The rows of a norm, given the beginning of their names."""
    rows = [Tensor(f"{ours}/scale", f"{theirs}.weight")]
    return [*rows, Tensor(f"{ours}/offset", f"{theirs}.bias")] if offset else rows


def matrix_rows(ours: str, theirs: str, *, bias: bool = True, view: str | None = TRANSPOSED) -> list[Tensor]:
    """The rows of a matrix of the layers and of its bias, given the beginning of their names."""
    rows = [Tensor(f"blocks/{ours}/w", f"{theirs}.weight", view)]
    return [*rows, Tensor(bias_of(ours), f"{theirs}.bias")] if bias else rows


def bias_of(matrix: str) -> str:
    """The parameter that is the bias of a matrix of the layers."""
    return f"blocks/{_BIASES.get(matrix, matrix)}/b"


def model_rows(table: str, rows: Iterable[Tensor], head: str, *, tied: bool) -> list[Tensor]:
    """The rows of a model: its `table` of tokens, `rows`, and its `head` unless that is the table."""
    if tied:
        return [Tensor("embed/tokens/w", table, vocab_axis=0, copy=head), *rows]
    head_row = Tensor("head/logits/w", head, TRANSPOSED, vocab_axis=1, tied=table)
    return [Tensor("embed/tokens/w", table, vocab_axis=0), *rows, head_row]
