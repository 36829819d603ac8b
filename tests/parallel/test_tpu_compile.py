"""The training step compiled for a TPU v3-8 with none attached: its collectives and its memory.

Runs where libtpu is installed (docs/benchmarks.md says how); elsewhere it is skipped.
"""

import copy
import json
import runpy
from pathlib import Path

import jax
import pytest
from builders import TINY
from hlo import collectives

from mesh_transformer import platforms
from mesh_transformer.config import Config, load_config, parse_config
from mesh_transformer.models.model import LAYER_LOOP, Placement
from mesh_transformer.train.step import TrainProgram, compile_step, peak_bytes

pytest.importorskip(
    "libtpu", reason="libtpu is not installed: nothing was compiled for a TPU (pip install -e '.[tpu,test]')"
)
pytestmark = pytest.mark.slow
SLICE = "v3-8"
REPO = Path(__file__).resolve().parents[2]
CONFIG = REPO / "configs" / "6B_finetune_v3-8.json"


def _compile(config: Config, slice_name: str = SLICE) -> jax.stages.Compiled:
    devices = platforms.slice_devices(slice_name)
    shape = config.check_devices(len(devices))
    program = TrainProgram(Placement.of(config, devices), config)
    return compile_step(program, config.optimizer.gradient_accumulation_steps, config.microbatch(shape))


def _forward(*overrides: str):
    """The collectives of the loop that runs a small model's layers forward, tp 8."""
    raw = copy.deepcopy(TINY)
    raw["model"] |= {"d_model": 256, "seq": 128}
    found = collectives(_compile(parse_config(raw, ["mesh.tp=8", *overrides])).as_text())
    return [
        one
        for one in found
        if one.loops and LAYER_LOOP in one.loops[-1] and "transpose(" not in one.loops[-1]
    ]


def test_the_forward_pass_of_a_layer_sums_one_activation_over_tp():
    (one,) = _forward()
    assert one.kind == "all-reduce"
    assert [(array.dtype, array.size) for array in one.arrays] == [("bf16", 8 * 128 * 256)]


def test_the_collective_check_can_fail():
    """Sequence parallelism replaces the sum by a gather and a scatter, and the check sees it."""
    assert {one.kind for one in _forward("mesh.shard_activations=true")} != {"all-reduce"}


def test_the_6b_fine_tuning_step_fits_a_v3_core():
    config = load_config(str(CONFIG))
    assert config.mesh.tp == 8
    assert config.optimizer.gradient_accumulation_steps == 16
    peak = peak_bytes(_compile(config)) / 2**30
    assert 8.4 < peak < platforms.USABLE_GIB[SLICE]  # 8.4: parameters and moments alone


def test_the_compiler_refuses_two_layers_more():
    """Its own limit is the one of platforms.USABLE_GIB, and what it counts is what `peak_bytes` counts."""
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"exceeds available HBM \(15\.48G\)"):
        _compile(load_config(str(CONFIG), ["model.layers=30"]))


@pytest.mark.parametrize("name", ["v4-32", "v5e-16", "v6e-16"])
def test_a_step_compiles_for_several_hosts(name):
    """On the mesh of configs/1.3B.json, for which JAX's own `make_mesh` has no order on a v6e-16."""
    raw = copy.deepcopy(TINY)
    raw["model"] |= {"d_model": 256, "seq": 128}
    assert _compile(parse_config(raw, ["mesh.fsdp=4", "mesh.tp=2"]), name).as_text()


def test_the_recorded_devices_are_those_of_libtpu():
    """Else run scripts/tpu_devices.py."""
    recorded = json.loads(Path(__file__).with_name("tpu_devices.json").read_text())
    describe = runpy.run_path(str(REPO / "scripts/tpu_devices.py"))["describe"]
    for name, devices in recorded.items():
        assert describe(name) == devices, name
