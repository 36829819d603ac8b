"""Checkpoints that commit 50565e5 wrote are read, resumed, sampled and converted: tests/golden/native/README.md."""

import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from golden import native
from support.builders import program
from support.covering import covering
from support.engines import complete, engine_of
from support.hf_folders import transformers_logits

from mesh_transformer.checkpoint.hf.writer import write_hf
from mesh_transformer.checkpoint.load import load, load_by_layer
from mesh_transformer.checkpoint.native.manifest import flatten
from mesh_transformer.checkpoint.native.writer import write_native
from mesh_transformer.checkpoint.open import Checkpoint
from mesh_transformer.checkpoint.store import Checkpoint as RestoredCheckpoint
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.checkpoint.tensors import UpdateCounts
from mesh_transformer.infer.cpu.packed import pack
from mesh_transformer.infer.requests import SamplingParams

# 5 layers, dense and with experts in turn; and two dense layers before two with experts
DAILY = ["gpt_neo", "qwen2", "gemma2", "qwen2_moe", "deepseek_v3"]
MIXED = ["qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"]


def restored(run: Any, folder: Path) -> RestoredCheckpoint:
    store = CheckpointStore(str(folder), read_only=True, model=run.config.model, optimizer=run.config.optimizer)
    found = store.restore(run.abstract_state)
    assert found is not None
    return found


def hashes(arrays: dict[str, Any]) -> dict[str, str]:
    return {name: hashlib.sha256(np.asarray(array).tobytes()).hexdigest()[:16] for name, array in arrays.items()}


@pytest.mark.parametrize(("family", "optimizer"), covering(native.MODELS, native.OPTIMIZERS))
def test_every_array_is_read(tmp_path: Path, family: str, optimizer: str) -> None:
    """Through all readers, and from a copy that this version writes."""
    expected = native.unpack(family, optimizer, tmp_path)
    run = program(expected["config"])
    state = restored(run, tmp_path).state
    arrays = flatten(state)
    assert hashes(arrays) == expected["arrays"]
    step = str(tmp_path / "step_2")
    source = Checkpoint.open(step).source(run.config.model)
    assert source.counts == UpdateCounts(2, 2, 2)
    slots = {slot: state.opt_state[slot] for slot in run.config.optimizer.slots}
    tree = flatten({"params": state.params, **slots})
    assert source.tensors.keys() == tree.keys()
    copy = write_native(source, str(tmp_path / "copy"))
    for opened in (source, Checkpoint.open(copy).source(run.config.model)):
        for name, array in tree.items():
            np.testing.assert_array_equal(opened.read(name, (slice(None),) * array.ndim), array, err_msg=name)
    again = flatten(restored(run, tmp_path / "copy").state)
    for name, array in arrays.items():
        np.testing.assert_array_equal(again[name], array, err_msg=name)


@pytest.mark.parametrize(
    ("family", "optimizer"),
    covering(native.MODELS, native.OPTIMIZERS, daily=(DAILY, native.OPTIMIZERS)),
)
def test_a_run_resumes(tmp_path: Path, family: str, optimizer: str) -> None:
    expected = native.unpack(family, optimizer, tmp_path)
    run, found = program(expected["config"]), []
    state = restored(run, tmp_path).state
    for batch in np.array(expected["tokens"], np.int32):
        state, metrics = run.train_step(state, batch)
        found.append([float(metrics["train/loss"]), float(metrics["train/grad_norm"])])
    (loss, norm), (later_loss, later_norm) = np.transpose(np.stack([found, expected["steps"]]), (1, 2, 0))
    # float32 sums in another order, on another processor
    for ours, theirs in (loss, norm):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=0)
    # An update divides by the root of the squares: it multiplies what rounding does to a gradient near zero. With
    # Adafactor, the program that wrote the file differs from itself: gpt_neox's loss after this resume by 1.2e-5
    # between the flags of the tests (AVX) and XLA's own on one processor. With either, this program equals it bit for
    # bit.
    for ours, theirs in (later_loss, later_norm):
        np.testing.assert_allclose(ours, theirs, rtol=3e-5 if optimizer == "adafactor" else 1e-5, atol=0)


@pytest.mark.parametrize("family", covering(native.MODELS, daily=(DAILY,)))
def test_a_checkpoint_is_sampled(tmp_path: Path, family: str) -> None:
    """With stacked parameters on two devices, and with packed layers as on a CPU."""
    expected = native.unpack(family, "adam", tmp_path)
    source = Checkpoint.open(str(tmp_path / "step_2")).source(program(expected["config"]).config.model)
    request = (expected["prompt"], SamplingParams(max_tokens=8, temperature=0))
    for fsdp in (2, 1):
        run = program(expected["config"], f"mesh.fsdp={fsdp}", devices=fsdp)
        abstract = run.placement.abstract(run.model.dtype)
        if fsdp == 1:
            params = pack(load_by_layer(source, abstract, run.model.rows_by_layer), run.model.decoder)
        else:
            params = load(source, {"params": abstract})["params"]
            logits = np.asarray(jax.jit(run.model.apply)(params, np.array([expected["prompt"]]))[0])[0, -1]
            # float32 sums in another order
            found = logits[: len(expected["logits"])]
            np.testing.assert_allclose(found, expected["logits"], rtol=0, atol=1e-5)
        (made,) = complete(engine_of(run, params, slots=1), [request])
        assert made.ids == expected["greedy"]


@pytest.mark.parametrize("family", covering(MIXED))
def test_a_checkpoint_is_converted(tmp_path: Path, family: str) -> None:
    """transformers computes the logits of the version that wrote it."""
    expected = native.unpack(family, "adam", tmp_path)
    model = program(expected["config"]).config.model
    write_hf(Checkpoint.open(str(tmp_path)).source(model), model, str(tmp_path / "hf"))
    logits = transformers_logits(tmp_path / "hf", np.array([expected["prompt"]]))[0, -1]
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "mesh"),
    covering(native.MODELS, native.MESHES, daily=(DAILY, native.MESHES)),
)
def test_losses_of_a_run(family: str, mesh: str) -> None:
    """float32 sums in another order, on another processor."""
    expected = json.loads((native.HERE / "losses.json").read_text())[family][mesh]
    np.testing.assert_allclose(native.losses(family, mesh), expected, rtol=2e-6, atol=0)
