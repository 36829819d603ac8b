"""Where the original program keeps what: the arrays of a shard in order, and how shards make up the whole.

Everything follows from the names of its modules and the config. Its parameters are a mapping {module: {field: array}}
flattened in the order of the module names as strings (layer_10 comes before layer_2), then of the fields. The arrays
of a shard are the leaves of `opt_state` (a full checkpoint only), `params` and `step`, in 16 files.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from mesh_transformer.checkpoint.tensors import parameter_shapes
from mesh_transformer.config import ModelConfig
from mesh_transformer.errors import UserError
from mesh_transformer.families.spec import Split

PIECES = 16
PREFIX = "causal_transformer_shard/~/"
ADAM_COUNT, SCHEDULE_COUNT, STEP = "opt_state[2].count", "opt_state[5].count", "step"
_MOMENTS = {"mu": "opt_state[2].mu/", "nu": "opt_state[2].nu/"}


class Leaf(NamedTuple):
    """One array of each shard. `tensor` is our name, with params/, mu/ or nu/ in front; None: not one of ours."""

    name: str
    tensor: str | None
    layer: int | None  # of a stacked tensor
    vocab_axis: int | None  # the dimension that ours pads
    shape: tuple[int, ...]  # of the whole, without padding
    split: Split

    def shard_shape(self, shards: int) -> tuple[int, ...]:
        """The shape in each of so many shards."""
        shape = list(self.shape)
        if self.split in (Split.ROWS, Split.COLUMNS):
            shape[self.axis] //= shards
        return tuple(shape)

    @property
    def axis(self) -> int:
        """The dimension that a concatenation is along."""
        return 0 if self.split is Split.ROWS else len(self.shape) - 1

    @property
    def unused(self) -> float:
        """What the original leaves in an array that nothing uses: the value that it started from."""
        return 1.0 if self.name.startswith("params/") and self.name.endswith("/scale") else 0.0


def check_shards(config: ModelConfig, shards: int, where: str) -> None:
    """Refuse a number of shards that the model cannot be split into.

    Raises:
        UserError: heads or vocabulary cannot be split evenly; names the numbers that would do.
    """
    common = math.gcd(config.n_heads, config.n_vocab)
    if shards < 1 or common % shards:
        allowed = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        raise UserError(
            f"{where}: {shards} shards do not divide model.n_heads {config.n_heads} and model.n_vocab "
            f"{config.n_vocab}: possible are {allowed}"
        )


def leaves(config: ModelConfig, *, full: bool) -> list[Leaf]:
    """The arrays of a shard in the order of the files."""
    params = list(_parameters(config))
    if not full:
        return [*params, _count(STEP)]
    mu, nu = (
        [
            leaf._replace(
                name=leaf.name.replace("params/", start, 1),
                tensor=leaf.tensor and leaf.tensor.replace("params/", f"{kind}/", 1),
                split=Split.MEAN if leaf.split is Split.SUM else leaf.split,  # all shards have one gradient
            )
            for leaf in params
        ]
        for kind, start in _MOMENTS.items()
    )
    return [_count(ADAM_COUNT), *mu, *nu, _count(SCHEDULE_COUNT), *params, _count(STEP)]


def pieces(leaves: list[Leaf]) -> list[list[Leaf]]:
    """The arrays of each of the 16 files: runs of equal length, the first ones longer by one for what is left over."""
    length, longer = divmod(len(leaves), PIECES)
    starts = [i * length + min(i, longer) for i in range(PIECES + 1)]
    return [leaves[start:stop] for start, stop in zip(starts, starts[1:], strict=False)]


def explain_count(config: ModelConfig, found: int) -> str:
    """What a checkpoint with so many arrays a shard would be, for a message."""
    slim, full = len(leaves(config, full=False)), len(leaves(config, full=True))
    text = f"expected {slim} arrays (slim) or {full} (full) for model.layers {config.layers}, found {found}"
    block = sum(row.stacked for row in config.classic_tensors())
    for name, copies, count in (("slim", 1, slim), ("full", 3, full)):
        layers, rest = divmod(found - (count - copies * block * config.layers), copies * block)
        if not rest and layers > 0:
            text += f"; a {name} checkpoint of {layers} layers has as many"
    return text


def _count(name: str) -> Leaf:
    return Leaf(name, None, None, None, (), Split.COUNT)


def _parameters(config: ModelConfig) -> Iterator[Leaf]:
    shapes = parameter_shapes(config)
    named = {
        row.theirs.format(layer): (row, layer)
        for row in config.classic_tensors()
        for layer in (range(config.layers) if row.stacked else [None])
    }
    for name in sorted(named, key=lambda name: name.rsplit("/", 1)):
        row, layer = named[name]
        shape = list(shapes[row.ours][row.stacked :])
        if row.vocab_axis is not None:
            shape[row.vocab_axis] = config.n_vocab
        tensor = None if row.split is Split.UNUSED else f"params/{row.ours}"
        yield Leaf(f"params/{PREFIX}{name}", tensor, layer, row.vocab_axis, tuple(shape), row.split)
