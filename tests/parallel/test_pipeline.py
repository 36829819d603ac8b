"""The ticks of a pipeline, what a config refuses, and what the compiled step keeps and gathers."""

import collections
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.builders import TINY, program

from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.config import parse_config
from mesh_transformer.errors import UserError
from mesh_transformer.models.placement import Placement
from mesh_transformer.parallel.pipeline import Ticks
from mesh_transformer.train.schedule import side_by_side
from mesh_transformer.train.step import TrainProgram, compile_step

SHAPES = [
    (2, 1, 1),
    (2, 1, 5),
    (4, 1, 2),
    (4, 1, 8),
    (3, 1, 32),
    (2, 2, 2),
    (2, 2, 8),
    (4, 2, 8),
    (3, 4, 9),
    (8, 2, 16),
]
MODEL = {**TINY["model"], "layers": 4, "n_vocab": 1024}


@pytest.mark.parametrize(("stages", "rounds", "microbatches"), SHAPES)
def test_each_pass_once_and_one_tick_after_its_input(stages: int, rounds: int, microbatches: int) -> None:
    ticks = Ticks(stages, rounds, microbatches)
    done: dict[str, dict[tuple[int, int], int]] = {"forward": {}, "backward": {}}
    for kind, when in done.items():
        counts: collections.Counter[tuple[int, int]] = collections.Counter()
        for tick in range(ticks.total):
            for stage in range(stages):
                item = getattr(ticks, kind)(tick, stage)
                if item.valid:
                    counts[tick, stage] += 1
                    group = int(item.round) * stages + stage
                    assert (int(item.microbatch), group) not in when
                    when[int(item.microbatch), group] = tick
        assert len(when) == microbatches * rounds * stages
        # a stage computes at most one group a tick
        assert max(counts.values()) == 1
    forward, backward = done["forward"], done["backward"]
    groups = stages * rounds
    for microbatch in range(microbatches):
        for group in range(1, groups):
            assert forward[microbatch, group] == forward[microbatch, group - 1] + 1
            assert backward[microbatch, group - 1] == backward[microbatch, group] + 1
        # the loss is computed between the two, in the same tick
        assert backward[microbatch, groups - 1] == forward[microbatch, groups - 1]
    assert max(forward.values()) == ticks.forward_ticks - 1
    assert min(backward.values()) == ticks.warmup
    assert max(backward.values()) == ticks.total - 1


@pytest.mark.parametrize(("stages", "rounds", "microbatches"), SHAPES)
def test_no_kept_input_is_overwritten(stages: int, rounds: int, microbatches: int) -> None:
    ticks = Ticks(stages, rounds, microbatches)
    kept: dict[tuple[int, int, int], int] = {}
    for tick in range(ticks.total):
        for stage in range(stages):
            item = ticks.forward(tick, stage)
            if item.valid:
                kept[stage, int(item.round), int(item.microbatch) % ticks.slots] = int(item.microbatch)
            item = ticks.backward(tick, stage)
            if item.valid:
                assert kept[stage, int(item.round), int(item.microbatch) % ticks.slots] == item.microbatch


@pytest.mark.parametrize(("stages", "rounds", "microbatches"), [s for s in SHAPES if s[1] == 1 or s[2] % s[0] == 0])
def test_bubble_is_the_share_of_idle_ticks(stages: int, rounds: int, microbatches: int) -> None:
    ticks = Ticks(stages, rounds, microbatches)
    idle = sum(not ticks.forward(tick, 0).valid for tick in range(ticks.forward_ticks))
    assert ticks.bubble == idle / ticks.forward_ticks == (stages - 1) / (rounds * microbatches + stages - 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["mesh.pp=3"],
            "model.layers 4 is not divisible by mesh.pp 3: set mesh.pp to 1, 2, 4, or model.layers of a new ",
        ),
        (
            ["mesh.pp=4", "mesh.schedule=interleaved", "optimizer.gradient_accumulation_steps=4"],
            "model.layers 4 is not divisible by 2 x mesh.pp 4",
        ),
        (
            ["mesh.pp=2", "mesh.schedule=interleaved", "optimizer.gradient_accumulation_steps=3"],
            "optimizer.gradient_accumulation_steps 3 is not divisible by mesh.pp 2, which mesh.schedule interleaved "
            "needs: set it to 4, or set mesh.schedule=1f1b",
        ),
        (
            ["mesh.pp=4", "mesh.cp=2", "data.seq=36", "mesh.context_mode=gather"],
            "data.seq 36 is not divisible by mesh.pp x mesh.cp 8: set it to 32 or 40",
        ),
        (
            ["mesh.pp=2", "compute.remat=save_attn"],
            "compute.remat save_attn does not work with mesh.pp 2, which keeps the input of each block and recomputes "
            "the rest: set compute.remat=full, or mesh.pp=1",
        ),
    ],
)
def test_refused(changes: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        parse_config({**TINY, "model": MODEL}, changes)


def test_changed_parameters_are_refused() -> None:
    config = parse_config({**TINY, "model": MODEL}, ["mesh.pp=2"])
    placement = Placement.of(config, jax.devices()[:2])
    with pytest.raises(UserError, match=r"mesh\.pp computes the parameters as they are"):
        TrainProgram(placement, config, transform=lambda trained, frozen: side_by_side(trained, frozen))


def test_frozen_stages_train_as_on_one_device() -> None:
    """Of any part that a user freezes."""

    def split(params: dict) -> tuple[dict, dict]:
        return {"blocks": params["blocks"]}, {name: params[name] for name in ("embed", "head")}

    losses = []
    for changes, devices in ([], 1), (["mesh.pp=2"], 2):
        run = program({**TINY, "model": MODEL}, *changes, devices=devices, remat="full")
        run = TrainProgram(run.placement, run.config, split=split)
        state = run.init(jax.random.key(0))
        for _ in range(3):
            state, metrics = run.train_step(state, np.arange(2 * 8 * 41).reshape(2, 8, 41) % 512)
        losses.append(float(metrics["train/loss"]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_memory_is_flat_in_the_microbatches_and_no_stack_is_gathered() -> None:
    run = program({**TINY, "model": MODEL}, "mesh.pp=4", "mesh.dp=1", "data.batch_size=2", devices=4, remat="full")
    few, many = (compile_step(run, microbatches, 2) for microbatches in (8, 32))
    tokens = 2 * 41 * 4
    metrics = 4 * 2 * 40 * 4
    growth = many.memory_analysis().temp_size_in_bytes - few.memory_analysis().temp_size_in_bytes
    # what grows is the batch and the losses of its tokens, never an activation
    assert growth <= 24 * 2 * (tokens + metrics)
    layers = len(jax.tree.leaves(run.abstract_state.params["blocks"])[0])
    assert layers == 4
    # a layer's own dimensions are never preceded by all layers
    for shape in re.findall(r"all-gather\S* = \w+\[([\d,]+)\]", many.as_text()):
        dimensions = [int(n) for n in shape.split(",")]
        assert not (dimensions[0] == layers and jnp.prod(jnp.asarray(dimensions)) >= layers * 64 * 64), shape


def test_a_checkpoint_does_not_depend_on_stages_and_rounds(tmp_path: Path) -> None:
    """Saved on stages and on other meshes, each is restored on the other, bit by bit."""
    interleaved = ["mesh.pp=2", "mesh.schedule=interleaved", "mesh.tp=2"]
    meshes = {"stages": interleaved, "context": ["mesh.cp=2", "mesh.tp=2"], "zero1": ["mesh.dp=4", "mesh.zero1=true"]}
    runs = {name: program({**TINY, "model": MODEL}, *mesh, devices=4) for name, mesh in meshes.items()}
    states = {name: run.init(jax.random.key(3)) for name, run in runs.items()}
    for saved, restored in ("stages", "context"), ("zero1", "stages"):
        store = CheckpointStore(str(tmp_path / saved))
        store.save(1, states[saved], {})
        store.close()
        found = CheckpointStore(str(tmp_path / saved), read_only=True).restore(runs[restored].abstract_state)
        assert found is not None
        jax.tree.map(np.testing.assert_array_equal, found.state, states[saved])
        assert jax.tree.map(lambda x: x.sharding, found.state) == runs[restored].state_shardings
