"""Where the original program keeps what: the arrays of a shard in order, and how shards make up the whole.

Everything follows from the names of its modules and the config. Its parameters are a mapping {module: {field: array}}
flattened in the order of the module names as strings (layer_10 comes before layer_2), then of the fields. The arrays
of a shard are the leaves of `opt_state` (a full checkpoint only), `params` and `step`, in 16 files.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from mesh_transformer.config import ModelConfig
from mesh_transformer.errors import UserError

PIECES = 16
PREFIX = "causal_transformer_shard/~/"
ADAM_COUNT, SCHEDULE_COUNT, STEP = "opt_state[2].count", "opt_state[5].count", "step"
_MOMENTS = {"mu": "opt_state[2].mu/", "nu": "opt_state[2].nu/"}


class Split(enum.Enum):
    """How the m arrays of a leaf make up the whole one."""

    ROWS = "concatenated along the first dimension"
    COLUMNS = "concatenated along the last dimension"
    SUM = "added up: a bias added on every shard before the sum over shards"
    FIRST = "the first shard's; the others' are never used"
    MEAN = "averaged"
    COUNT = "an int32 scalar, the same in every shard"


class Role(NamedTuple):
    """What a parameter of the original is: our name for it, the sizes of the whole, and its split."""

    tensor: str | None  # None: stored by the original and used by nothing
    dims: str  # V n_vocab, D d_model, F d_ff, S seq, H n_heads, N distance buckets
    split: Split


class Leaf(NamedTuple):
    """One array of each shard. `tensor` is our name, with params/, mu/ or nu/ in front; None: not one of ours."""

    name: str
    tensor: str | None
    layer: int | None  # of a stacked tensor
    dims: str
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


def check_config(config: ModelConfig) -> None:
    """Refuse a model that the original cannot express.

    Raises:
        UserError: the widths of heads or feed-forward are not those that follow from d_model and n_heads.
    """
    c = config
    if c.n_heads * c.d_head != c.d_model or c.d_ff != 4 * c.d_model:
        raise UserError(
            f"the classic form has no room for this model: it needs model.d_head = d_model / n_heads "
            f"({c.d_model} / {c.n_heads}, given {c.d_head}) and model.d_ff = 4 * d_model (given {c.d_ff})"
        )


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
    block = len(_block(config))
    for name, copies, count in (("slim", 1, slim), ("full", 3, full)):
        layers, rest = divmod(found - (count - copies * block * config.layers), copies * block)
        if not rest and layers > 0:
            text += f"; a {name} checkpoint of {layers} layers has as many"
    return text


def _count(name: str) -> Leaf:
    return Leaf(name, None, None, "", (), Split.COUNT)


def _parameters(config: ModelConfig) -> Iterator[Leaf]:
    c = config
    sizes = {"V": c.n_vocab, "D": c.d_model, "F": c.d_ff, "S": c.seq, "H": c.n_heads, "N": 32}
    roles: dict[tuple[str, str], tuple[int | None, Role]] = {
        place: (None, role) for place, role in _outside(config).items()
    }
    for layer in range(c.layers):
        roles |= {
            (f"layer_{layer}/~/{module}", field): (layer, role)
            for (module, field), role in _block(config).items()
        }
    for module, field in sorted(roles):
        number, role = roles[module, field]
        tensor = role.tensor and f"params/{role.tensor}"
        shape = tuple(sizes[letter] for letter in role.dims)
        yield Leaf(f"params/{PREFIX}{module}/{field}", tensor, number, role.dims, shape, role.split)


def _outside(config: Any) -> dict[tuple[str, str], Role]:
    """Embedding and head, by module and field."""
    roles = {
        ("embedding_shard/~/linear", "w"): Role("embed/tokens/w", "VD", Split.ROWS),
        ("embedding_shard/~/linear", "b"): Role("embed/tokens/b", "D", Split.SUM),
        ("projection_shard/~/linear", "w"): Role("head/logits/w", "DV", Split.COLUMNS),
        ("projection_shard/~/linear", "b"): Role("head/logits/b", "V", Split.COLUMNS),
        **{
            (f"projection_shard/~/{module}", field): role
            for (module, field), role in _norm(config, "head").items()
        },
    }
    if config.pe == "fixed":
        roles["embedding_shard", "pos_embs"] = Role("embed/positions/w", "SD", Split.COLUMNS)
    if config.pe == "t5":
        roles["relative_position_embs", "rel_embedding"] = Role("embed/relative/w", "HN", Split.ROWS)
    return roles


def _block(config: ModelConfig) -> dict[tuple[str, str], Role]:
    """One layer, by module and field."""
    return {
        ("linear", "w"): Role("blocks/attention/q/w", "DD", Split.COLUMNS),
        ("linear_1", "w"): Role("blocks/attention/v/w", "DD", Split.COLUMNS),
        ("linear_2", "w"): Role("blocks/attention/k/w", "DD", Split.COLUMNS),
        ("linear_3", "w"): Role("blocks/attention/o/w", "DD", Split.ROWS),
        ("linear_4", "w"): Role("blocks/ff/in/w", "DF", Split.COLUMNS),
        ("linear_4", "b"): Role("blocks/ff/in/b", "F", Split.COLUMNS),
        ("linear_5", "w"): Role("blocks/ff/out/w", "FD", Split.ROWS),
        ("linear_5", "b"): Role("blocks/ff_out/b", "D", Split.SUM),
        **_norm(config, "blocks"),
    }


def _norm(config: Any, stage: str) -> dict[tuple[str, str], Role]:
    kind = config.norm
    dims = "" if kind.startswith("scalenorm") else "D"
    if kind.startswith("layernorm"):  # layernorm-nobias stores an offset that it does not use
        offset = f"{stage}/norm/offset" if kind == "layernorm" else None
        return {
            ("replicated_layer_norm", "scale"): Role(f"{stage}/norm/scale", dims, Split.FIRST),
            ("replicated_layer_norm", "offset"): Role(offset, dims, Split.FIRST),
        }
    roles = {("rms_norm", "scale"): Role(f"{stage}/norm/scale", dims, Split.MEAN)}
    if kind.endswith("-bias"):
        roles["rms_norm", "offset"] = Role(f"{stage}/norm/offset", dims, Split.MEAN)
    return roles
