"""Weights from native steps in different places and with different names."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.builders import TINY

from mesh_transformer.checkpoint.native.source import NativeSource
from mesh_transformer.checkpoint.open import Checkpoint
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.config import parse_config
from mesh_transformer.errors import UserError
from mesh_transformer.runtime.session.session import Session
from mesh_transformer.runtime.session.weights import open_checkpoint, read_params
from mesh_transformer.runtime.training.start import read_state
from mesh_transformer.train.step import TrainProgram, TrainState


@pytest.fixture(scope="module")
def session() -> Session:
    return Session.open(parse_config({**TINY, "mesh": {"tp": 4}}))


@pytest.fixture(scope="module")
def program(session: Session) -> TrainProgram:
    return TrainProgram(session.placement, session.config)


@pytest.fixture(scope="module")
def state(program: TrainProgram) -> TrainState:
    state = program.init(jax.random.key(1))
    count = jax.tree.map(lambda x: x + 3 if x.ndim == 0 else x, state.opt_state)
    return state._replace(step=state.step + 9, opt_state=count)


@pytest.fixture
def step(tmp_path: Path, state: TrainState) -> Path:
    """`run/step_9`, with steps 2 and 10 that have other values."""
    store = CheckpointStore(str(tmp_path / "run"), keep_latest=3)
    for number in (2, 9, 10):
        params = state.params if number == 9 else jax.tree.map(lambda x: x + 1, state.params)
        store.save(number, state._replace(step=state.step - 9 + number, params=params), {})
    store.close()
    return tmp_path / "run/step_9"


@pytest.mark.parametrize("path", ["run/step_9", "run/step_9/", "run/../run/step_9", "run/good", "link", "step_4", "."])
def test_the_very_folder_that_is_named_is_read(
    step: Path,
    session: Session,
    program: TrainProgram,
    state: TrainState,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = step.parent.parent
    if path == "run/good":
        step.rename(root / path)
    elif path in ("link", "step_4"):  # the name differs from the step
        (root / path).symlink_to(step)
    monkeypatch.chdir(step if path == "." else root)
    checkpoint = Checkpoint.open(path)
    source = open_checkpoint(session, checkpoint)
    params, (whole, opt_state) = read_params(session, checkpoint), read_state(program, source)
    assert (params.step, source.counts.step) == (9, 9)
    for found in (params.params, whole):
        jax.tree.map(np.testing.assert_array_equal, found, state.params)
        assert jax.tree.map(lambda x: x.sharding, found) == program.state_shardings.params
    jax.tree.map(np.testing.assert_array_equal, opt_state, state.opt_state)
    assert jax.tree.structure(opt_state) == jax.tree.structure(state.opt_state)


def test_the_newest_of_a_run(step: Path, session: Session) -> None:
    for path in (step.parent, f"{step.parent}/"):
        assert read_params(session, Checkpoint.open(str(path))).step == 10


def test_a_decoder_is_never_on_the_devices_twice(
    step: Path, session: Session, state: TrainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers are packed one by one: memory has the packed layers and at most one unpacked part."""
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params)) // 2
    largest = state.params["embed"]["tokens"]["w"].nbytes // 2
    assert weights > 6 * largest  # so a second copy of the weights fails the test
    held = []
    read, before = NativeSource.read_stored, sum(array.nbytes for array in jax.live_arrays())

    def watched(self: NativeSource, name: str, index: tuple[slice, ...]) -> np.ndarray:
        held.append(sum(array.nbytes for array in jax.live_arrays()) - before)
        return read(self, name, index)

    monkeypatch.setattr(NativeSource, "read_stored", watched)
    half = Session.open(parse_config({**TINY, "mesh": {"tp": 4}}, ["compute.dtype=bfloat16"]))
    found = read_params(half, Checkpoint.open(str(step)), for_decode=True)
    assert len(held) > 3 * TINY["model"]["layers"]
    assert max(held) <= weights + largest
    assert {leaf.dtype.itemsize for leaf in jax.tree.leaves(found.params)} == {2}
    weight = np.asarray(state.params["blocks"]["ff/out"]["w"][1].astype(jnp.bfloat16))
    packed = found.params["blocks"][1].others["ff/out"]["w"].w_FD
    np.testing.assert_array_equal(np.asarray(packed).T, weight.view(np.uint16))


@pytest.mark.parametrize("for_decode", [False, True], ids=["stacked", "packed"])
def test_a_flipped_bit_is_reported(step: Path, session: Session, for_decode: bool) -> None:
    files = [path for path in (step / "state").rglob("d/*") if path.is_file()]
    biggest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(biggest.read_bytes())
    content[len(content) // 2] ^= 1
    biggest.write_bytes(content)
    with pytest.raises(UserError, match=f"{step} is damaged: .*; use another step"):
        read_params(session, Checkpoint.open(str(step)), for_decode=for_decode)
    shutil.rmtree(step / "manifest")
    with pytest.raises(UserError, match=r"no checkpoint in .*/step_9"):
        read_params(session, Checkpoint.open(str(step)))
