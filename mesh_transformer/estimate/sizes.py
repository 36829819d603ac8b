"""The arrays of a training step on one device, from the specification of a decoder: no array is traced.

`Decoder.arrays` lists the parameters. Each dimension has a name, and the rules of the mesh (config/mesh.py) say into
how many parts it is split, so that a new mesh axis needs no change here. A new mechanism needs none either.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jax.sharding import AbstractMesh

from mesh_transformer import platforms
from mesh_transformer.accelerators import Accelerator, CompileTarget
from mesh_transformer.config import Config
from mesh_transformer.config.mesh import MeshShape, moment_rules, training_rules
from mesh_transformer.estimate.collectives import DeviceGroup
from mesh_transformer.estimate.gpus import compute_capability
from mesh_transformer.models.block import KEPT
from mesh_transformer.models.placement import with_whole_heads
from mesh_transformer.ops.attend import causal, kernels
from mesh_transformer.parallel.sharding import Partition
from mesh_transformer.spec import Array, Arrays, AttentionMixer, Axes, Branch, Decoder, Layer, Mechanism
from mesh_transformer.spec.arrays import Role

FLOAT32_BYTES = 4
# positions of a block of queries or keys of a kernel of attention
KERNEL_BLOCK = 512


@dataclass(frozen=True)
class StepSizes:
    """The quantities from which memory and time follow, all of one device."""

    config: Config
    accelerator: Accelerator
    decoder: Decoder
    # of weights and activations, and of the sums of gradients and the optimizer's state
    partition: Partition
    moments: Partition
    # the virtual stages over which a pipeline splits a group of layers: `MeshConfig.virtual_stages`
    virtual_stages: int
    # microbatches, and sequences of one on this device
    accumulation: int
    sequences: float
    # bytes of an element of an activation
    item_bytes: int
    remat: str
    logits_mib: int
    # of the layers of each kind, the kernel that computes attention, or kernels.PLAIN
    kernels: dict[Layer, str]

    @classmethod
    def of(cls, config: Config, shape: MeshShape, accelerator: Accelerator) -> "StepSizes":
        compute = platforms.resolve(config.compute, "tpu" if accelerator.is_tpu else "gpu")
        mesh = AbstractMesh(tuple(shape.values()), tuple(shape))
        partition = with_whole_heads(Partition(mesh, training_rules(config.mesh)), config.decoder)
        return cls(
            config=config,
            accelerator=accelerator,
            decoder=config.decoder,
            partition=partition,
            moments=partition.with_rules(**moment_rules(config.mesh)),
            virtual_stages=config.mesh.virtual_stages(shape),
            accumulation=config.optimizer.gradient_accumulation_steps,
            sequences=config.microbatch(shape) / partition.size("batch"),
            item_bytes=2 if compute.dtype == "bfloat16" else FLOAT32_BYTES,
            remat=compute.remat,
            logits_mib=int(compute.logits_mib),
            kernels=_kernels(config, compute.attention, compute.dtype, accelerator),
        )

    @functools.cached_property
    def table(self) -> Arrays:
        """All parameters, by their path."""
        return self.decoder.arrays(self.virtual_stages)

    @functools.cached_property
    def trained(self) -> Arrays:
        """The trained parameters, by their path: all, or the adapters."""
        adapted = self.decoder.adapted
        return {path: array for path, array in self.table.items() if array.adapter or not adapted}

    @functools.cached_property
    def _parts(self) -> dict[str | None, int]:
        return {name: self.partition.size(name) for name in (None, *self.partition.rules)}

    @functools.cached_property
    def _moment_parts(self) -> dict[str | None, int]:
        return {name: self.moments.size(name) for name in (None, *self.moments.rules)}

    def parts(self, name: str | None) -> int:
        """Devices that split a named dimension."""
        return self._parts[name]

    def array_elements(self, axes: Axes, shape: tuple[int, ...], *, moments: bool = False) -> float:
        """Elements of an array on one device. `moments`: of the sums of gradients or the optimizer's state."""
        counts = self._moment_parts if moments else self._parts
        return math.prod(shape) / math.prod([counts[name] for name in axes])

    def gathered_elements(self, axes: Axes, shape: tuple[int, ...]) -> float:
        """Elements of a parameter on one device after `gather_weights`."""
        return self.array_elements(axes, shape) * self.parts("embed" if "embed" in axes else None)

    def products(self, array: Array) -> float:
        """Elements of a matrix of one layer by which a device multiplies each of its tokens. Devices that split experts
        exchange tokens, so each device computes as many tokens as it has."""
        return array.used / math.prod(self.parts(name) for name in array.axes if name not in ("embed", "experts"))

    @property
    def width(self) -> int:
        """D, the residual width, which no axis splits."""
        return self.decoder.d_model

    @property
    def rows(self) -> float:
        """Tokens of a microbatch."""
        return self.sequences * self.config.seq / self.parts("seq")

    @property
    def residual(self) -> float:
        """Bytes of the residual stream between blocks."""
        return self.rows * self.parts("seq") / self.parts("block_seq") * self.width * self.item_bytes

    @property
    def whole_rows(self) -> float:
        """Bytes of an activation as wide as the residual stream, inside a block."""
        return self.rows * self.width * self.item_bytes

    @property
    def vocab_logits(self) -> float:
        """Bytes of the float32 logits of the vocabulary."""
        return self.rows * self.decoder.padded_vocab / self.parts("vocab") * FLOAT32_BYTES

    @functools.cached_property
    def layers(self) -> list["LayerSizes"]:
        """The kinds of layers, each with the number of its layers that a device computes."""
        pipelined, counts = self.decoder.pipelined_group(self.virtual_stages), dict.fromkeys(self.decoder.kinds, 0.0)
        for number, group in enumerate(self.decoder.layer_groups):
            for kind in group.period:
                counts[kind] += group.repeats / (self.parts("layers") if number == pipelined else 1)
        return [LayerSizes(self, kind, count) for kind, count in counts.items()]

    def elements(self, *stages: str, gathered: bool = False) -> float:
        """Elements of the parameters of these stages; `gathered` over the axes that split the weights of a layer."""
        measure = self.gathered_elements if gathered else self.array_elements
        return sum(
            measure(array.axes, array.shape) for path, array in self.table.items() if path.partition("/")[0] in stages
        )

    @functools.cached_property
    def all_elements(self) -> float:
        """Elements of all parameters."""
        return self.elements("embed", "blocks", "head")

    @functools.cached_property
    def trained_elements(self) -> float:
        """Elements of the trained parameters."""
        return sum(self.array_elements(array.axes, array.shape) for array in self.trained.values())

    def elements_with(self, name: str) -> float:
        """Elements of the trained parameters that have a dimension of this name."""
        return sum(
            self.array_elements(array.axes, array.shape) for array in self.trained.values() if name in array.axes
        )

    @functools.cached_property
    def sum_elements(self) -> float:
        """Elements of the sums of gradients."""
        return sum(self.array_elements(array.axes, array.shape, moments=True) for array in self.trained.values())

    @functools.cached_property
    def slot_elements(self) -> float:
        """Elements of the optimizer's state."""
        total = 0.0
        for rule in self.config.optimizer.slots.values():
            for array in self.trained.values():
                axes = rule(array.axes, array.shape)
                sizes = dict(zip(array.axes, array.shape, strict=True))
                # a dimension that only the slot leaves unnamed has size 1
                shape = array.shape if axes == array.axes else tuple(sizes[name] if name else 1 for name in axes)
                total += self.array_elements(axes, shape, moments=True)
        return total

    def group(self, axes: Sequence[str] | None) -> DeviceGroup:
        """The devices along these mesh axes."""
        size = stride = inner = 1
        for axis, n in reversed(self.partition.mesh.shape.items()):
            if axis in (axes or ()):
                stride = inner if size == 1 else stride
                size *= n
            inner *= n
        return DeviceGroup(size, stride)


def _kernels(config: Config, setting: str, dtype: str, accelerator: Accelerator) -> dict[Layer, str]:
    kind = accelerator.name
    target = CompileTarget("tpu", kind) if accelerator.is_tpu else CompileTarget("gpu", compute_capability(kind))
    documents = config.data.packing == "documents"
    cases = kernels.cases_of_kinds(config.decoder, target, dtype, config.seq, segments=documents)
    return {kind: kernels.choose(setting, case) for kind, case in cases.items()}


@dataclass(frozen=True)
class LayerSizes:
    """The quantities of one layer of a kind, all of one device."""

    step: StepSizes
    kind: Layer
    # the layers of this kind that the device computes
    count: float

    @property
    def attention(self) -> AttentionMixer:
        """The mechanism that attends."""
        return self.kind.attention

    @functools.cached_property
    def mixing(self) -> tuple[float, float]:
        """Elements of the matrices of attention by which a device multiplies a token, over D: (input and inner
        matrices, output matrix)."""
        return self._columns([self.attention])

    @functools.cached_property
    def feeding(self) -> tuple[float, float]:
        """The elements of `mixing` for the feed-forward mechanisms."""
        return self._columns([mechanism for mechanism in self.kind.mechanisms if mechanism is not self.attention])

    def _columns(self, mechanisms: Sequence[Mechanism]) -> tuple[float, float]:
        """(input and inner matrices, output matrices): elements over D."""
        sums: dict[Role, float] = defaultdict(float)
        for mechanism in mechanisms:
            for array in mechanism.arrays(self.step.width).values():
                sums[array.role] += self.step.products(array) / self.step.width
        return sums["input"] + sums["inner"], sums["output"]

    @property
    def kernel(self) -> str:
        """The kernel that computes attention, which never writes logits to memory; or kernels.PLAIN."""
        return self.step.kernels[self.kind]

    @property
    def query_bytes(self) -> float:
        """Bytes of the queries of all heads."""
        key, _ = self.attention.keys_and_values
        return self._bytes(self.attention.heads * key.width / self.step.parts("heads"))

    @property
    def key_bytes(self) -> float:
        """Bytes of keys and values."""
        step = self.step
        return self._bytes(sum(e.heads * e.width / step.parts(e.name) for e in self.attention.keys_and_values))

    @property
    def mixed_bytes(self) -> float:
        """Bytes of the output of attention before its last matrix."""
        _, value = self.attention.keys_and_values
        return self._bytes(self.attention.heads * value.width / self.step.parts("heads"))

    @property
    def hidden(self) -> float:
        """Bytes of the hidden values: the products with the input and inner matrices of the feed-forward mechanisms."""
        return self._bytes(self.feeding[0])

    def _bytes(self, width: float) -> float:
        return self.step.rows * width * self.step.item_bytes

    @functools.cached_property
    def logits(self) -> float:
        """Logits of attention, as many as ops/attend computes."""
        computed = sum((part.stop - part.start) * part.stop for part in causal.parts(self.step.config.seq))
        return self._queries * computed

    @property
    def kernel_logits(self) -> float:
        """Logits of the blocks that a kernel of attention computes. Windows are not considered."""
        seq = self.step.config.seq
        return self._queries * seq * (seq + min(KERNEL_BLOCK, seq)) / 2

    @functools.cached_property
    def largest_logits(self) -> float:
        """Logits of the largest part of the queries."""
        last = causal.parts(self.step.config.seq)[-1]
        return self._queries * (last.stop - last.start) * last.stop

    @property
    def _queries(self) -> float:
        heads = self.attention.heads / self.step.parts("heads")
        return self.step.sequences * heads / self.step.parts("seq")

    @functools.cached_property
    def kept(self) -> dict[str, float]:
        """Bytes of each activation that a policy of `compute.remat` can keep."""
        return {
            "block_in": self.step.residual,
            "qkv": self.query_bytes + self.key_bytes,
            "attn_out": self.mixed_bytes,
            "mlp_hidden": self.hidden,
        }

    @functools.cached_property
    def arrays(self) -> Arrays:
        """The parameters of the layer."""
        return self.step.decoder.layer_arrays(self.kind)

    @property
    def matrices(self) -> int:
        """The number of matrices, without narrow ones."""
        return sum(array.role != "other" for array in self.arrays.values())

    @property
    def split_vectors(self) -> int:
        """The number of biases and scales of norms that `mesh.fsdp` splits."""
        return sum(array.role == "other" and "embed" in array.axes for array in self.arrays.values())

    @functools.cached_property
    def weights(self) -> float:
        """Bytes of the gathered weights in the compute dtype."""
        elements = sum(self.step.gathered_elements(array.axes, array.shape) for array in self.arrays.values())
        return elements * self.step.item_bytes

    @property
    def biased(self) -> float:
        """Bytes of the activations to which biases are added."""
        total = 0.0
        for mechanism in self.kind.mechanisms:
            if any(path.endswith("/b") for path in mechanism.arrays(self.step.width)):
                total += self.kept["qkv"] if mechanism is self.attention else self.hidden
            total += mechanism.out_bias * self.step.whole_rows
        return total

    @property
    def norms(self) -> int:
        """The number of norms of the residual stream."""
        return sum(len(branch.norms) for branch in self.kind.branches)

    @property
    def branches(self) -> int:
        """The number of branches: each needs a sum over tensor-parallel shards in the forward pass."""
        return len(self.kind.branches)

    @property
    def readings(self) -> int:
        """The number of different inputs of mechanisms: each needs a sum over shards in the backward pass."""
        return sum(len(branch.readings) for branch in self.kind.branches)

    def needs_output(self, attention: bool) -> bool:
        """Whether the backward pass needs the output of the branch with attention, else of the feed-forward branch."""
        return any(attention == (self.attention in branch.mechanisms) for branch in self.needed)

    @property
    def needed(self) -> list[Branch]:
        """The branches whose outputs the backward pass needs. The last branch is one of them if a norm follows it."""
        *first, last = self.kind.branches
        return [*first, last] if last.post is not None else first

    @functools.cached_property
    def again(self) -> "Recomputed":
        """What the backward pass computes again."""
        return Recomputed.of(self)


class Recomputed(NamedTuple):
    """What the backward pass of a layer computes again."""

    qkv: bool
    logits: bool
    mixed: bool
    out: bool
    hidden: bool
    ff_out: bool
    norms: bool
    # sums over tensor-parallel shards
    sums: int

    @classmethod
    def of(cls, layer: "LayerSizes") -> "Recomputed":
        if layer.step.remat == "none":
            return cls(*(False,) * 7, sums=0)
        kept = KEPT[layer.step.remat]
        return cls(
            qkv="qkv" not in kept,
            logits=True,
            mixed="attn_out" not in kept,
            out=layer.needs_output(attention=True),
            hidden="mlp_hidden" not in kept,
            ff_out=layer.needs_output(attention=False),
            norms=True,
            sums=len(layer.needed),
        )
