"""What routed experts add to the closed form: the rows of the choices, and their way to the devices of their experts.

No measured step stands behind it: the time is the time of the transfers alone, and the rows are the rows that
`ops.experts.apply` holds at once.
"""

from collections.abc import Callable

from mesh_transformer.estimate.collectives import DeviceGroup
from mesh_transformer.estimate.sizes import LayerSizes
from mesh_transformer.spec import ExpertsSpec

# Arrays of rows that live at once in the backward pass: inputs, outputs, and the gradient of either.
LIVE_ROWS = 3.0
# passes over the rows in a layer, forward and backward: to gather and to add them, also in float32
PASSES = 12.0


def experts_of(layer: LayerSizes) -> ExpertsSpec | None:
    """The routed experts of a layer."""
    return next((mechanism for mechanism in layer.kind.mechanisms if isinstance(mechanism, ExpertsSpec)), None)


def rows_bytes(layer: LayerSizes) -> float:
    """Bytes of the rows of a layer's choices in a microbatch, as wide as the residual stream; 0 without experts.

    Without a capacity, a device has room for the choices of all devices of the group, as far as they can go to its
    experts.
    """
    experts, step = experts_of(layer), layer.step
    if experts is None:
        return 0.0
    chosen, devices = experts.router.chosen, step.parts("experts")
    if factor := step.config.experts.capacity_factor:
        return factor * chosen * step.whole_rows
    if step.config.experts.exchange == "tokens":
        chosen = min(chosen, experts.count // devices)
    return devices * chosen * step.whole_rows


def columns(layer: LayerSizes) -> tuple[float, float]:
    """Elements of the experts' matrices by which a device multiplies a token, over D: (input and inner matrices, output
    matrix). Kernels compute these products."""
    experts, step = experts_of(layer), layer.step
    if experts is None:
        return 0.0, 0.0
    arrays = [array for array in experts.arrays(step.width).values() if "experts" in array.axes]
    last = sum(step.products(array) for array in arrays if array.role == "output")
    return sum(map(step.products, arrays)) / step.width - last / step.width, last / step.width


def exchange_seconds(layer: LayerSizes, recomputed: bool, seconds: Callable[[str, float, DeviceGroup], float]) -> float:
    """Seconds of the transfers between the devices that split the experts, in all layers of a kind, in a microbatch.

    Args:
        recomputed: whether the backward pass computes the experts again.
        seconds: (a kind of collective, bytes, a group of devices) -> seconds.
    """
    step = layer.step
    group = step.group(step.partition.rules["experts"])
    if experts_of(layer) is None or group.size == 1:
        return 0.0
    passes = 2 + recomputed
    if step.config.experts.exchange == "gather":
        all_rows = group.size * step.whole_rows
        pass_seconds = seconds("all-gather", all_rows, group) + seconds("reduce-scatter", all_rows, group)
    else:
        pass_seconds = 2 * seconds("all-to-all", rows_bytes(layer), group)
    return layer.count * passes * pass_seconds
