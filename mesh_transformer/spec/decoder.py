"""A decoder as plain data, without jax. A family's config returns a `Decoder`, which models/model.py computes."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from mesh_transformer.fields import PIPELINED, WHOLE, Size
from mesh_transformer.spec.arrays import Array, Arrays, below, matrix, with_outputs
from mesh_transformer.spec.feed_forward import ExpertsSpec
from mesh_transformer.spec.forms import Form, stored
from mesh_transformer.spec.layer import Layer
from mesh_transformer.spec.layer_groups import LayerGroup, in_group, layer_groups_of, pipelined_group, starts
from mesh_transformer.spec.mechanism import AttentionMixer, Mechanism, PerLayer, PositionEncoding
from mesh_transformer.spec.norm import NormSpec

# buckets of distances in T5's relative bias
T5_BUCKETS = 32
# the standard deviation of fresh tables of positions and of distances
TABLE_STDDEV = 0.02


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A whole model. Its layers may differ in their numbers (`PerLayer`), and in their kinds."""

    d_model: int
    n_vocab: int
    # the vocabulary tables are padded to a multiple of this number, whatever the mesh
    vocab_multiple: int
    # longest context
    seq: int
    layers: tuple[Layer, ...]
    final_norm: NormSpec
    embed_bias: bool = False
    # the token embeddings are multiplied by this number
    embed_scale: float = 1.0
    # a norm of the embedding
    embed_norm: NormSpec | None = None
    learned_positions: bool = False
    # the number of first rows of the position table that no position uses
    unused_positions: int = 0
    # T5's bias by head and bucket of distance, shared by all layers
    relative_bias: bool = False
    # the head uses the token embeddings as its weights
    tied: bool = False
    head_bias: bool = False
    # the logits are multiplied by this number, and then become softcap * tanh(logits / softcap)
    logit_scale: float = 1.0
    softcap: float | None = None
    # how the matrices of the layers are stored; one form after the other applies to a matrix
    forms: tuple[Form, ...] = ()

    @functools.cached_property
    def kinds(self) -> dict[Layer, int]:
        """The kinds of layers, each with the number of its layers."""
        counts: dict[Layer, int] = {}
        for group in self.layer_groups:
            for kind in group.period:
                counts[kind] = counts.get(kind, 0) + group.repeats
        return counts

    @functools.cached_property
    def layer_groups(self) -> tuple[LayerGroup[Layer], ...]:
        """The layers by their kinds, in order: DeepSeek-V3 has (dense) x 3 and (experts) x 58."""
        # many layers are one object: its kind is made once
        kinds: dict[int, Layer] = {id(layer): layer.kind for layer in self.layers}
        # equal kinds become one object, which compares fast
        same: dict[Layer, Layer] = {}
        return layer_groups_of([same.setdefault(kind, kind) for kind in (kinds[id(layer)] for layer in self.layers)])

    def pipelined_group(self, virtual_stages: int = 1) -> int | None:
        """The number of the group that a pipeline splits over its virtual stages: see `spec.pipelined_group`."""
        return pipelined_group(self.layer_groups, virtual_stages)

    def loop_trips(self, virtual_stages: int = 1) -> int:
        """Iterations of the scan over the layers of a virtual stage."""
        number = self.pipelined_group(virtual_stages)
        return 0 if number is None else self.layer_groups[number].repeats // virtual_stages

    def mechanisms(self) -> Iterator[Mechanism]:
        """The mechanisms of all kinds of layers."""
        for kind in self.kinds:
            yield from kind.mechanisms

    @functools.cached_property
    def attentions(self) -> tuple[AttentionMixer, ...]:
        """The different mechanisms that attend, without their numbers."""
        return tuple(dict.fromkeys(kind.attention for kind in self.kinds))

    @property
    def kv_heads(self) -> int:
        """The largest number that divides the heads of keys and values of every layer."""
        return math.gcd(*(attention.keys_and_values[0].heads for attention in self.attentions))

    @functools.cached_property
    def experts(self) -> ExpertsSpec | None:
        """The routed experts of the layers; None in a dense model."""
        return next((mechanism for mechanism in self.mechanisms() if isinstance(mechanism, ExpertsSpec)), None)

    @functools.cached_property
    def expert_layers(self) -> int:
        """The number of layers with experts."""
        return sum(
            count
            for kind, count in self.kinds.items()
            for mechanism in kind.mechanisms
            if isinstance(mechanism, ExpertsSpec)
        )

    @functools.cached_property
    def numbers(self) -> tuple[PerLayer, ...]:
        """The numbers of each layer."""
        return tuple(layer.numbers for layer in self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct windows of the layers; None for layers without a window."""
        return tuple(dict.fromkeys(numbers.window for numbers in self.numbers))

    @functools.cached_property
    def position_encodings(self) -> dict[PositionEncoding, tuple[PositionEncoding, ...]]:
        """The different position encodings of attention, by their kind."""
        by_kind: dict[PositionEncoding, dict[PositionEncoding, None]] = {}
        for numbers in dict.fromkeys(self.numbers):
            if numbers.positions is not None:
                by_kind.setdefault(numbers.positions.kind, {})[numbers.positions] = None
        return {kind: tuple(encodings) for kind, encodings in by_kind.items()}

    @property
    def padded_vocab(self) -> int:
        """Rows of the vocabulary tables, with their padding."""
        return -(-self.n_vocab // self.vocab_multiple) * self.vocab_multiple

    @functools.cached_property
    def stacks(self) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
        """The stacks of each parameter of a layer, such as `attention/q/w`: for each group of layers that has the
        parameter, the path of the stack below blocks/, and the layers, which are the rows of the stack."""
        stacks: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
        for number, (group, start) in enumerate(zip(self.layer_groups, starts(self.layer_groups), strict=False)):
            layers: dict[str, list[int]] = {}
            for layer, kind in enumerate(group.kinds, start):
                for path in self.layer_arrays(kind):
                    layers.setdefault(path, []).append(layer)
            for path, rows in layers.items():
                stacks.setdefault(path, []).append((in_group(path, number, len(self.layer_groups)), tuple(rows)))
        return stacks

    def arrays(self, virtual_stages: int = 1) -> Arrays:
        """All parameters by their path. The arrays of the layers are stacked by group of layers and module.

        Args:
            virtual_stages: pipeline stages x rounds; one group is split over them (`pipelined_group`).
        """
        pipelined = self.pipelined_group(virtual_stages)
        blocks: Arrays = {}
        for number, group in enumerate(self.layer_groups):
            axis = PIPELINED if number == pipelined else WHOLE
            rows: dict[str, int] = {}
            for kind in group.period:
                for path, array in self.layer_arrays(kind).items():
                    rows[path] = rows.get(path, 0) + group.repeats
                    name = in_group(path, number, len(self.layer_groups))
                    stacked = (axis, *array.axes), (rows[path], *array.shape)
                    blocks[name] = array._replace(axes=stacked[0], shape=stacked[1], used=array.used * rows[path])
        return {**below("embed", self.embedding_arrays), **below("blocks", blocks), **below("head", self.head_arrays)}

    @functools.cached_property
    def adapted(self) -> bool:
        """Whether adapters are trained, and all other parameters are frozen."""
        return any(array.adapter for kind in self.kinds for array in self.layer_arrays(kind).values())

    def layer_arrays(self, kind: Layer) -> Arrays:
        """The parameters of one layer of a kind, by module and name, such as `attention/q/w`."""
        return _stored(kind, self.d_model, self.output_stddev, self.forms)

    def matrices(self, kind: Layer) -> Arrays:
        """`layer_arrays` as the modules of a layer read them, whatever the forms of the matrices."""
        return _arrays(kind, self.d_model, self.output_stddev)

    @functools.cached_property
    def matrices_by_path(self) -> Arrays:
        """The matrices of all kinds of layers as their modules read them, by path such as `attention/q/w`."""
        return {
            path: array
            for kind in self.kinds
            for path, array in self.matrices(kind).items()
            if len(array.shape) == len(array.dims)
        }

    @property
    def output_stddev(self) -> float:
        """The standard deviation of a fresh model's matrices whose products the layers add to the residual stream."""
        return 2 / len(self.layers) / math.sqrt(self.d_model)

    @functools.cached_property
    def embedding_arrays(self) -> Arrays:
        """The parameters of the embedding."""
        tokens, stddev = (self.padded_vocab, self.d_model), 1 / math.sqrt(self.n_vocab)
        arrays = {"tokens/w": Array(("vocab", "embed"), tokens, stddev=stddev)}
        if self.embed_bias:
            arrays["tokens/b"] = Array(("embed",), (self.d_model,))
        if self.embed_norm is not None:
            arrays |= below("norm", self.embed_norm.arrays("embed", self.d_model))
        if self.learned_positions:
            positions = self.unused_positions + self.seq, self.d_model
            arrays["positions/w"] = Array((None, "embed"), positions, stddev=TABLE_STDDEV)
        if self.relative_bias:
            buckets = self.attentions[0].heads, T5_BUCKETS
            arrays["relative/w"] = Array(("heads", None), buckets, stddev=TABLE_STDDEV)
        return arrays

    @functools.cached_property
    def head_arrays(self) -> Arrays:
        """The parameters of the final norm and of the logits, without a table that is tied to the embedding."""
        arrays = below("norm", self.final_norm.arrays("embed", self.d_model))
        if not self.tied:
            arrays["logits/w"] = matrix(("embed", "vocab"), (self.d_model, self.padded_vocab), "output")
            if self.head_bias:
                arrays["logits/b"] = Array(("vocab",), (self.padded_vocab,))
        return arrays

    @property
    def sizes(self) -> dict[str, list[Size]]:
        """The sizes of the model's named dimensions of parameters and activations, with the fields that set them."""
        vocab = Size("model.n_vocab", self.n_vocab, "model.vocab_multiple", self.vocab_multiple)
        width = [Size("model.d_model", self.d_model)]
        sizes = {"act_embed": width, "embed": width, "heads": [], "mlp": [], "experts": [], "vocab": [vocab]}
        for mechanism in dict.fromkeys(self.mechanisms()):
            for name, given in mechanism.sizes:
                if given not in sizes[name]:
                    sizes[name].append(given)
        return sizes


# all layers of a kind have the same arrays
@functools.cache
def _arrays(kind: Layer, width: int, output_stddev: float) -> Arrays:
    return with_outputs(kind.arrays(width), output_stddev)


@functools.cache
def _stored(kind: Layer, width: int, output_stddev: float, forms: tuple[Form, ...]) -> Arrays:
    return stored(_arrays(kind, width, output_stddev), forms)
