"""Files of a version that stored Adam's state by position: they are read by name, and a run resumes from them."""

import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.builders import program

from mesh_transformer.checkpoint.native.manifest import flatten
from mesh_transformer.checkpoint.native.source import NativeSource, read_manifest
from mesh_transformer.checkpoint.native.writer import write_native
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.checkpoint.tensors import slots

HERE = Path(__file__).parent / "cd47221"
CURRENT_NAMES = {"opt_state/1/count": "opt_state/count", "opt_state/3/count": "opt_state/schedule"}


def current_name(name: str) -> str:
    return CURRENT_NAMES.get(name, name.replace("opt_state/1/", "opt_state/"))


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_a_run_resumes_from_a_file_of_cd47221(tmp_path: Path, moments: str) -> None:
    expected: dict[str, Any] = json.loads((HERE / "expected.json").read_text())[moments]
    with tarfile.open(HERE / "checkpoints.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    run, root = program(expected["config"]), str(tmp_path / moments)
    store = CheckpointStore(root, read_only=True, model=run.config.model, optimizer=run.config.optimizer)
    found = store.restore(run.abstract_state)
    assert found is not None
    hashes = {n: hashlib.sha256(np.asarray(x).tobytes()).hexdigest() for n, x in flatten(found.state).items()}
    assert hashes == {current_name(name): value for name, value in expected["arrays"].items()}
    source = NativeSource(f"{root}/step_2")
    assert slots(source) == {"mu", "nu"}
    assert source.counts == (2, 2, 2)
    written = write_native(source, str(tmp_path / "written"))
    assert read_manifest(written).tensors.keys() == hashes.keys()
    assert not [name for name in NativeSource(written).manifest.tensors if name.startswith("opt_state/1")]
    state, losses = found.state, []
    for tokens in np.array(expected["tokens"], np.int32):
        state, metrics = run.train_step(state, tokens)
        losses.append(float(metrics["train/loss"]))
    np.testing.assert_allclose(losses, expected["losses"], rtol=0, atol=1e-6)
