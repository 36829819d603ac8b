"""Checkpoints of any tree of arrays."""

from pathlib import Path

import jax
import optax
import pytest
from support.states import abstract, assert_equal, mesh, shardings, state

from mesh_transformer.checkpoint.tensors import DamagedCheckpoint
from mesh_transformer.checkpoint.tree import load_tree, save_tree
from mesh_transformer.errors import UserError


def test_a_tree_is_saved_on_one_mesh_and_loaded_on_another(tmp_path: Path) -> None:
    saved = state(1)
    # the paths of optax's state are those that the first versions of this program renamed
    optimizer = optax.chain(optax.clip(1.0), optax.scale_by_adam()).init(saved.params)
    tree = {"params": saved, "opt_state": optimizer}
    save_tree(str(tmp_path), 3, tree, {"seed": 7})
    save_tree(str(tmp_path), 5, jax.tree.map(lambda x: x + 1, tree))
    other = shardings(mesh(dp=2, tp=2), rows="dp", columns="tp")
    like = {"params": abstract(saved, other), "opt_state": optimizer}
    found = load_tree(str(tmp_path), like, step=3)
    assert (found.step, found.extra) == (3, {"seed": 7})
    assert_equal(found.state, tree)
    assert found.state["params"].moments["w"].sharding == other.moments["w"]
    assert load_tree(str(tmp_path), like).step == 5


def test_another_tree_or_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no step that save_tree wrote; it holds nothing"):
        load_tree(str(tmp_path), state(1))
    (tmp_path / "photos").mkdir()
    weights = {"w": state(1, width=512).moments["w"]}
    save_tree(str(tmp_path), 1, weights)
    with pytest.raises(UserError, match=r"no step_2 that save_tree wrote; it holds photos, step_1"):
        load_tree(str(tmp_path), state(1), step=2)
    with pytest.raises(
        UserError, match=r"(?s)holds another tree than `like`:\n  tree/w: expected \(16, 24\) bfloat16, found"
    ):
        load_tree(str(tmp_path), {"w": state(1).moments["w"]})
    tensors = max((tmp_path / "step_1" / "state").rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    data = bytearray(tensors.read_bytes())
    data[len(data) // 2] ^= 1
    tensors.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match="wrong checksum of tree/w"):
        load_tree(str(tmp_path), weights)


def test_an_existing_step_is_kept_unless_its_replacement_is_asked_for(tmp_path: Path) -> None:
    old, new = {"w": jax.numpy.zeros(8)}, {"w": jax.numpy.ones(8)}
    save_tree(str(tmp_path), 1, old)
    with pytest.raises(UserError, match=r"step_1 exists: save another step, or pass replace=True"):
        save_tree(str(tmp_path), 1, new)
    assert not (tmp_path / "set_aside").exists()
    assert_equal(load_tree(str(tmp_path), old).state, old)
    save_tree(str(tmp_path), 1, new, replace=True)
    assert_equal(load_tree(str(tmp_path), old).state, new)
    assert_equal(load_tree(str(tmp_path / "set_aside"), old, step=1).state, old)
