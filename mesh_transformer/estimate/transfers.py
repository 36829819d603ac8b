"""The transfers of a training step in the closed form."""

from collections.abc import Callable

from mesh_transformer.accelerators import Accelerator
from mesh_transformer.estimate import experts
from mesh_transformer.estimate.collectives import DeviceGroup, collective_seconds
from mesh_transformer.estimate.rates import DeviceRates
from mesh_transformer.estimate.sizes import FLOAT32_BYTES, LayerSizes, StepSizes

# What a product in parts costs more than one product, for each permutation of the ring of ops/collective_matmul.py:
# seconds, and passes over the part that is sent. From steps of GPT-J-6B with mesh.overlap_tp on v4-8 (tp 4) and on
# v5e-8 (tp 8, microbatches of one and of four sequences): smaller products, copies of the hidden values, biases on
# their own.
RING_STEP_S, RING_PASSES = 6e-6, 2.5
# passes over the hidden values, whose biases and activation function are not fused into products in parts; from steps
# of GPT-J-6B on v4-8 (fsdp 2, tp 2)
RING_HIDDEN = 3.0

# Chips for which libtpu compiles a reduce-scatter of activations as a sum and a slice.
WITHOUT_REDUCE_SCATTER = ("v2", "v3")


def of_microbatch(
    step: StepSizes, rates: DeviceRates, products: Callable[[LayerSizes, DeviceRates], float]
) -> dict[str, float]:
    """Seconds of the transfers of a microbatch by their purpose.

    Args:
        products: seconds of the matrix products of a layer, beside which rings of `mesh.overlap_tp` run.
    """
    tensor = step.group(step.partition.rules["mlp"])
    # the sum of the embedding, and the sum of the gradient of the head's input
    ends = 2 * _transfer(step.accelerator, "all-reduce", step.whole_rows, tensor)
    sums = sum(layer.count * _sums_of_layer(layer, rates, products(layer, rates)) for layer in step.layers)

    def exposed(kind: str, n_bytes: float, group: DeviceGroup) -> float:
        return _transfer(step.accelerator, kind, n_bytes, group) * (1.0 if kind == "all-reduce" else rates.exposed)

    exchange = sum(experts.exchange_seconds(layer, layer.again.hidden, exposed) for layer in step.layers)
    return {
        "tensor-parallel sums": sums + ends,
        **_weights_and_gradients(step, exposed),
        "exchange of tokens": exchange,
    }


def _sums_of_layer(layer: LayerSizes, rates: DeviceRates, products: float) -> float:
    """The tensor-parallel transfers of a layer."""
    step = layer.step
    tensor = step.group(step.partition.rules["mlp"])
    sums = layer.branches + layer.readings + layer.again.sums
    if step.residual == step.whole_rows:
        if step.decoder.adapted:
            # the product of low rank stands between the sums of two matrices, which are not joined then
            sums = layer.matrices
        return sums * _transfer(step.accelerator, "all-reduce", step.whole_rows, tensor)
    kind = "all-reduce" if step.accelerator.name in WITHOUT_REDUCE_SCATTER else "reduce-scatter"
    # forward, for the gradient of the output, and for the gradients of the weights
    gathers = (2 + rates.exposed) * layer.branches
    seconds = sums * _transfer(step.accelerator, kind, step.whole_rows, tensor)
    seconds += gathers * _transfer(step.accelerator, "all-gather", step.whole_rows, tensor)
    if step.config.mesh.overlap_tp is not True:
        return seconds
    # the exposed part of the transfers, and the overhead of products in parts
    part = RING_STEP_S + RING_PASSES * step.whole_rows / tensor.size / rates.passes
    chunks = (sums + gathers) * (tensor.size - 1) * part + RING_HIDDEN * layer.hidden / rates.passes
    return max(0.0, seconds - products) + chunks


def _weights_and_gradients(step: StepSizes, seconds: Callable[[str, float, DeviceGroup], float]) -> dict[str, float]:
    """The gathers of weights and the sums of gradients. A sum that leaves split gradients counts with the weights."""
    rules, embed = step.partition.rules, step.partition.rules["embed"] or ()
    sharing = (*(rules["batch"] or ()), *(rules["seq"] or ()))
    weights, everyone = step.group(embed), step.group(sharing)
    replicas = step.group([axis for axis in sharing if axis not in embed])
    once = step.config.mesh.sum_gradients == "per_step"
    # gradients of split weights that have replicas are summed over all devices with other sequences at once
    over_all = not once and min(replicas.size, weights.size) > 1 and step.parts("experts") == 1
    summed = everyone if over_all else weights
    kind = "all-reduce" if over_all and step.accelerator.name in WITHOUT_REDUCE_SCATTER else "reduce-scatter"
    gathers = step.config.mesh.gather_weights == "per_layer"
    tables = step.elements("embed", "head", gathered=True) * step.item_bytes
    # frozen parameters have no gradients, and the gradients of adapters are small
    summed_share = 0 if step.decoder.adapted else 1
    moved = summed_share * seconds(kind, tables, summed) + gathers * seconds("all-gather", tables, weights)
    # small transfers cost their latency: biases, and the scales of norms
    delay = (everyone.size > 1) * seconds("all-reduce", 1, step.group(tuple(step.partition.mesh.shape)))
    for layer in step.layers:
        # a transfer for each matrix and each split vector; libtpu sums the gradients of two matrices at once
        matrix, count = layer.weights / layer.matrices, layer.count * layer.matrices
        moved += summed_share * count / 2 * seconds(kind, 2 * matrix, summed) + 2 * layer.count * delay
        # no policy keeps gathered weights: the backward pass gathers them again
        vectors = layer.count * layer.split_vectors * seconds("all-gather", 1, weights)
        moved += 2 * gathers * (count * seconds("all-gather", matrix, weights) + vectors)
    gradient = 0.0
    if not (once or over_all):
        kind = "all-reduce" if step.moments.rules == rules else "reduce-scatter"
        # the devices that split the experts sum the gradients of all other parameters
        split = step.elements_with("experts")
        alike = step.group([axis for axis in rules["batch"] or () if axis not in (*embed, *(rules["experts"] or ()))])
        gradient = seconds(kind, (step.trained_elements - split) * step.item_bytes, replicas)
        gradient += seconds(kind, split * step.item_bytes, alike)
    return {"gathered weights": moved, "sums over replicas": gradient}


def of_step(step: StepSizes) -> dict[str, float]:
    """Seconds of the transfers that a step makes once: with mesh.gather_weights=per_step, mesh.sum_gradients=per_step
    and mesh.zero1."""
    embed, moments = step.partition.rules["embed"] or (), step.moments.rules["embed"] or ()
    seconds = {}
    if step.config.mesh.gather_weights == "per_step":
        gathered = step.elements("embed", "blocks", "head", gathered=True) * step.item_bytes
        seconds["gathered weights"] = _transfer(step.accelerator, "all-gather", gathered, step.group(embed))
    updated = step.group([axis for axis in moments if axis not in embed])
    n_bytes = step.trained_elements * FLOAT32_BYTES
    seconds["sums over replicas"] = _transfer(step.accelerator, "all-gather", n_bytes, updated)
    if step.config.mesh.sum_gradients == "per_step":
        replicas = step.group([axis for axis in step.partition.rules["batch"] or () if axis not in embed])
        seconds["sums over replicas"] += _transfer(step.accelerator, "all-reduce", n_bytes, replicas)
    return seconds


def _transfer(accelerator: Accelerator, kind: str, n_bytes: float, group: DeviceGroup) -> float:
    return collective_seconds(kind, round(n_bytes), group, accelerator)
