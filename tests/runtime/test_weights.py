"""A session's weights from native steps, wherever they lie and whatever they are called."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from builders import TINY

from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.config import parse_config
from mesh_transformer.errors import UserError
from mesh_transformer.runtime.session import Session
from mesh_transformer.runtime.start import read_state
from mesh_transformer.runtime.weights import open_agreed, read_params
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
    """`run/step_9`, with the steps 2 and 10 of other values beside it."""
    store = CheckpointStore(str(tmp_path / "run"), keep_latest=3)
    for number in (2, 9, 10):
        params = state.params if number == 9 else jax.tree.map(lambda x: x + 1, state.params)
        store.save(number, state._replace(step=state.step - 9 + number, params=params), {})
    store.close()
    return tmp_path / "run/step_9"


@pytest.mark.parametrize(
    "path", ["run/step_9", "run/step_9/", "run/../run/step_9", "run/good", "link", "step_4", "."]
)
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
    elif path in ("link", "step_4"):  # another number than that of the step
        (root / path).symlink_to(step)
    monkeypatch.chdir(step if path == "." else root)
    source = open_agreed(session, path)
    params, (whole, opt_state) = read_params(session, path), read_state(program, source)
    assert (params.step, source.counts.step) == (9, 9)
    for found in (params.params, whole):
        jax.tree.map(np.testing.assert_array_equal, found, state.params)
        assert jax.tree.map(lambda x: x.sharding, found) == program.state_shardings.params
    jax.tree.map(np.testing.assert_array_equal, opt_state, state.opt_state)
    assert jax.tree.structure(opt_state) == jax.tree.structure(state.opt_state)


def test_the_newest_of_a_run(step: Path, session: Session) -> None:
    for path in (step.parent, f"{step.parent}/"):
        assert read_params(session, str(path)).step == 10


def test_a_flipped_bit_is_told(step: Path, session: Session) -> None:
    files = [path for path in (step / "state").rglob("d/*") if path.is_file()]
    biggest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(biggest.read_bytes())
    content[len(content) // 2] ^= 1
    biggest.write_bytes(content)
    with pytest.raises(UserError, match=f"{step} is damaged: .*; name another step"):
        read_params(session, str(step))
    shutil.rmtree(step / "manifest")
    with pytest.raises(UserError, match=r"no checkpoint in .*/step_9"):
        read_params(session, str(step))
