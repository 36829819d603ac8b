"""cuDNN's attention compiled for a GPU that is not attached. The test needs JAX's CUDA plugin, and is skipped without
it."""

import importlib.util

import pytest
from support.builders import TINY

from mesh_transformer.config import parse_config
from mesh_transformer.estimate.gpus import COMPILE_OPTIONS, gpu_devices
from mesh_transformer.models.placement import Placement
from mesh_transformer.train.step import TrainProgram, lower_step

pytestmark = pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)),
    reason="JAX's CUDA plugin is not installed (pip install -e '.[gpu-target]'): nothing was compiled for a GPU",
)


@pytest.mark.parametrize(("gpu", "width", "count"), [("h100", 256, 1), ("a100", 128, 1), ("a100", 256, 0)])
def test_a_layer_has_one_kernel_each_way(gpu: str, width: int, count: int) -> None:
    """Before compute capability 9.0 cuDNN has no heads of 256 dims."""
    shape = [f"model.d_model={2 * width}", "model.n_heads=2", "model.seq=128", "data.batch_size=2"]
    config = parse_config(TINY, [*shape, "compute.remat=save_attn"])
    placement = Placement.of(config, gpu_devices(gpu))
    assert set(placement.kernels(config.seq).values()) == {"cudnn" if count else "plain"}
    text = lower_step(TrainProgram(placement, config), 1, 2).compile(COMPILE_OPTIONS).as_text()
    assert text.count('"__cudnn$fmhaSoftmax"') == text.count('"__cudnn$fmhaSoftmaxBackward"') == count
