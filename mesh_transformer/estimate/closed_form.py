"""The memory and the time of a training step in closed form: no compiler, no array is traced.

It ranks meshes, policies and microbatches, so that only the best of them are compiled. Memory is the largest sum of the
arrays that live at once. Time is a sum of passes over arrays, of matrix products and of collectives. The constants are
fitted to programs that libtpu 0.0.42.1 (jax 0.10.2) compiled, whose times are the compiler's own estimates;
tests/estimate/test_closed_form.py has them.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mesh_transformer import slices
from mesh_transformer.accelerators import ACCELERATORS, Accelerator
from mesh_transformer.config import Config
from mesh_transformer.errors import UserError
from mesh_transformer.estimate import experts
from mesh_transformer.estimate.collectives import DeviceGroup, collective_seconds
from mesh_transformer.estimate.sizes import FLOAT32_BYTES, LayerSizes, StepSizes
from mesh_transformer.models.model import KEPT

GIB, MIB = 2**30, 2**20


class Fit(NamedTuple):
    """What the programs of one generation of TPUs reach, by the compiler's estimates."""

    # of the peak, by the matrix products of the layers
    product_share: float
    # bytes of an activation that one core processes in a cycle, in one pass
    pass_bytes: float
    # cycles of a core for one logit of attention, forward and backward, while the logits are in its vector memory
    logit_cycles: float
    # bytes of the logits of one part of the queries that fit into the vector memory
    logit_room: float


FITTED = {
    "v3": Fit(0.96, 145, 0, 0),
    "v4": Fit(0.88, 135, 0, 0),
    "v5e": Fit(0.92, 141, 0.05, 48 * MIB),
    "v6e": Fit(0.80, 249, 0.05, 48 * MIB),
}
"""From the step of GPT-J-6B on v3-8, v5e-8 and v6e-8 (tp 8), v4-8 (tp 4), and for the room on v5e-8 (fsdp 8). v5e and
v6e have 128 MiB of vector memory. v3 and v4 have 16 MiB, in which logits never stay."""
LIKE = {"v2": "v3", "v5p": "v4", "v7x": "v6e"}
"""Generations without a compiled program, and the nearest one that has."""
# bytes between memory and core for one logit of attention, forward and backward
LOGIT_TRAFFIC = 85.0
# of the peak in large products of an H200, 750 of 989 TFLOP/s; of the memory's rate in a pass, which is not measured
GPU_PRODUCT_SHARE, GPU_PASS_SHARE = 0.76, 0.8

# Passes over an activation in a layer, from the ops of GPT-J-6B's step on a v3-8. "Forward" counts again if recomputed.
NORM_FORWARD, NORM_BACKWARD = 2.0, 3.75
# a sum with the residual stream and its gradient
ADDITION = 1.65
# to store and to load what the backward pass keeps
KEEP_AND_LOAD = 2.6
# the gradient of a bias: a product with ones
BIAS_GRADIENT = 2.0
# the feed-forward layer's activation function, and copies
HIDDEN_FORWARD, HIDDEN_BACKWARD = 2.1, 4.2
# rotary encoding and changes of layout, over queries, keys, values and the output of attention together
HEADS_FORWARD, HEADS_BACKWARD = 2.0, 3.5
# parts of the work on the logits of attention
LOGITS_FORWARD, LOGITS_BACKWARD = 0.3, 0.4
# passes over the float32 logits of the vocabulary
VOCAB_PASSES = 1.3
# passes over the weights of layers and embedding in a microbatch: gradients are zeroed, matrices copied from the stack
WEIGHT_PASSES = 2.0
# bytes of memory traffic for each element of a parameter: to add a gradient to the float32 sums, and to update
SUM_TRAFFIC, UPDATE_TRAFFIC = 15.5, 50.0

# Arrays that live at once in the backward pass of a layer, as multiples of the float32 logits of one part of the
# queries, of the feed-forward layer's hidden values, and of an activation as wide as the residual stream: from the
# peaks of a 13B model on v3-256 and of a 16B model on v5e-256, both fsdp 256.
LIVE_LOGITS, LIVE_HIDDEN, LIVE_ROWS = 6.0, 1.5, 2.6
# arrays that live at once in the loss, as a multiple of the float32 logits of one chunk
LIVE_VOCAB_LOGITS = 2.5
# What is kept without recomputation: of a norm, as a multiple of its output (three arrays in float32, and the output);
# of the hidden values, where fsdp splits the weights, which recomputes nothing but gathers, and elsewhere.
KEPT_OF_NORM = 7.0
KEPT_OF_HIDDEN_FSDP, KEPT_OF_HIDDEN = 6.0, 2.0

# What a product in parts costs more than one product, for each permutation of the ring of ops/collective_matmul.py:
# seconds, and passes over the part that is sent. From steps of GPT-J-6B with mesh.overlap_tp on v4-8 (tp 4) and on
# v5e-8 (tp 8, microbatches of one and of four sequences): smaller products, copies of the hidden values, biases on
# their own.
RING_STEP_S, RING_PASSES = 6e-6, 2.5

# Chips for which libtpu compiles a reduce-scatter of activations as a sum and a slice.
WITHOUT_REDUCE_SCATTER = ("v2", "v3")


@dataclass(frozen=True)
class Estimate:
    """What a training step needs on one device."""

    # GiB by use, at the moment when their sum is largest
    memory: Mapping[str, float]
    # seconds by part
    time: Mapping[str, float]

    @property
    def gib(self) -> float:
        """The largest memory in use."""
        return sum(self.memory.values())

    @property
    def seconds(self) -> float:
        """The time of the step."""
        return sum(self.time.values())


def estimate(
    config: Config, n_devices: int, accelerator: Accelerator, *, fused_attention: float | None = None
) -> Estimate:
    """The estimate for a config on `n_devices` devices. `mesh.overlap_tp` is not "auto": see `overlap.resolve`.

    Args:
        fused_attention: share of the peak that a kernel reaches, if it never writes logits to memory (Dao et al. 2022,
            arXiv:2205.14135); None: the attention of ops/attend.

    Raises:
        UserError: the mesh does not fit the devices or does not divide a size, or they are several GPUs.
    """
    check_modelled(n_devices, accelerator)
    step = StepSizes.of(config, config.check_devices(n_devices), accelerator)
    return Estimate(_memory(step, fused_attention is not None), _time(step, fused_attention))


def step_gib(config: Config, n_devices: int) -> dict[str, float]:
    """GiB by use on one device of any kind. No field of `config.compute` is "auto"."""
    # the rates of a device have no effect on memory
    return _memory(StepSizes.of(config, config.check_devices(n_devices), ACCELERATORS["v4"]), fused=False)


def check_modelled(n_devices: int, accelerator: Accelerator) -> None:
    """Raises UserError for several GPUs: the links between them are not in the table of accelerators."""
    if n_devices > 1 and not accelerator.is_tpu:
        raise UserError(
            f"{n_devices} devices of {accelerator.name}: the time of transfers between GPUs is not modelled, give one "
            "device or a TPU slice"
        )


class _Rates(NamedTuple):
    """The rates of one device."""

    # FLOP/s of matrix products
    products: float
    # bytes/s of a pass over an activation, and of the memory
    passes: float
    memory: float
    # seconds of a logit of attention in vector memory, and bytes of logits that fit into it
    logit: float = 0.0
    logit_room: float = 0.0

    @classmethod
    def of(cls, accelerator: Accelerator) -> "_Rates":
        peak, memory = 1e12 * accelerator.peak_tflops, 1e9 * accelerator.memory_gb_s
        if not accelerator.is_tpu:
            return cls(GPU_PRODUCT_SHARE * peak, GPU_PASS_SHARE * memory, memory)
        fit = FITTED[LIKE.get(accelerator.name, accelerator.name)]
        generation = next(one for one in slices.GENERATIONS if one.name == accelerator.name)
        cores = generation.cores_per_chip / generation.devices_per_chip
        cycles = 1e9 * accelerator.clock_ghz * cores
        logit = fit.logit_cycles / cycles
        return cls(fit.product_share * peak, fit.pass_bytes * cycles, memory, logit, fit.logit_room)


class _Recomputed(NamedTuple):
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
    def of(cls, layer: LayerSizes) -> "_Recomputed":
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


def _memory(step: StepSizes, fused: bool) -> dict[str, float]:
    """GiB by use, at the end of the backward pass of a layer or in the loss, whichever needs more."""
    moment_bytes = 2 if getattr(step.config.optimizer, "moments_dtype", "float32") == "bfloat16" else FLOAT32_BYTES
    per_step = step.config.mesh.gather_weights == "per_step"
    weights = step.elements("embed", "blocks", "head", gathered=per_step) * step.item_bytes
    always = {
        "parameters": step.all_elements * FLOAT32_BYTES,
        "optimizer state": step.slot_elements * moment_bytes,
        "weights in the compute dtype": weights if step.item_bytes < FLOAT32_BYTES or per_step else 0.0,
        "sums of gradients": step.sum_elements * FLOAT32_BYTES if step.accumulation > 1 else 0.0,
        "kept activations": sum(layer.count * _kept_bytes(layer, fused) for layer in step.layers),
    }
    gathers = step.split.parts("embed") > 1 and not per_step
    live = max(_live_bytes(layer, fused) + (layer.weights if gathers else 0.0) for layer in step.layers)
    backward = {**always, "gradients": weights, "one layer": live}
    # the loss of a chunk of the positions, with the head's gradient in float32
    chunk = min(step.vocab_logits, MIB * step.logits_mib)
    head = step.elements("head", gathered=True)
    loss = {**always, "loss": LIVE_VOCAB_LOGITS * chunk + (FLOAT32_BYTES + step.item_bytes) * head}
    largest = max(backward, loss, key=lambda uses: sum(uses.values()))
    return {use: n_bytes / GIB for use, n_bytes in largest.items() if n_bytes}


def _live_bytes(layer: LayerSizes, fused: bool) -> float:
    """Bytes of the arrays that live at once in the backward pass of a layer."""
    logits = 0.0 if fused else layer.largest_logits * FLOAT32_BYTES
    live = LIVE_LOGITS * logits + LIVE_HIDDEN * layer.hidden + LIVE_ROWS * layer.step.whole_rows
    return live + experts.LIVE_ROWS * experts.rows_bytes(layer)


def _kept_bytes(layer: LayerSizes, fused: bool) -> float:
    """Bytes of the activations of a layer that are kept for the backward pass."""
    step = layer.step
    if step.remat != "none":
        return sum(layer.kept[name] for name in KEPT[step.remat])
    weights = 0.0 if fused else layer.logits * step.item_bytes
    norms = layer.norms * KEPT_OF_NORM * step.whole_rows
    hidden = (KEPT_OF_HIDDEN_FSDP if step.split.parts("embed") > 1 else KEPT_OF_HIDDEN) * layer.hidden
    return layer.kept["block_in"] + layer.kept["qkv"] + layer.kept["attn_out"] + hidden + norms + weights


def _time(step: StepSizes, fused_attention: float | None) -> dict[str, float]:
    """Seconds of a step by part."""
    rates = _Rates.of(step.accelerator)
    copied = step.elements("embed", "blocks", gathered=True) * step.item_bytes
    microbatches = {
        "products": sum(layer.count * _products(layer, rates) for layer in step.layers),
        "attention": sum(layer.count * _attention(layer, rates, fused_attention) for layer in step.layers),
        "norms and activations": sum(layer.count * _passes(layer) for layer in step.layers) / rates.passes,
        "head": _head(step, rates),
        "copies of weights": WEIGHT_PASSES * copied / rates.passes,
        "sums of gradients": SUM_TRAFFIC * step.sum_elements / rates.memory if step.accumulation > 1 else 0.0,
        **_collectives(step, rates),
    }
    once = {
        "optimizer": UPDATE_TRAFFIC * step.sum_elements / rates.memory,
        **_collectives_of_a_step(step),
    }
    parts = {part: step.accumulation * seconds for part, seconds in microbatches.items()}
    for part, seconds in once.items():
        parts[part] = parts.get(part, 0.0) + seconds
    return {part: seconds for part, seconds in parts.items() if seconds}


def _products(layer: LayerSizes, rates: _Rates) -> float:
    """The matrix products of a layer. The backward pass has two for each of the forward pass."""
    step, again = layer.step, _Recomputed.of(layer)
    (qkv, out), (hidden, ff_out) = layer.mixing, layer.feeding
    recomputed = again.qkv * qkv + again.out * out + again.hidden * hidden + again.ff_out * ff_out
    columns = 3 * (qkv + out + hidden + ff_out) + recomputed
    return 2 * step.rows * step.split.width * columns / rates.products


def _attention(layer: LayerSizes, rates: _Rates, fused: float | None) -> float:
    """The products of queries, keys and values, the softmax, rotary encoding and changes of layout."""
    step, again = layer.step, _Recomputed.of(layer)
    # operations of queries with keys, or of the softmax with values: the mean of both
    product = layer.logits * layer.attention.products_per_key / layer.attention.heads
    heads = layer.query_bytes + layer.key_bytes + layer.mixed_bytes
    moved = (HEADS_FORWARD * (1 + again.qkv) + HEADS_BACKWARD) * heads / rates.passes
    if fused is not None:
        # a kernel computes the logits again in its backward pass
        return (2 * (1 + again.mixed) + 5) * product / (fused * 1e12 * step.accelerator.peak_tflops) + moved
    products = 6 + again.logits + again.mixed
    far = max(0.0, 1 - rates.logit_room / (layer.largest_logits * FLOAT32_BYTES))
    logit = (1 - far) * rates.logit + far * LOGIT_TRAFFIC / rates.memory
    softmax = (LOGITS_FORWARD * (1 + again.logits) + LOGITS_BACKWARD) * layer.logits * logit
    return products * product / rates.products + moved + softmax


def _passes(layer: LayerSizes) -> float:
    """Bytes of all passes over activations in a layer, but for attention."""
    step, again = layer.step, _Recomputed.of(layer)
    norms = layer.norms * (NORM_FORWARD * (1 + again.norms) + NORM_BACKWARD)
    additions = ADDITION * layer.branches
    hidden = HIDDEN_FORWARD * (1 + again.hidden) + HIDDEN_BACKWARD
    kept = sum(layer.kept[name] for name in KEPT.get(step.remat, layer.kept))
    passes = (norms + additions) * step.residual + hidden * layer.hidden
    return passes + BIAS_GRADIENT * layer.biased + KEEP_AND_LOAD * kept


def _head(step: StepSizes, rates: _Rates) -> float:
    """The products with the head's matrix, and the loss."""
    columns = step.split.decoder.padded_vocab / step.split.parts("vocab")
    return 6 * step.rows * step.split.width * columns / rates.products + VOCAB_PASSES * step.vocab_logits / rates.passes


def _sums_of_layer(layer: LayerSizes, rates: _Rates) -> float:
    """The tensor-parallel transfers of a layer."""
    step, again = layer.step, _Recomputed.of(layer)
    tensor = step.group(step.split.rules["mlp"])
    sums = layer.branches + layer.readings + again.sums
    if step.residual == step.whole_rows:
        return sums * _transfer(step.accelerator, "all-reduce", step.whole_rows, tensor)
    kind = "all-reduce" if step.accelerator.name in WITHOUT_REDUCE_SCATTER else "reduce-scatter"
    gathers = layer.branches * (2 + again.norms)
    seconds = sums * _transfer(step.accelerator, kind, step.whole_rows, tensor)
    seconds += gathers * _transfer(step.accelerator, "all-gather", step.whole_rows, tensor)
    if step.config.mesh.overlap_tp is not True:
        return seconds
    # the part of the transfers that products do not hide, and the cost of products in parts
    part = RING_STEP_S + RING_PASSES * step.whole_rows / tensor.size / rates.passes
    return max(0.0, seconds - _products(layer, rates)) + (sums + gathers) * (tensor.size - 1) * part


def _collectives(step: StepSizes, rates: _Rates) -> dict[str, float]:
    """The transfers of a microbatch, as if nothing ran beside them.

    libtpu schedules the transfers of the training step in this way, with two exceptions that partly cancel: on v5e-16
    and larger slices most gathers of weights run beside products, and the gradients are summed over all devices instead
    of scattered.
    """
    rules, embed = step.split.rules, step.split.rules["embed"] or ()
    tensor, weights = step.group(rules["mlp"]), step.group(embed)
    replicas = step.group([axis for axis in (*(rules["batch"] or ()), *(rules["seq"] or ())) if axis not in embed])
    seconds = functools.partial(_transfer, step.accelerator)
    # the sum of the embedding, and the sum of the gradient of the head's input
    ends = 2 * seconds("all-reduce", step.whole_rows, tensor)
    tables = step.elements("embed", "head", gathered=True) * step.item_bytes
    per_layer = step.config.mesh.gather_weights == "per_layer"
    moved = seconds("reduce-scatter", tables, weights) + per_layer * seconds("all-gather", tables, weights)
    for layer in step.layers:
        # a transfer for each matrix
        matrix, count = layer.weights / layer.matrices, layer.count * layer.matrices
        moved += count * seconds("reduce-scatter", matrix, weights)
        # no policy keeps gathered weights: the backward pass gathers them again
        moved += 2 * per_layer * count * seconds("all-gather", matrix, weights)
    kind = "all-reduce" if step.split.moments == rules else "reduce-scatter"
    once = step.config.mesh.sum_gradients == "per_step"
    # the devices that split the experts sum the gradients of all other parameters
    split = step.elements_with("experts")
    alike = step.group([axis for axis in rules["batch"] or () if axis not in (*embed, *(rules["experts"] or ()))])
    gradient = 0.0
    if not once:
        gradient = seconds(kind, (step.all_elements - split) * step.item_bytes, replicas)
        gradient += seconds(kind, split * step.item_bytes, alike)
    exchange = sum(experts.exchange_seconds(one, _Recomputed.of(one).hidden, seconds) for one in step.layers)
    return {
        "tensor-parallel sums": sum(one.count * _sums_of_layer(one, rates) for one in step.layers) + ends,
        "gathered weights": moved,
        "sums over replicas": gradient,
        "exchange of tokens": exchange,
    }


def _collectives_of_a_step(step: StepSizes) -> dict[str, float]:
    """The transfers that a step makes once: with mesh.gather_weights=per_step, mesh.sum_gradients=per_step and
    mesh.zero1."""
    embed, moments = step.split.rules["embed"] or (), step.split.moments["embed"] or ()
    seconds = {}
    if step.config.mesh.gather_weights == "per_step":
        whole = step.elements("embed", "blocks", "head", gathered=True) * step.item_bytes
        seconds["gathered weights"] = _transfer(step.accelerator, "all-gather", whole, step.group(embed))
    updated = step.group([axis for axis in moments if axis not in embed])
    n_bytes = step.all_elements * FLOAT32_BYTES
    seconds["sums over replicas"] = _transfer(step.accelerator, "all-gather", n_bytes, updated)
    if step.config.mesh.sum_gradients == "per_step":
        replicas = step.group([axis for axis in step.split.rules["batch"] or () if axis not in embed])
        seconds["sums over replicas"] += _transfer(step.accelerator, "all-reduce", n_bytes, replicas)
    return seconds


def _transfer(accelerator: Accelerator, kind: str, n_bytes: float, group: DeviceGroup) -> float:
    return collective_seconds(kind, round(n_bytes), group, accelerator)
