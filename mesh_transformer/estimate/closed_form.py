"""The memory and the time of a training step in closed form, without a compiler and without tracing.

It ranks meshes, policies and microbatches, so that only the best of them are compiled. Memory is the largest sum of the
arrays that live at once. Time is a sum of passes over arrays, of matrix products and of collectives. The constants are
fitted to programs that libtpu 0.0.42.1 (jax 0.10.2) compiled, whose times are the compiler's own estimates;
tests/estimate/test_closed_form.py has them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from mesh_transformer.accelerators import ACCELERATORS, Accelerator
from mesh_transformer.config import Config
from mesh_transformer.errors import UserError
from mesh_transformer.estimate import experts, transfers
from mesh_transformer.estimate.kernels import OTHER_SHARE, SHARES
from mesh_transformer.estimate.rates import MIB, DeviceRates
from mesh_transformer.estimate.sizes import FLOAT32_BYTES, LayerSizes, StepSizes
from mesh_transformer.models.block import KEPT
from mesh_transformer.ops.attend.kernels import PLAIN

GIB = 2**30
# bytes between memory and core for one logit of attention, forward and backward
LOGIT_TRAFFIC = 85.0
# Passes over an activation in a layer, from the ops of GPT-J-6B's step on a v3-8. "Forward" counts again if recomputed.
NORM_FORWARD, NORM_BACKWARD = 2.0, 3.75
# a sum with the residual stream and its gradient
ADDITION = 1.65
# to store and to load what the backward pass keeps
KEEP_AND_LOAD = 2.0
# the same without recomputation, which keeps many more arrays than the policies name
KEEP_AND_LOAD_ALL = 2.2
# the gradient of a bias: a sum, mostly fused
BIAS_GRADIENT = 0.5
# the feed-forward layer's activation function, and copies
HIDDEN_FORWARD, HIDDEN_BACKWARD = 1.6, 3.2
# rotary encoding and changes of layout, over queries, keys, values and the output of attention together
HEADS_FORWARD, HEADS_BACKWARD = 1.5, 2.6
# Products of the size of the logits in a kernel of attention, forward and backward. Splash has two kernels backward, of
# which each computes the logits and the gradient of the softmax's weights.
KERNEL_FORWARD, KERNEL_BACKWARD, SPLASH_BACKWARD = 2, 5, 7
# parts of the work on the logits of attention
LOGITS_FORWARD, LOGITS_BACKWARD = 0.3, 0.4
# passes over the float32 logits of the vocabulary
VOCAB_PASSES = 1.3
# passes over the weights of layers and embedding in a microbatch: gradients are zeroed, unless they are frozen, and
# matrices copied from the stack
WEIGHT_PASSES, FROZEN_PASSES = 2.0, 1.0
# bytes of memory traffic for each element of a parameter: to add a gradient to the float32 sums, and to update
SUM_TRAFFIC, UPDATE_TRAFFIC = 15.5, 50.0

# Arrays that live at once in the backward pass of a layer, as multiples of the float32 logits of one part of the
# queries, of the feed-forward layer's hidden values, and of an activation as wide as the residual stream: from the
# peaks of a 13B model on v3-256 and of a 16B model on v5e-256, both fsdp 256.
LIVE_LOGITS, LIVE_HIDDEN, LIVE_ROWS = 6.0, 1.5, 2.6
# arrays that live at once in the loss, as a multiple of the float32 logits of one chunk
LIVE_VOCAB_LOGITS = 2.0
# Arrays kept without recomputation. Of a norm: a multiple of its output (three arrays in float32, and the output). Of
# the hidden values: with fsdp, which recomputes only the gathers of weights, and without fsdp.
KEPT_OF_NORM = 7.0
KEPT_OF_HIDDEN_FSDP, KEPT_OF_HIDDEN = 6.0, 2.0
# the mesh axes that the closed form models and a search varies
MODELLED = ("dp", "fsdp", "tp")


def unmodelled(config: Config) -> list[str]:
    """The mesh axes of size over 1 that the closed form does not model, such as mesh.pp."""
    return [f"mesh.{axis}" for axis, size in config.mesh.given.items() if axis not in MODELLED and size > 1]


@dataclass(frozen=True)
class StepEstimate:
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
) -> StepEstimate:
    """The estimate for a config on `n_devices` devices. `mesh.overlap_tp` is not "auto": see `overlap.resolve`.

    Args:
        fused_attention: share of the peak that a kernel of attention reaches, if it never writes logits to memory (Dao
            et al. 2022, arXiv:2205.14135); None: the kernel of `compute.attention`, with its share in `kernels.SHARES`.

    Raises:
        UserError: the mesh does not fit the devices or does not divide a size, or they are several GPUs.
    """
    check_modelled(n_devices, accelerator)
    step = StepSizes.of(config, config.check_devices(n_devices), accelerator)
    return StepEstimate(_memory(step, fused_attention), _time(step, fused_attention))


def step_gib(config: Config, n_devices: int, accelerator: Accelerator | None = None) -> dict[str, float]:
    """GiB by use on one device. Only the field `attention` of `config.compute` may be "auto".

    Args:
        accelerator: None for one that the table of accelerators lacks: attention is then computed without a kernel.
    """
    if accelerator is None:
        # the rates of a device have no effect on memory
        accelerator = ACCELERATORS["v4"]
        config = config.model_copy(update={"compute": config.compute.model_copy(update={"attention": PLAIN})})
    return _memory(StepSizes.of(config, config.check_devices(n_devices), accelerator), None)


def check_modelled(n_devices: int, accelerator: Accelerator) -> None:
    """Raises UserError for several GPUs: the links between them are not in the table of accelerators."""
    if n_devices > 1 and not accelerator.is_tpu:
        raise UserError(
            f"{n_devices} devices of {accelerator.name}: the time of transfers between GPUs is not modelled, give one "
            "device or a TPU slice"
        )


def _memory(step: StepSizes, fused: float | None) -> dict[str, float]:
    """GiB by use, at the end of the backward pass of a layer or in the loss, whichever needs more. `fused`: as
    `fused_attention` of `estimate`."""
    moment_bytes = 2 if getattr(step.config.optimizer, "moments_dtype", "float32") == "bfloat16" else FLOAT32_BYTES
    per_step = step.config.mesh.gather_weights == "per_step"
    weights = step.elements("embed", "blocks", "head", gathered=per_step) * step.item_bytes
    gradients, frozen = weights, 0.0
    if step.decoder.adapted:
        frozen = (step.all_elements - step.trained_elements) * step.item_bytes
        gradients = step.trained_elements * step.item_bytes
        weights = weights if per_step else gradients
    always = {
        "parameters": step.trained_elements * FLOAT32_BYTES,
        "frozen parameters": frozen,
        "optimizer state": step.slot_elements * moment_bytes,
        "weights in the compute dtype": weights if step.item_bytes < FLOAT32_BYTES or per_step else 0.0,
        "sums of gradients": step.sum_elements * FLOAT32_BYTES if step.accumulation > 1 else 0.0,
        "kept activations": sum(layer.count * _kept_bytes(layer, _share(layer, fused)) for layer in step.layers),
    }
    gathers = step.parts("embed") > 1 and not per_step
    live = max(_live_bytes(layer, _share(layer, fused)) + (layer.weights if gathers else 0.0) for layer in step.layers)
    backward = {**always, "gradients": gradients, "one layer": live}
    # the loss of a chunk of the positions, with the head's gradient in float32
    chunk = min(step.vocab_logits, MIB * step.logits_mib)
    head = step.elements("head", gathered=True)
    of_head = FLOAT32_BYTES + step.item_bytes
    if step.decoder.adapted:
        # no gradient, and no copy in the compute dtype
        of_head = step.item_bytes if gathers else 0
    loss = {**always, "loss": LIVE_VOCAB_LOGITS * chunk + of_head * head}
    largest = max(backward, loss, key=lambda uses: sum(uses.values()))
    return {use: n_bytes / GIB for use, n_bytes in largest.items() if n_bytes}


def _share(layer: LayerSizes, given: float | None) -> float | None:
    """The share of the peak that the kernel of attention reaches; None: no kernel."""
    if given is None and layer.kernel != PLAIN:
        return SHARES.get(layer.step.accelerator.name, OTHER_SHARE)
    return given


def _live_bytes(layer: LayerSizes, fused: float | None) -> float:
    """Bytes of the arrays that live at once in the backward pass of a layer."""
    logits = 0.0 if fused is not None else layer.largest_logits * FLOAT32_BYTES
    live = LIVE_LOGITS * logits + LIVE_HIDDEN * layer.hidden + LIVE_ROWS * layer.step.whole_rows
    return live + experts.LIVE_ROWS * experts.rows_bytes(layer)


def _kept_bytes(layer: LayerSizes, fused: float | None) -> float:
    """Bytes of the activations of a layer that are kept for the backward pass."""
    step = layer.step
    if step.remat != "none":
        return sum(layer.kept[name] for name in KEPT[step.remat])
    weights = 0.0 if fused is not None else layer.logits * step.item_bytes
    norms = layer.norms * KEPT_OF_NORM * step.residual
    hidden = (KEPT_OF_HIDDEN_FSDP if step.parts("embed") > 1 else KEPT_OF_HIDDEN) * layer.hidden
    return layer.kept["block_in"] + layer.kept["qkv"] + layer.kept["attn_out"] + hidden + norms + weights


def _time(step: StepSizes, fused_attention: float | None) -> dict[str, float]:
    """Seconds of a step by part."""
    rates = DeviceRates.of(step.accelerator)
    copied = step.elements("embed", "blocks", gathered=step.config.mesh.gather_weights == "per_step") * step.item_bytes
    microbatches = {
        "products": sum(layer.count * _products(layer, rates) for layer in step.layers),
        "attention": sum(
            layer.count * _attention(layer, rates, _share(layer, fused_attention)) for layer in step.layers
        ),
        "norms and activations": sum(
            layer.count * _passes(layer, _share(layer, fused_attention)) for layer in step.layers
        )
        / rates.passes,
        "head": _head(step, rates),
        "copies of weights": (FROZEN_PASSES if step.decoder.adapted else WEIGHT_PASSES) * copied / rates.passes,
        "sums of gradients": SUM_TRAFFIC * step.sum_elements / rates.memory if step.accumulation > 1 else 0.0,
        **transfers.of_microbatch(step, rates, _products),
    }
    once = {
        "optimizer": UPDATE_TRAFFIC * step.sum_elements / rates.memory,
        **transfers.of_step(step),
    }
    parts = {part: step.accumulation * seconds for part, seconds in microbatches.items()}
    for part, seconds in once.items():
        parts[part] = parts.get(part, 0.0) + seconds
    return {part: seconds for part, seconds in parts.items() if seconds}


def _products(layer: LayerSizes, rates: DeviceRates) -> float:
    """The matrix products of a layer. The backward pass has two for each of the forward pass."""
    step, again = layer.step, layer.again
    (qkv, out), (hidden, ff_out) = layer.mixing, layer.feeding
    if step.accelerator.is_tpu:
        # what a column of a kernel takes, in columns of other products
        share = SHARES.get(step.accelerator.name, OTHER_SHARE)
        more = rates.products / (share * 1e12 * step.accelerator.peak_tflops) - 1
        of_experts = experts.columns(layer)
        hidden, ff_out = hidden + more * of_experts[0], ff_out + more * of_experts[1]
    recomputed = again.qkv * qkv + again.out * out + again.hidden * hidden + again.ff_out * ff_out
    # a frozen matrix has no gradient; the products of adapters are left out
    columns = (2 if step.decoder.adapted else 3) * (qkv + out + hidden + ff_out) + recomputed
    return 2 * step.rows * step.width * columns / rates.products


def _attention(layer: LayerSizes, rates: DeviceRates, fused: float | None) -> float:
    """The products of queries, keys and values, the softmax, rotary encoding and changes of layout."""
    again = layer.again
    # operations of queries with keys, or of the softmax with values, for a logit: the mean of both
    of_logit = layer.attention.products_per_key / layer.attention.heads
    heads = layer.query_bytes + layer.key_bytes + layer.mixed_bytes
    moved = (HEADS_FORWARD * (1 + again.qkv) + HEADS_BACKWARD) * heads / rates.passes
    if fused is not None:
        backward = SPLASH_BACKWARD if layer.kernel == "splash" else KERNEL_BACKWARD
        products = KERNEL_FORWARD * (1 + again.mixed) + backward
        peak = fused * 1e12 * layer.step.accelerator.peak_tflops
        return products * layer.kernel_logits * of_logit / peak + moved
    product = layer.logits * of_logit
    products = 6 + again.logits + again.mixed
    far = max(0.0, 1 - rates.logit_room / (layer.largest_logits * FLOAT32_BYTES))
    logit = (1 - far) * rates.logit + far * LOGIT_TRAFFIC / rates.memory
    softmax = (LOGITS_FORWARD * (1 + again.logits) + LOGITS_BACKWARD) * layer.logits * logit
    return products * product / rates.products + moved + softmax


def _passes(layer: LayerSizes, fused: float | None) -> float:
    """Bytes of memory traffic of a layer: norms, residual sums, hidden values, biases, rows of experts, kept arrays."""
    step, again = layer.step, layer.again
    norms = layer.norms * (NORM_FORWARD * (1 + again.norms) + NORM_BACKWARD)
    additions = ADDITION * layer.branches
    hidden = HIDDEN_FORWARD * (1 + again.hidden) + HIDDEN_BACKWARD
    kept = (KEEP_AND_LOAD_ALL if step.remat == "none" else KEEP_AND_LOAD) * _kept_bytes(layer, fused)
    passes = (norms + additions) * step.residual + hidden * layer.hidden + experts.PASSES * experts.rows_bytes(layer)
    return passes + BIAS_GRADIENT * layer.biased + kept


def _head(step: StepSizes, rates: DeviceRates) -> float:
    """The products with the head's matrix, and the loss."""
    columns = step.decoder.padded_vocab / step.parts("vocab")
    operations = 4 if step.decoder.adapted else 6
    return (
        operations * step.rows * step.width * columns / rates.products + VOCAB_PASSES * step.vocab_logits / rates.passes
    )
