"""A form: a matrix is stored as two factors, u (inputs, rank) and v (rank, outputs), in its place."""

from collections.abc import Mapping
from dataclasses import dataclass

from mesh_transformer.spec import Array
from mesh_transformer.spec.forms import Form, with_inputs, with_outputs_joined


@dataclass(frozen=True, kw_only=True)
class Factored(Form):
    """The feed-forward matrices as products of two."""

    rank: int

    def arrays(self, path: str, array: Array) -> Mapping[str, Array] | None:
        """See `Form`."""
        if not path.startswith("ff/") or array.role == "other":
            return None
        u = with_outputs_joined(array, self.rank, None)._replace(stddev=array.stddev)
        return {"u": u, "v": with_inputs(array, self.rank, None)._replace(stddev=self.rank**-0.5)}
