"""The arrays of a training step on one device, from the specification of a decoder: no array is traced.

`parameters` lists what models/decoder.py creates. Each dimension has a name, and the rules of the mesh (config/mesh.py)
say into how many parts it is split, so that a new mesh axis needs no change here.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mesh_transformer import platforms
from mesh_transformer.accelerators import Accelerator
from mesh_transformer.config import Config
from mesh_transformer.config.mesh import MeshShape, Rules, moment_rules, parts, training_rules
from mesh_transformer.estimate.collectives import DeviceGroup
from mesh_transformer.ops.attend import causal
from mesh_transformer.optimizers.base import Axes
from mesh_transformer.spec import Attention, Decoder, Dense, Experts, LatentAttention, Layer, Norm

FLOAT32_BYTES = 4
# buckets of distances in T5's relative bias (models/decoder.py)
T5_BUCKETS = 32
# the norms of a layer, by its wiring
NORMS = {"parallel_one_norm": 1, "parallel": 2, "sequential": 2, "sandwich": 4}

# the axes of the mesh that the closed form has; a search changes them, and keeps the others
MODELLED = ("dp", "fsdp", "tp")


def unmodelled(config: Config) -> list[str]:
    """The axes of the config, such as mesh.pp, whose memory and time the closed form does not give."""
    return [f"mesh.{axis}" for axis, size in config.mesh.given.items() if axis not in MODELLED and size > 1]


class Parameter(NamedTuple):
    """A parameter of the model: names and sizes of its dimensions."""

    # "embed", "blocks" or "head", as in the tree of parameters
    stage: str
    axes: Axes
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def parameters(decoder: Decoder) -> list[Parameter]:
    """All parameters of a model; those of the layers are stacked (`Decoder.stack_axis`)."""
    d = decoder
    stacks: list[tuple[Sequence[int], _Arrays]] = [(range(len(d.layers)), _around(d.layer, d.d_model))]
    stacks += [(d.layers_with(type(kind.ff)), _feed_forward(kind.ff, d.d_model)) for kind in d.kinds]
    stacked = [((d.stack_axis(rows), *axes), (len(rows), *shape)) for rows, arrays in stacks for axes, shape in arrays]
    stages = {"embed": _embedding(d), "blocks": stacked, "head": _head(d)}
    return [Parameter(stage, axes, shape) for stage, arrays in stages.items() for axes, shape in arrays]


_Arrays = Iterator[tuple[Axes, tuple[int, ...]]]


def _embedding(d: Decoder) -> _Arrays:
    yield ("vocab", "embed"), (d.padded_vocab, d.d_model)
    if d.embed_bias:
        yield ("embed",), (d.d_model,)
    if d.learned_positions:
        yield (None, "embed"), (d.seq, d.d_model)
    if d.relative_bias:
        yield ("heads", None), (d.layer.attention.heads, T5_BUCKETS)


def _head(d: Decoder) -> _Arrays:
    yield from _norm(d.final_norm, "embed", d.d_model)
    if not d.tied:
        yield ("embed", "vocab"), (d.d_model, d.padded_vocab)
        if d.head_bias:
            yield ("vocab",), (d.padded_vocab,)


def _around(layer: Layer, width: int) -> _Arrays:
    """The arrays of a layer without its feed-forward."""
    for _ in range(NORMS[layer.wiring]):
        yield from _norm(layer.norm, "embed", width)
    yield from _attention(layer.attention, width)


def _norm(norm: Norm, axis: str | None, width: int) -> _Arrays:
    for _ in range(1 + norm.offset):
        yield ((), ()) if norm.one_scale else ((axis,), (width,))


def _attention(a: Attention | LatentAttention, width: int) -> _Arrays:
    for matrix in a.matrices(width):
        yield matrix.axes, matrix.shape
        if matrix.bias:
            yield matrix.axes[1:], matrix.shape[1:]
    if a.out_bias:
        yield ("embed",), (width,)
    for norm, axis, size in a.norms:
        yield from _norm(norm, axis, size)


def _feed_forward(ff: Dense | Experts, width: int) -> _Arrays:
    if isinstance(ff, Experts):
        yield from _experts(ff, width)
        return
    for _ in range(1 + ff.gated):
        yield ("embed", "mlp"), (width, ff.d_ff)
        if ff.bias:
            yield ("mlp",), (ff.d_ff,)
    yield ("mlp", "embed"), (ff.d_ff, width)
    if ff.bias:
        yield ("embed",), (width,)


def _experts(ff: Experts, width: int) -> _Arrays:
    yield ("embed", None), (width, ff.count)
    if ff.router.bias:
        yield (None,), (ff.count,)
    for _ in range(2):
        yield ("experts", "embed", "mlp"), (ff.count, width, ff.d_ff)
    yield ("experts", "mlp", "embed"), (ff.count, ff.d_ff, width)
    if ff.shared:
        yield from _feed_forward(ff.shared, width)
        if ff.shared_gate:
            yield ("embed", None), (width, 1)


@dataclass(frozen=True)
class Split:
    """The part of each array that one device holds, and the part of a step that it computes."""

    decoder: Decoder
    # the size of each mesh axis
    shape: MeshShape
    # of weights and activations; of gradients' sums and the optimizer's state
    rules: Rules
    moments: Rules
    # dimensions that no axis splits, whatever the rules say
    whole: frozenset[str]

    @classmethod
    def of(cls, config: Config, shape: MeshShape) -> "Split":
        """The split that `models.placement.Placement` makes of a config on a mesh."""
        decoder, rules = config.model.decoder(), training_rules(config.mesh)
        divided = decoder.layer.attention.kv_heads % parts(shape, rules, "kv_heads") == 0
        whole = frozenset() if divided else frozenset({"kv_heads"})
        return cls(decoder, shape, rules, moment_rules(config.mesh), whole)

    def parts(self, name: str | None, rules: Rules | None = None) -> int:
        """Devices that split a named dimension."""
        if name is None or name in self.whole:
            return 1
        return parts(self.shape, self.rules if rules is None else rules, name)

    def elements(self, axes: Axes, shape: tuple[int, ...], rules: Rules | None = None) -> float:
        """Elements of an array on one device."""
        return math.prod(shape) / math.prod(self.parts(name, rules) for name in axes)

    def gathered(self, axes: Axes, shape: tuple[int, ...]) -> float:
        """Elements of a parameter on one device after `gather_weights`."""
        return self.elements(axes, shape) * self.parts("embed" if "embed" in axes else None)

    @property
    def layers(self) -> float:
        """Layers that a device computes."""
        leading = self.decoder.leading
        return leading + (len(self.decoder.layers) - leading) / self.parts("layers")

    @property
    def width(self) -> int:
        """D, the residual width, which no axis splits."""
        return self.decoder.d_model

    @property
    def query_width(self) -> float:
        """Dims of all heads of queries on one device."""
        attention = self.decoder.layer.attention
        return attention.heads * attention.head_dim / self.parts("heads")

    @property
    def key_width(self) -> float:
        """Dims of all heads of keys and of values on one device."""
        attention = self.decoder.layer.attention
        dims = attention.head_dim + attention.v_dims
        return attention.kv_heads * dims / self.parts(attention.kv_name)

    @property
    def mixed_width(self) -> float:
        """Dims of all heads of attention's output on one device."""
        attention = self.decoder.layer.attention
        return attention.heads * attention.v_dims / self.parts("heads")

    @property
    def attention_widths(self) -> tuple[float, float]:
        """Elements of the matrices of attention by which a device multiplies, over D: of all but the last, and of the
        last."""
        *inputs, out = (
            self.gathered(one.axes, one.shape) / self.width for one in self.decoder.layer.attention.matrices(self.width)
        )
        return sum(inputs), out

    @property
    def hidden_width(self) -> float:
        """Dims of the feed-forward layer's products with its first matrices on one device: two of them if gated."""
        return (1 + self.decoder.layer.ff.gated) * self.ff_width

    @property
    def ff_width(self) -> float:
        """Dims of the feed-forward layer through which a token goes, on one device: the mean over layers."""
        layers = self.decoder.layers
        return sum(layer.ff.token_width for layer in layers) / len(layers) / self.parts("mlp")


@dataclass(frozen=True)
class StepSizes:
    """The quantities from which memory and time follow, all of one device."""

    config: Config
    accelerator: Accelerator
    split: Split
    table: tuple[Parameter, ...]
    # microbatches, and sequences of one on this device
    accumulation: int
    sequences: float
    # bytes of an element of an activation
    item_bytes: int
    remat: str
    logits_mib: int

    @classmethod
    def of(cls, config: Config, shape: MeshShape, accelerator: Accelerator) -> "StepSizes":
        compute = platforms.resolve(config.compute, "tpu" if accelerator.is_tpu else "gpu")
        split = Split.of(config, shape)
        return cls(
            config=config,
            accelerator=accelerator,
            split=split,
            table=tuple(parameters(split.decoder)),
            accumulation=config.optimizer.gradient_accumulation_steps,
            sequences=config.microbatch(shape) / split.parts("batch"),
            item_bytes=2 if compute.dtype == "bfloat16" else FLOAT32_BYTES,
            remat=compute.remat,
            logits_mib=int(compute.logits_mib),
        )

    @property
    def rows(self) -> float:
        """Tokens of a microbatch."""
        return self.sequences * self.config.seq / self.split.parts("seq")

    @property
    def residual(self) -> float:
        """Bytes of the residual stream between blocks."""
        return self.rows * self.split.parts("seq") / self.split.parts("block_seq") * self.split.width * self.item_bytes

    @property
    def whole_rows(self) -> float:
        """Bytes of an activation as wide as the residual stream, inside a block."""
        return self.rows * self.split.width * self.item_bytes

    @property
    def heads(self) -> float:
        """Bytes of queries, keys, values and the output of attention."""
        split = self.split
        return self.rows * (split.query_width + split.key_width + split.mixed_width) * self.item_bytes

    @property
    def hidden(self) -> float:
        """Bytes of the feed-forward layer's products with its first matrices."""
        return self.rows * self.split.hidden_width * self.item_bytes

    @functools.cached_property
    def logits(self) -> float:
        """Logits of attention in one layer, as many as ops/attend computes."""
        seq = self.config.seq
        computed = sum((part.stop - part.start) * part.stop for part in causal.parts(seq))
        return self._queries * computed

    @functools.cached_property
    def largest_logits(self) -> float:
        """Logits of the largest part of the queries."""
        last = causal.parts(self.config.seq)[-1]
        return self._queries * (last.stop - last.start) * last.stop

    @property
    def _queries(self) -> float:
        heads = self.split.decoder.layer.attention.heads / self.split.parts("heads")
        return self.sequences * heads / self.split.parts("seq")

    @property
    def vocab_logits(self) -> float:
        """Bytes of the float32 logits of the vocabulary."""
        return self.rows * self.split.decoder.padded_vocab / self.split.parts("vocab") * FLOAT32_BYTES

    def elements(self, *stages: str, gathered: bool = False) -> float:
        """Elements of the parameters of these stages; `gathered` over the axes that split the weights of a layer."""
        measure = self.split.gathered if gathered else self.split.elements
        return sum(measure(one.axes, one.shape) for one in self.table if one.stage in stages)

    @functools.cached_property
    def layer_weights(self) -> float:
        """Bytes of the weights of one layer, gathered, in the compute dtype."""
        return self.elements("blocks", gathered=True) / self.split.layers * self.item_bytes

    @functools.cached_property
    def all_elements(self) -> float:
        """Elements of all parameters."""
        return self.elements("embed", "blocks", "head")

    def elements_with(self, name: str) -> float:
        """Elements of the parameters that have a dimension of this name."""
        return sum(self.split.elements(one.axes, one.shape) for one in self.table if name in one.axes)

    @functools.cached_property
    def sum_elements(self) -> float:
        """Elements of the sums of gradients."""
        return sum(self.split.elements(one.axes, one.shape, self.split.moments) for one in self.table)

    @functools.cached_property
    def slot_elements(self) -> float:
        """Elements of the optimizer's state."""
        total = 0.0
        for rule in self.config.optimizer.slots.values():
            for one in self.table:
                axes = rule(one.axes, one.shape)
                sizes = dict(zip(one.axes, one.shape, strict=True))
                # a dimension that only the slot leaves unnamed has size 1
                shape = one.shape if axes == one.axes else tuple(sizes[name] if name else 1 for name in axes)
                total += self.split.elements(axes, shape, self.split.moments)
        return total

    @functools.cached_property
    def kept(self) -> dict[str, float]:
        """Bytes of each activation of a layer that a policy of `compute.remat` can keep."""
        queries, keys = self.rows * self.split.query_width, self.rows * self.split.key_width
        return {
            "block_in": self.residual,
            "qkv": (queries + keys) * self.item_bytes,
            "attn_out": self.rows * self.split.mixed_width * self.item_bytes,
            "mlp_hidden": self.hidden,
        }

    def group(self, axes: Sequence[str] | None) -> DeviceGroup:
        """The devices along these mesh axes."""
        size = stride = inner = 1
        for axis, n in reversed(self.split.shape.items()):
            if axis in (axes or ()):
                stride = inner if size == 1 else stride
                size *= n
            inner *= n
        return DeviceGroup(size, stride)
