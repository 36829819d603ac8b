"""The whole model of a base and adapters, read from a checkpoint; the hash of a base."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support.array_source import ArraySource
from support.builders import TINY, program
from support.families import MODELS

from mesh_transformer.checkpoint.adapters import AdaptedSource, BaseSource, LoraRecord
from mesh_transformer.checkpoint.load import load, load_by_layer
from mesh_transformer.checkpoint.native.manifest import flatten
from mesh_transformer.checkpoint.native.source import NativeSource
from mesh_transformer.checkpoint.native.writer import write_native
from mesh_transformer.checkpoint.tensors import DamagedCheckpoint, UpdateCounts
from mesh_transformer.errors import UserError
from mesh_transformer.spec import Adapter
from mesh_transformer.train.step import TrainProgram

CASES = [
    pytest.param("deepseek_v3", marks=pytest.mark.nightly),
    "mixtral",
    pytest.param("gpt_neox", marks=pytest.mark.nightly),
    pytest.param("gemma3", marks=pytest.mark.nightly),
]


def run_of(case: str, *changes: str) -> TrainProgram:
    return program({**TINY, "model": MODELS[case], "lora": {"rank": 3, "alpha": 6}}, *changes)


def arrays_of(run: TrainProgram) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], tuple[Adapter, ...]]:
    """Random values: of the base and of the adapters, by the names of a checkpoint."""
    random = np.random.default_rng(3)
    shapes = jax.eval_shape(run.init, jax.random.key(0))
    frozen, params = (
        {f"params/{name}": 0.2 * random.standard_normal(leaf.shape, np.float32) for name, leaf in flatten(tree).items()}
        for tree in (shapes.frozen, shapes.params)
    )
    (form,) = run.model.decoder.forms
    return frozen, params, form.adapters


def source_of(run: TrainProgram, base: Any = None) -> AdaptedSource:
    frozen, params, adapters = arrays_of(run)
    model = run.config.model
    whole = BaseSource(base or ArraySource(frozen, UpdateCounts(7)), model)
    return AdaptedSource(whole, ArraySource(params, UpdateCounts(4)), LoraRecord("base", "", adapters), model)


@pytest.mark.parametrize("case", CASES)
def test_a_matrix_is_read_with_its_adapter(case: str) -> None:
    """As a program puts it together; in parts too."""
    run = run_of(case)
    frozen, params, _ = arrays_of(run)
    source = source_of(run)

    def tree(arrays: dict[str, np.ndarray], like: Any) -> Any:
        leaves = [arrays[f"params/{name}"] for name in flatten(like)]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    shapes = jax.eval_shape(run.init, jax.random.key(0))
    state = shapes._replace(params=tree(params, shapes.params), frozen=tree(frozen, shapes.frozen))
    tokens = np.arange(24).reshape(2, 12).astype(np.int32)
    adapted, _ = run.model.apply(run.parameters(state), tokens)
    plain = program({**TINY, "model": MODELS[case]})
    whole = load(source, {"params": plain.placement.abstract(np.dtype(np.float32))})["params"]
    merged, _ = plain.model.apply(whole, tokens)
    # products of sums of products, in float32
    scale = np.abs(np.asarray(adapted)[np.isfinite(adapted)]).max()
    np.testing.assert_allclose(merged, adapted, rtol=0, atol=2e-5 * scale)
    names = [name for name, info in source.tensors.items() if len(info.shape) > 2]
    assert names
    for name in names:
        shape = source.tensors[name].shape
        part = tuple(slice(n // 3, max(n // 3 + 1, n - 1)) for n in shape)
        np.testing.assert_allclose(
            source.read(name, part), source.read(name, (slice(None),) * len(shape))[part], rtol=1e-6, atol=1e-6
        )
    changed = {
        name
        for name in names
        if not np.array_equal(source.read(name, (slice(None),) * len(source.tensors[name].shape)), frozen[name])
    }
    paths = {
        path
        for path, array in run.model.decoder.arrays().items()
        if array.role != "other" and path.startswith("blocks")
    }
    assert changed == {f"params/{path}" for path in paths}


@pytest.mark.parametrize("case", CASES)
def test_the_hash_is_of_the_values(case: str, tmp_path: Path) -> None:
    """It does not depend on the format, the mesh, the parts that are read, or the padding of the vocabulary."""
    model = {**MODELS[case], "n_vocab": 500}
    one = program({**TINY, "model": model})
    params = jax.tree.map(lambda x: np.random.default_rng(5).standard_normal(x.shape, np.float32), one.model.shapes)
    arrays = {f"params/{name}": value for name, value in flatten(params).items()}

    def hash_of(source: Any, run: TrainProgram = one) -> str:
        base = BaseSource(source, run.config.model)
        load(base, {"params": run.placement.abstract(np.dtype(np.float32))})
        assert base.hash is not None
        return base.hash

    plain = hash_of(ArraySource(arrays, UpdateCounts(0)))
    step = write_native(ArraySource(arrays, UpdateCounts(0)), str(tmp_path), model=one.config.model)
    assert hash_of(NativeSource(step)) == plain
    assert (
        hash_of(NativeSource(step), program({**TINY, "model": model}, "mesh.fsdp=2", "mesh.tp=2", devices=4)) == plain
    )
    by_layer = BaseSource(NativeSource(step), one.config.model)
    list(load_by_layer(by_layer, one.placement.abstract(np.dtype(np.float32)), one.model.rows_by_layer))
    assert by_layer.hash == plain
    padded = {name: value.copy() for name, value in arrays.items()}
    padded["params/embed/tokens/w"][500:] += 1
    assert hash_of(ArraySource(padded, UpdateCounts(0))) == plain
    padded["params/embed/tokens/w"][499, 0] += 1e-6
    assert hash_of(ArraySource(padded, UpdateCounts(0))) != plain


def test_another_base_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    run = run_of("mixtral")
    source = source_of(run)
    load(source, {"params": program({**TINY, "model": MODELS["mixtral"]}).placement.abstract(np.dtype(np.float32))})
    assert "was trained on a base of hash" in caplog.text


@pytest.mark.parametrize("change", ["shape", "absent", "unknown"])
def test_adapters_of_another_model_are_refused(change: str) -> None:
    run = run_of("mixtral")
    frozen, params, adapters = arrays_of(run)
    name = "params/blocks/attention/q/w_lora_b"
    if change == "shape":
        params[name] = params[name][:, :2]
    elif change == "absent":
        del params[name]
    else:
        adapters = (dataclasses.replace(adapters[0], path="attention/other/w", a_of=""), *adapters[1:])
    with pytest.raises(UserError, match=re.escape("attention/other/w" if change == "unknown" else name)):
        AdaptedSource(
            BaseSource(ArraySource(frozen, UpdateCounts(0)), run.config.model),
            ArraySource(params, UpdateCounts(0)),
            LoraRecord("base", "", adapters),
            run.config.model,
        )


@pytest.mark.parametrize(
    "recorded",
    [
        3,
        {},
        {"base": "x", "hash": "y"},
        {"base": 3, "hash": "y", "adapters": []},
        {"base": "x", "hash": "y", "adapters": [{"path": "q", "rank": -1, "scale": 1.0}]},
        {"base": "x", "hash": "y", "adapters": [{"path": "q", "rank": 2, "scale": "big"}]},
        {"base": "x", "hash": "y", "adapters": [{"rank": 2}]},
        {"base": "x", "hash": "y", "adapters": "all"},
    ],
)
def test_a_damaged_record_is_told(recorded: Any) -> None:
    with pytest.raises(DamagedCheckpoint, match="is no record of this program"):
        LoraRecord.of({"lora": recorded}, "run/step_3")


def test_a_record_is_read_back() -> None:
    record = LoraRecord("base", "0123", (Adapter(path="attention/q/w", rank=2, scale=0.5, a_of="attention/q/w"),))
    assert LoraRecord.of({"lora": record.to_json()}, "") == record
    assert LoraRecord.of({}, "") is None
