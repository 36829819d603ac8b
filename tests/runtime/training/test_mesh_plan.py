"""device_train.py --plan-mesh."""

import colorsys
import json
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from support.builders import TINY

import device_train
from mesh_transformer import platforms
from mesh_transformer.config import parse_config
from mesh_transformer.errors import UserError
from mesh_transformer.models.placement import Placement
from mesh_transformer.runtime.training import mesh_plan
from mesh_transformer.runtime.training.mesh_plan import MeshPlan
from mesh_transformer.train.step import TrainProgram


def _plan(*overrides: str) -> MeshPlan:
    return MeshPlan.of(parse_config(TINY, overrides), jax.devices())


def _table(plan: MeshPlan) -> list[dict[str, str]]:
    """The rows of the table, by the titles of the columns."""
    lines = mesh_plan.lines(plan)
    head, *rows = lines[lines.index("") + 1 :]
    columns = [(found[0], found.start()) for found in re.finditer(r"\S+(?: \S+)*", head)]
    ends = [start for _, start in columns[1:]] + [None]
    return [{name: row[a:b].strip() for (name, a), b in zip(columns, ends, strict=True)} for row in rows]


def test_the_command_prints_and_draws_without_the_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = {**TINY, "checkpoint": {"model_dir": str(tmp_path / "run")}, "data": {"batch_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["--config", str(tmp_path / "config.json"), "--set", "mesh.tp=2", "--set", "mesh.cp=2", "--plan-mesh"]
    monkeypatch.setattr(sys, "argv", ["device_train", *arguments])
    compiled: set[str] = set()

    def note(event: str, _: float, fun_name: str = "", **__: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.add(fun_name)

    before = {id(array) for array in jax.live_arrays()}
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        assert device_train.main() == 0
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    # scalars, to find the names of the dimensions
    assert max((x.nbytes for x in jax.live_arrays() if id(x) not in before), default=0) <= 64
    assert not [name for name in compiled if "init" in name or "step" in name], compiled
    out = capsys.readouterr().out
    assert out.startswith("dp 2 x cp 2 x tp 2: 8 x cpu, 1 host\n")
    assert "heads 0-3" not in out
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mesh.png"]
    assert (tmp_path / "run/mesh.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_names_the_parts_of_each_device() -> None:
    rows = _table(_plan("mesh.fsdp=2", "mesh.cp=2", "mesh.tp=2"))
    assert [row["devices"] for row in rows] == [str(index) for index in range(8)]
    assert rows[6] == {
        "host": "0",
        "devices": "6",
        "fsdp": "1",
        "cp": "1",
        "tp": "0",
        "rows": "4-7",
        "positions": "10-29",
        "heads": "0-3",
        "ff": "0-127",
        "vocab": "0-255",
        "weights": "32-63",
    }
    assert rows[1]["positions"] == "0-9, 30-39"


def test_what_says_the_same_is_left_out() -> None:
    assert {"between blocks", "state", "key heads"}.isdisjoint(_table(_plan("mesh.fsdp=2", "mesh.tp=4"))[0])
    switched = _table(_plan("mesh.dp=2", "mesh.tp=4", "mesh.zero1=true", "mesh.shard_activations=true"))
    assert [row["state"] for row in switched] == ["0-31"] * 4 + ["32-63"] * 4
    assert [row["between blocks"] for row in switched[:4]] == ["0-9", "10-19", "20-29", "30-39"]


def test_a_stage_of_several_rounds_computes_other_layers_than_it_keeps() -> None:
    """With two rounds, the first of two stages has the first and the third quarter of the layers (Narayanan et al.
    2021, arXiv:2104.04473, figure 4)."""
    layers, pipeline = "model.layers=8", ["mesh.pp=2", "mesh.tp=4"]
    rows = _table(_plan(layers, *pipeline, "mesh.schedule=interleaved", "mesh.rounds=2"))[::4]
    assert [row["layers"] for row in rows] == ["0-3", "4-7"]
    assert [row["computed"] for row in rows] == ["0-1, 4-5", "2-3, 6-7"]
    assert [(row["layers"], "computed" in row) for row in _table(_plan(layers, *pipeline))[::4]] == [
        ("0-3", False),
        ("4-7", False),
    ]


def test_the_bytes_are_those_of_the_arrays_of_a_device() -> None:
    plan = _plan("mesh.fsdp=2", "mesh.tp=4")
    config = parse_config(TINY, ["mesh.fsdp=2", "mesh.tp=4"])
    shapes = TrainProgram(Placement.of(config, jax.devices()), config).abstract_state

    def on_device(tree: object) -> int:
        arrays = [jax.device_put(np.zeros(one.shape, one.dtype), one.sharding) for one in jax.tree.leaves(tree)]
        return sum(array.addressable_data(3).nbytes for array in arrays)

    assert plan.parameter_bytes == on_device(shapes.params)
    assert plan.state_bytes == on_device(shapes.opt_state)


class _Host:
    """A device of a slice: what a plan reads of it."""

    device_kind = "TPU v4"

    def __init__(self, number: int, host: int):
        self.id, self.process_index = number, host


def _on_a_pod(hosts: int) -> MeshPlan:
    """fsdp over hosts, tp over the four devices of a host."""
    parts = {name: (range(4),) for name in (*mesh_plan._COLUMNS, "experts")}
    held = [
        mesh_plan.Holding(
            _Host(4 * host + index, host),  # type: ignore[arg-type]
            {"fsdp": host, "tp": index},
            {
                **parts,
                "batch": (range(host, host + 1),),
                "heads": (range(index, index + 1),),
                "experts": (range(index, index + 1),),
            },
        )
        for host in range(hosts)
        for index in range(4)
    ]
    return MeshPlan(
        {"fsdp": hosts, "tp": 4}, dict.fromkeys(parts, 4), held, 1 << 20, 0, 3 << 30, dict.fromkeys(range(4 * hosts), 0)
    )


def test_many_devices_get_a_line_for_each_host(tmp_path: Path) -> None:
    plan = _on_a_pod(32)
    rows = _table(plan)
    assert len(rows) == 32
    assert rows[5]["devices"] == "20-23"
    assert (rows[5]["fsdp"], rows[5]["tp"], rows[5]["rows"], rows[5]["heads"]) == ("5", "0-3", "5", "0-3")
    # a dimension that the table of columns does not have
    assert rows[5]["experts"] == "0-3"
    text = "\n".join(mesh_plan.lines(plan))
    assert "Axes inside a host: tp; across hosts: fsdp." in text
    assert "1.00 MiB of parameters (float32), 3.00 GiB of optimizer state" in text
    assert len(_table(_on_a_pod(16))) == 64
    mesh_plan.draw(plan, str(tmp_path / "mesh.png"))


def test_the_table_has_the_slice_of_each_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "by_slice", lambda devices: [devices[:4], devices[4:]])
    plan = _plan("mesh.dcn=dp", "mesh.dp=2", "mesh.fsdp=2", "mesh.tp=2")
    rows = _table(plan)
    assert [row["slice"] for row in rows] == [*"00001111"]
    assert [row["slice"] for row in rows] == [row["dp"] for row in rows]
    first, second, *_ = mesh_plan.lines(plan)
    assert first == "dp 2 x fsdp 2 x tp 2: 8 x cpu, 2 slices, 1 host"
    assert second.endswith("; across slices: dp.")
    mesh_plan.draw(plan, str(tmp_path / "mesh.png"))


def test_the_devices_of_a_group_of_tensor_parallelism_are_shades_of_one_color() -> None:
    plan = _plan("mesh.fsdp=2", "mesh.cp=2", "mesh.tp=2")
    colors = [colorsys.rgb_to_hls(*mesh_plan._color(plan, one.place)) for one in plan.held]
    groups = [{round(hue, 3) for hue, *_ in colors[first : first + 2]} for first in range(0, 8, 2)]
    assert [len(group) for group in groups] == [1] * 4
    assert len(set.union(*groups)) == 4
    assert all(one[1] - other[1] > 0.2 for one, other in zip(colors[::2], colors[1::2], strict=True))
    assert mesh_plan._legend(plan.axes, numbers=False) == "color: fsdp, cp; shade: tp"


def test_one_device(tmp_path: Path) -> None:
    plan = MeshPlan.of(parse_config(TINY), jax.devices()[:1])
    assert _table(plan) == [{"host": "0", "devices": "0"}]
    assert "3 layers, 8 sequences of a microbatch, 40 positions of a sequence, 8 heads" in "\n".join(
        mesh_plan.lines(plan)
    )
    mesh_plan.draw(plan, str(tmp_path / "mesh.png"))


@pytest.mark.parametrize(
    ("change", "slice_name", "words"),
    [
        ("mesh.tp=3", "", "model.n_heads 8 is not divisible by mesh.tp 3"),
        ("mesh.tp=16", "", "needs a multiple of 16 devices, found 8"),
        ("mesh.tp=2", "v3-7", "unknown TPU type 'v3-7'"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(tmp_path: Path, change: str, slice_name: str, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY, "model": {**TINY["model"], "n_heads": 16 if "16" in change else 8}}))
    with pytest.raises(UserError, match=words):
        mesh_plan.run(str(path), [change, f"checkpoint.model_dir={tmp_path / 'run'}"], None, slice_name)
    assert not (tmp_path / "run").exists()
