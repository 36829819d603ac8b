"""The products of matrices in forms, and a form that is added: two files and a line of a table."""

import dataclasses
import functools
import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.builders import TINY, program

from mesh_transformer.ops.forms import TERMS, FormMatrix, with_matrices
from mesh_transformer.ops.linear import SumOfTerms, dense, matmul, terms_of
from mesh_transformer.spec import Adapter, Array, Lora
from mesh_transformer.spec.forms import name_of, stored
from mesh_transformer.train.step import TrainProgram

FILES = ("added_form", "added_form_terms")
SHAPES = {
    "io": Array(("embed", "mlp"), (6, 10), 60, "input"),
    "oio": Array(("heads", None, None), (3, 6, 5), 90, "inner", dims="oio"),
    "eio": Array(("experts", "embed", "mlp"), (4, 6, 10), 60, "input", dims="eio"),
}
TOKENS = np.random.default_rng(0).integers(0, 512, (2, 2, 8, 41)).astype(np.int32)


def matrix_of(dims: str) -> tuple[FormMatrix, dict[str, np.ndarray]]:
    random = np.random.default_rng(1)
    form = Lora(adapters=(Adapter(path="m/w", rank=2, scale=1.5),))
    arrays = stored({"m/w": SHAPES[dims]}, [form])
    values = {path.removeprefix("m/"): random.standard_normal(array.shape) for path, array in arrays.items()}
    block = {"m": {name: jnp.asarray(value, jnp.float32) for name, value in values.items()}}
    matrix = with_matrices(block, {"m/w": SHAPES[dims]}, [form], lambda *_: None)["m"]["w"]
    return matrix, values


@pytest.mark.parametrize("dims", SHAPES)
def test_dense(dims: str) -> None:
    matrix, values = matrix_of(dims)
    letters = {"io": "ir,ro->io", "oio": "ir,hro->hio", "eio": "eir,ero->eio"}[dims]
    expected = values["w"] + 1.5 * np.einsum(letters, values["w_lora_a"], values["w_lora_b"])
    np.testing.assert_allclose(dense(matrix), expected, rtol=1e-5, atol=1e-5)
    assert matrix.shape == expected.shape
    assert len(matrix) == len(expected)
    if dims != "eio":
        x = np.random.default_rng(2).standard_normal((2, 3, 6)).astype(np.float32)
        flat = matrix if dims == "io" else matrix.joined()
        assert isinstance(flat, SumOfTerms)
        whole = np.moveaxis(expected, dims.index("i"), 0).reshape(6, -1)
        np.testing.assert_allclose(matmul(x, flat, jnp.dtype(jnp.float32)), x @ whole, rtol=1e-4, atol=1e-4)
        assert flat.shape == whole.shape


def test_the_elements_that_a_token_uses() -> None:
    """Of routed experts, the share of the chosen ones."""
    form = Lora(adapters=(Adapter(path="m/w", rank=2, scale=1.0),))
    arrays = stored({"m/w": SHAPES["eio"]}, [form])
    # one of four experts
    assert arrays["m/w"].used == 60
    assert arrays[name_of("m/w", "lora_a")].used == 6 * 2
    assert arrays[name_of("m/w", "lora_b")].used == 2 * 10


@pytest.fixture(scope="module")
def factored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[type]:
    folder = tmp_path_factory.mktemp("added")
    for name in FILES:
        shutil.copy(Path(__file__).parents[1] / "support" / "added" / f"{name}.py", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        form, terms = (importlib.import_module(name) for name in FILES)
        patch.setitem(TERMS, form.Factored, terms.terms)
        yield form.Factored
    for name in FILES:
        del sys.modules[name]


def test_forms_apply_one_after_the_other(factored: type) -> None:
    """Adapters of a matrix that is stored as two factors."""
    array, random = SHAPES["io"], np.random.default_rng(4)
    forms = [factored(rank=3), Lora(adapters=(Adapter(path="ff/w", rank=2, scale=0.5),))]
    arrays = stored({"ff/w": array}, forms)
    assert arrays.keys() == {"ff/w_u", "ff/w_v", "ff/w_lora_a", "ff/w_lora_b"}
    values = {
        path.removeprefix("ff/"): random.standard_normal(a.shape).astype(np.float32) for path, a in arrays.items()
    }
    block = {"ff": {name: jnp.asarray(value) for name, value in values.items()}}
    matrix = with_matrices(block, {"ff/w": array}, forms, lambda *_: None)["ff"]["w"]
    expected = values["w_u"] @ values["w_v"] + 0.5 * values["w_lora_a"] @ values["w_lora_b"]
    np.testing.assert_allclose(dense(matrix), expected, rtol=1e-5, atol=1e-5)
    x = random.standard_normal((2, 3, 6)).astype(np.float32)
    np.testing.assert_allclose(matmul(x, matrix, jnp.dtype(jnp.float32)), x @ expected, rtol=1e-4, atol=1e-4)
    assert [len(term.factors) for term in terms_of(matrix)] == [2, 2]
    assert matrix.shape == (6, 10)


def run_of(factored: type, *changes: str, devices: int = 1) -> TrainProgram:
    raw = {**TINY, "model": {**TINY["model"], "layers": 4}}
    run = program(raw, *changes, devices=devices, remat="full")
    decoder = dataclasses.replace(run.model.decoder, forms=(factored(rank=8),))
    placement = dataclasses.replace(run.placement, model=dataclasses.replace(run.model, decoder=decoder))
    return TrainProgram(placement, run.config)


def test_an_added_form_trains_on_a_mesh(factored: type) -> None:
    one, mesh = run_of(factored), run_of(factored, "mesh.pp=2", "mesh.tp=2", devices=4)
    assert "w" not in one.abstract_state.params["blocks"]["ff/in"]
    assert one.abstract_state.params["blocks"]["ff/in"]["w_u"].shape == (4, 64, 8)
    losses = []
    for run in (one, mesh):
        state = run.init(jax.random.key(0))
        for tokens in TOKENS:
            state, metrics = run.train_step(state, tokens)
            losses.append(float(metrics["train/loss"]))
        leaf = jax.device_get(state.params["blocks"]["ff/out"]["w_v"])
        losses.append(float(np.abs(leaf).sum()))
    # float32 sums in another order
    np.testing.assert_allclose(losses[:3], losses[3:], rtol=1e-5)


def test_its_first_loss_is_that_of_the_product(factored: type) -> None:
    run = run_of(factored)
    state = run.init(jax.random.key(0))
    plain = program({**TINY, "model": {**TINY["model"], "layers": 4}})
    blocks = {}
    for module, leaves in state.params["blocks"].items():
        product = functools.partial(jnp.einsum, "liu,luo->lio")
        blocks[module] = {name: leaf for name, leaf in leaves.items() if name not in ("w_u", "w_v")} | (
            {"w": product(leaves["w_u"], leaves["w_v"])} if "w_u" in leaves else {}
        )
    logits, expected = (
        model.apply(params, TOKENS[0, 0, :, :-1])[0]
        for model, params in ((run.model, state.params), (plain.model, {**state.params, "blocks": blocks}))
    )
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5)
