"""CheckpointStore on the local disk."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.experimental import multihost_utils
from support.commands import TESTS
from support.states import abstract, assert_equal, mesh, read_part, shardings, state, tp8
from support.waiting import LONG_S

from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.errors import UserError


def write(root: Path | str, *steps: int, **options: int) -> None:
    """Save `state(step)` at each step."""
    store = CheckpointStore(str(root), **options)
    for step in steps:
        store.save(step, state(step), {"seen": step})
    store.close()


def test_a_saved_state_is_restored(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path / "not" / "yet" / "there"))
    extra = {"loader": {"file": 3, "record": 17}, "tokens": 2**40, "lr": 1e-4, "name": "ü"}
    store.save(0, state(5), extra)
    found = store.restore(abstract(state(1)))
    assert found is not None
    assert (found.step, found.extra) == (0, extra)
    assert_equal(found.state, state(5))
    assert store.steps() == [0]
    store.close()


def test_an_absent_root_has_no_steps(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path / "absent"), read_only=True)
    assert store.steps() == []
    assert store.restore(abstract(state(1))) is None
    assert not (tmp_path / "absent").exists()


def test_a_relative_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write("runs/a", 1)
    assert (tmp_path / "runs" / "a" / "step_1").is_dir()


def test_later_changes_of_the_state_do_not_change_a_save(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    live = state(1)
    store.save(1, live, {})
    changed = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(live)
    jax.block_until_ready(changed)
    found = store.restore(abstract(changed))
    assert found is not None
    assert_equal(found.state, state(1))
    store.close()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [8, 9]),
        ({"keep_latest": 1}, [9]),
        ({"keep_every": 4, "keep_latest": 1}, [4, 8, 9]),
        ({"keep_every": 4, "keep_latest": 3}, [4, 7, 8, 9]),
    ],
)
def test_which_steps_are_kept(tmp_path: Path, options: dict[str, int], kept: list[int]) -> None:
    write(tmp_path, 1, 3, 4, 5, **options)
    # another process resumes
    write(tmp_path, 7, 8, 9, **options)
    assert CheckpointStore(str(tmp_path), read_only=True).steps() == kept


def test_other_files_of_the_run_are_kept(tmp_path: Path) -> None:
    others = ["metrics.jsonl", "tensorboard/events.1", "step_5.txt", "steps/step_4", "7/x", "step_x/y"]
    for name in others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    write(tmp_path, 1, 2)
    write(tmp_path, 3)
    assert {name: (tmp_path / name).read_text() for name in others} == {name: name for name in others}
    assert CheckpointStore(str(tmp_path), read_only=True).steps() == [2, 3]


@pytest.mark.parametrize(
    "target",
    [
        lambda: shardings(mesh(dp=8), rows="dp"),
        lambda: shardings(mesh(dp=2, tp=4), rows="dp", columns="tp"),
        lambda: shardings(mesh(tp=2), columns="tp"),
        lambda: shardings(mesh()),
    ],
    ids=["fsdp8", "fsdp2-tp4", "two-devices", "one-device"],
)
def test_restore_on_another_mesh_is_bit_exact(tmp_path: Path, target: object) -> None:
    write(tmp_path, 3)
    on = target()  # type: ignore[operator]
    store = CheckpointStore(str(tmp_path))
    found = store.restore(abstract(state(0), on))
    assert found is not None
    assert_equal(found.state, state(3))
    assert jax.tree.map(lambda x: x.sharding, found.state) == on
    store.save(4, found.state, {})
    back = store.restore(abstract(state(0)))
    assert back is not None
    assert back.step == 4
    assert_equal(back.state, state(3))
    store.close()


def test_restore_reads_a_part_of_the_tree(tmp_path: Path) -> None:
    write(tmp_path, 3)
    folder, one = f"{tmp_path}/step_3", shardings(mesh())
    found = read_part(folder, {"params": abstract(state(0), one).params})
    assert_equal(found, {"params": state(3).params})
    deeper = read_part(folder, {"params": {"scale": abstract(state(0)).params["scale"]}})
    assert deeper["params"]["scale"] == 3


def test_another_model_is_an_error_without_a_fall_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 1, keep_latest=2)
    store = CheckpointStore(str(tmp_path), keep_latest=2)
    store.save(2, state(2, width=32), {})
    with pytest.raises(UserError) as wrong:
        # step 1 would match
        store.restore(abstract(state(1)))
    assert "params/block/~/linear/w: expected (16, 24) float32, found (16, 32) float32" in str(wrong.value)
    assert f"{tmp_path}/step_2 does not match" in str(wrong.value)
    assert "skipped" not in caplog.text
    with pytest.raises(UserError, match="expected \\(16, 24\\) float32"):
        read_part(f"{tmp_path}/step_2", {"params": abstract(state(1)).params})
    store.close()


def test_dtypes_and_names_must_match(tmp_path: Path) -> None:
    write(tmp_path, 1)
    store = CheckpointStore(str(tmp_path), read_only=True)
    wanted = abstract(state(1))
    float_moments = {"w": jax.ShapeDtypeStruct((16, 24), "float32", sharding=tp8().moments["w"])}
    with pytest.raises(UserError, match=r"moments/w: expected .* float32, found \(16, 24\) bfloat16"):
        store.restore(wanted._replace(moments=float_moments))
    with pytest.raises(UserError, match=r"moments/w: expected nothing, found \(16, 24\) bfloat16"):
        store.restore(wanted._replace(moments={}))
    with pytest.raises(UserError, match=r"moments/v: expected \(16, 24\) bfloat16, found nothing"):
        store.restore(wanted._replace(moments={"w": wanted.moments["w"], "v": wanted.moments["w"]}))
    with pytest.raises(UserError, match="params/other: expected .* found nothing"):
        read_part(f"{tmp_path}/step_1", {"params": {"other": wanted.step}})


def test_extra_that_is_not_json_is_refused_before_the_save(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    with pytest.raises(TypeError):
        store.save(1, state(1), {"when": object()})
    store.save(1, state(1), {})
    store.close()
    assert sorted(os.listdir(tmp_path)) == ["step_1"]


def test_the_first_save_after_a_resume_may_be_for_a_preemption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of one job agree on the step before which they stop, and Orbax asks whether it is this one."""
    write(tmp_path, 1)
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", lambda step: True)
    write(tmp_path, 2)
    assert CheckpointStore(str(tmp_path), read_only=True).steps() == [1, 2]


def test_a_read_only_or_closed_store_does_not_save(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    store.close()
    store.close()
    for refused in (store, CheckpointStore(str(tmp_path), read_only=True)):
        with pytest.raises(RuntimeError, match="read-only or closed"):
            refused.save(1, state(1), {})


PROGRAM = """
import logging, sys
from mesh_transformer import logs
logs.set_up()
logging.basicConfig(level=logging.INFO, format="LOG %(name)s %(levelname)s", stream=sys.stdout, force=True)
from support.states import read_part, state
from mesh_transformer.checkpoint.store import CheckpointStore
store = CheckpointStore(sys.argv[1])
for step in range(3):
    store.save(step, state(step), {})
store.close()
print("closed", flush=True)
"""


def test_the_process_exits_without_log_lines_of_libraries(tmp_path: Path) -> None:
    program = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, cwd=TESTS) as child:
        assert child.stdout is not None
        lines = []
        for line in child.stdout:
            lines.append(line.strip())
        assert child.wait(LONG_S) == 0
    assert [line for line in lines if "LOG absl" in line or "LOG fsspec" in line] == []
    assert lines[-1] == "closed"
