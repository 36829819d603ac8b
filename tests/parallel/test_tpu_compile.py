"""Collectives and memory of the training step and a serving program, compiled for TPU slices without a TPU.

The tests need libtpu (docs/benchmarks.md) and are skipped without it.
"""

import copy
import functools
import json
import math
import re
import runpy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from support.builders import TINY
from support.covering import covering
from support.replicas import OWN, sequences_over_tp

from mesh_transformer.accelerators import ACCELERATORS
from mesh_transformer.config import Config, load_config, parse_config
from mesh_transformer.estimate.hlo import Collective, collectives, overlaps
from mesh_transformer.estimate.tpus import slice_devices
from mesh_transformer.infer.programs import SlotPrograms
from mesh_transformer.models.placement import Placement
from mesh_transformer.models.stack import LAYER_LOOP
from mesh_transformer.train.step import TrainProgram, compile_step, peak_bytes

pytestmark = [pytest.mark.tpu, pytest.mark.usefixtures("libtpu")]
SLICE = "v3-8"
REPO = Path(__file__).resolve().parents[2]
CONFIG = REPO / "configs" / "6B_finetune_v3-8.json"
SMALL = copy.deepcopy(TINY)
SMALL["model"] |= {"d_model": 256, "seq": 128}
# two heads of keys for four devices
GROUPED = copy.deepcopy(TINY)
GROUPED["model"] = {"family": "llama", "layers": 2, "d_model": 256, "d_ff": 512, "n_heads": 4, "n_kv_heads": 2}
GROUPED["model"] |= {"n_vocab": 512, "seq": 128}
# elements of the largest matrix of a layer
WIDEST = 256 * 4 * 256
# a slice of each generation, and the mesh of its training step
MESHES = {"v3-8": ("mesh.tp=8",), "v4-8": ("mesh.fsdp=4",), "v5e-8": ("mesh.fsdp=4", "mesh.tp=2")}


def _program(config: Config, slice_name: str) -> TrainProgram:
    return TrainProgram(Placement.of(config, slice_devices(slice_name)), config)


def _compile(config: Config, slice_name: str = SLICE) -> jax.stages.Compiled:
    program = _program(config, slice_name)
    shape = config.check_devices(program.partition.mesh.size)
    return compile_step(program, config.optimizer.gradient_accumulation_steps, config.microbatch(shape))


@functools.cache
def _small(slice_name: str, *overrides: str) -> jax.stages.Compiled:
    return _compile(parse_config(SMALL, overrides), slice_name)


def _bytes(tree: Any) -> int:
    """The bytes per device of a tree of `jax.ShapeDtypeStruct`."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _forward(*overrides: str):
    """The collectives of the forward loop over the layers of a small model, with tp 8."""
    found = collectives(_small(SLICE, "mesh.tp=8", *overrides).as_text())
    return [one for one in found if one.loops and LAYER_LOOP in one.loops[-1] and "transpose(" not in one.loops[-1]]


def test_the_forward_pass_of_a_layer_sums_one_activation_over_tp():
    (one,) = _forward()
    assert one.kind == "all-reduce"
    assert [(array.dtype, array.size) for array in one.arrays] == [("bf16", 8 * 128 * 256)]


@pytest.mark.nightly
def test_the_collective_check_can_fail():
    """Sequence parallelism replaces the sum by a gather and a scatter, and the check detects it."""
    assert {one.kind for one in _forward("mesh.shard_activations=true")} != {"all-reduce"}


@pytest.mark.parametrize("name", covering(["v5e-8", "v4-8"], daily=(["v5e-8"],)))
def test_overlapped_permutes_run_during_products(name):
    """The activations of a layer travel only in permutes, and products lie between start and end of most of them."""
    tp = 4 if name == "v4-8" else 8
    wide = ("model.d_model=1024", "model.seq=1024", "model.layers=2", "data.batch_size=4")
    found = overlaps(_small(name, f"mesh.tp={tp}", "mesh.overlap_tp=true", *wide).as_text())
    activation = 4 * 1024 * 1024 * 2 // tp
    large = [
        one
        for one in found
        if any(LAYER_LOOP in loop for loop in one.collective.loops) and one.collective.nbytes >= activation
    ]
    assert {one.collective.kind for one in large} == {"collective-permute"}
    # forward: a gather and a scatter; backward: the gather again, the gradients of both
    assert len(large) == 5 * (tp - 1)
    assert sum(one.products > 0 for one in large) >= 4 * (tp - 1)


@pytest.mark.parametrize(
    ("name", "kind"), [("v5e-8", "reduce-scatter"), ("v5e-16", "all-reduce"), ("v4-64", "all-reduce")]
)
def test_gathers_run_along_one_ring_and_a_scatter_over_a_plane_is_a_sum(name, kind):
    """As `estimate.collectives` has it, also for a scatter that a program writes by hand."""
    devices = slice_devices(name)
    mesh = jax.make_mesh((len(devices),), ("fsdp",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16, sharding=jax.NamedSharding(mesh, P("fsdp")))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"))
    def gather_and_scatter(part):
        whole = jax.lax.all_gather(part, "fsdp", tiled=True)
        return jax.lax.psum_scatter(whole @ whole, "fsdp", tiled=True)

    hlo = gather_and_scatter.lower(split).compile().as_text()
    assert [one.kind for one in collectives(hlo)] == ["all-gather", kind]
    assert re.findall(r'"emitter":"(\dD)AllGather', hlo) == ["1D"]


@pytest.mark.parametrize("name", MESHES)
def test_a_step_holds_its_part_of_the_state_and_donates_it(name):
    program = _program(parse_config(SMALL, MESHES[name]), name)
    state = _bytes(program.abstract_state)
    compiled = _small(name, *MESHES[name])
    memory: Any = compiled.memory_analysis()
    # tokens and the padding of vectors make the difference
    assert state <= memory.argument_size_in_bytes < 1.1 * state
    assert memory.alias_size_in_bytes >= state
    assert memory.argument_size_in_bytes < memory.peak_memory_in_bytes < peak_bytes(compiled)
    # the metrics
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 2**16
    assert peak_bytes(compiled) < 2**26


def test_heads_are_rotated_by_a_product_and_gradients_of_biases_are_sums():
    hlo = _small(SLICE, "mesh.tp=8").as_text()
    assert "attention/bthk,bhkj->bthj/dot_general" in hlo
    assert re.search(r"/cond/branch_\d_fun/reduce_sum", hlo)


@pytest.mark.parametrize("name", covering(["v3-8", "v5e-8"], daily=(["v5e-8"],)))
def test_a_replica_gathers_and_scatters_its_own_sequences(name):
    mesh = ("mesh.fsdp=4", "mesh.tp=2", "mesh.shard_activations=true", "mesh.overlap_tp=false")
    hlo = _small(name, *mesh, "model.layers=2", f"data.batch_size={4 * OWN}").as_text()
    found = sequences_over_tp(hlo)
    assert found.keys() >= {"all-gather"}
    assert set().union(*found.values()) == {OWN}


def _gathered(name: str, *overrides: str) -> list[int]:
    """The number of elements of every array that an all-gather of the step returns."""
    found = collectives(_small(name, *MESHES[name], *overrides).as_text())
    return [array.size for one in found if one.kind == "all-gather" for array in one.arrays]


@pytest.mark.parametrize("name", ["v4-8", "v5e-8"])
def test_fsdp_gathers_one_matrix_of_one_layer_at_a_time(name):
    sizes = _gathered(name)
    assert sizes
    assert max(sizes) <= WIDEST


@pytest.mark.nightly
def test_the_gather_check_can_fail():
    """One gather per step gathers the matrices of all layers, and the check detects it."""
    assert max(_gathered("v4-8", "mesh.gather_weights=per_step")) == SMALL["model"]["layers"] * WIDEST


@pytest.mark.parametrize("name", covering(MESHES, daily=(["v4-8"],)))
def test_a_serving_program_sums_one_activation_a_layer_and_donates_its_cache(name):
    devices, slots = slice_devices(name), 4
    config = parse_config(SMALL, [f"mesh.tp={len(devices)}"])
    placement = Placement.of(config, devices).for_decoding()
    programs = SlotPrograms(placement, slots, config.seq, longest_chunk=config.seq)
    params, kept = placement.abstract(jnp.bfloat16), programs.abstract
    number = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = programs.generate.lower(params, kept, None, number, number, length=config.seq).compile()
    found = collectives(compiled.as_text())
    in_a_layer = [one for one in found if one.loops and LAYER_LOOP in one.loops[-1]]
    # two rows stand for a sequence: a TPU multiplies eight rows faster than four
    assert [(one.kind, [array.size for array in one.arrays]) for one in in_a_layer] == [
        ("all-reduce", [2 * slots * config.model.d_model])
    ]
    logits = slots * config.model.n_vocab
    assert {one.kind for one in found} == {"all-reduce", "all-gather"}
    assert max(array.size for one in found for array in one.arrays) == logits
    memory: Any = compiled.memory_analysis()
    assert _bytes(params) + _bytes(kept) <= memory.argument_size_in_bytes
    assert _bytes(kept.cache) == 2 * 3 * slots * config.seq * 256 * 2 // len(devices)
    assert memory.alias_size_in_bytes >= _bytes(kept)
    assert peak_bytes(compiled) < 2**24


@pytest.mark.nightly
def test_the_6b_fine_tuning_step_fits_a_v3_core():
    config = load_config(str(CONFIG))
    assert config.mesh.tp == 8
    assert config.optimizer.gradient_accumulation_steps == 16
    peak = peak_bytes(_compile(config)) / 2**30
    # parameters and moments alone take 8.4 GiB
    assert 8.4 < peak < ACCELERATORS["v3"].usable_gib


def test_the_compiler_refuses_two_layers_more():
    """The compiler's limit is the limit in the table of accelerators, and it counts memory as `peak_bytes` does."""
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"exceeds available HBM \(15\.48G\)"):
        _compile(load_config(str(CONFIG), ["model.layers=30"]))


@pytest.mark.parametrize("name", covering(["v4-32", "v5e-16", "v6e-16"], daily=(["v6e-16"],)))
def test_a_step_compiles_for_several_hosts(name):
    """On the mesh of configs/1.3B.json, for which JAX's own `make_mesh` finds no order of a v6e-16."""
    assert _small(name, "mesh.fsdp=4", "mesh.tp=2").as_text()


def test_the_recorded_devices_are_those_of_libtpu():
    """If this fails, run scripts/tpu_devices.py."""
    recorded = json.loads(Path(__file__).with_name("tpu_devices.json").read_text())
    describe = runpy.run_path(str(REPO / "scripts/tpu_devices.py"))["describe"]
    for name, devices in recorded.items():
        assert describe(name) == devices, name


def test_a_pipeline_sends_activations_and_gathers_no_weights():
    """Inside its loops, a step with stages sends activations from stage to stage, and parts of them to the head. No
    sum of gradients is there."""
    compiled = _small(
        "v4-8",
        "mesh.pp=2",
        "mesh.tp=2",
        "model.layers=4",
        "optimizer.gradient_accumulation_steps=4",
        "data.batch_size=2",
    )
    activation = 2 * 128 * 256
    found = [one for one in collectives(compiled.as_text()) if one.loops and LAYER_LOOP not in one.loops[-1]]
    sent = [array.size for one in found if one.kind == "collective-permute" for array in one.arrays]
    assert sent.count(activation) >= 2
    gathered = [array.size for one in found if one.kind == "all-gather" for array in one.arrays]
    assert max(gathered) <= activation
    # the embedding of a microbatch; the gradient of the head, as large, is summed over the stages after the loops
    summed = [array.size for one in found if one.kind == "all-reduce" for array in one.arrays]
    assert [size for size in summed if size >= activation] == [activation]


def test_ulysses_sends_each_array_once_and_gathers_none():
    """In bfloat16: queries, keys, values and the output; in the backward pass all again, and their gradients."""
    compiled = _compile(parse_config(GROUPED, ["mesh.cp=4", "mesh.context_mode=ulysses"]), "v4-8")
    found = collectives(compiled.as_text())
    assert not [one for one in found if one.kind == "all-gather"]
    sent = [one for one in found if one.kind == "all-to-all"]
    assert all(LAYER_LOOP in one.loops[-1] for one in sent)
    # each device has one head of queries, of keys and of values for all 8 x 128 positions
    assert [one.nbytes for one in sent] == [2 * 8 * 128 * 64] * 12
    assert sum("transpose(" in one.loops[-1] for one in sent) == 8


def _between_slices(name: str, *overrides: str) -> list[Collective]:
    """What crosses from one of two slices to the other in a step of four microbatches."""
    mesh = ("mesh.dp=2", "mesh.tp=4") if name == "v4-8" else ("mesh.dp=2", "mesh.fsdp=2", "mesh.tp=2")
    step = ("model.layers=2", "optimizer.gradient_accumulation_steps=4", "mesh.dcn=dp")
    hlo = _small("2xv4-8" if name == "v4-8" else "2xv5e-4", *mesh, *step, *overrides).as_text()
    return [one for one in collectives(hlo) if one.between_slices]


@pytest.mark.parametrize("name", covering(["v4-8", "v5e-4"], daily=(["v5e-4"],)))
def test_gradients_cross_slices_once_a_step(name):
    """In float32, all of them, and the metrics: each device has a part of a matrix."""
    found = _between_slices(name)
    assert found
    assert not [one for one in found if one.loops]
    assert {one.kind for one in found} == {"all-reduce"}
    matrices = 2 * (4 * 256 * 256 + 2 * 256 * 1024) + 2 * 512 * 256
    assert 4 * matrices / 4 <= sum(one.nbytes for one in found) < 1.1 * 4 * matrices / 4


@pytest.mark.nightly
def test_the_check_of_slices_can_fail():
    """With a sum in each microbatch, gradients cross in the loops."""
    assert [one for one in _between_slices("v4-8", "mesh.sum_gradients=per_microbatch") if one.loops]


def test_attention_of_replicas_gathers_no_heads():
    """The gradients of keys and values stay split over heads and sequences, for a sequence of several parts."""
    wide = ("mesh.dp=2", "mesh.fsdp=2", "mesh.tp=2", "mesh.dcn=dp", "model.seq=1024", "model.layers=2")
    found = collectives(_small("2xv4-8", *wide).as_text())
    loops = [one for one in found if one.kind == "all-gather" and one.loops]
    gathered = [array.size for one in loops for array in one.arrays if array.dtype == "f32"]
    # a device's part of the 4 sequences of a replica
    assert max(gathered, default=0) < 4 * 1024 * 256 // 4
