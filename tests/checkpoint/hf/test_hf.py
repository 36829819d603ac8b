"""The Hugging Face format compared with transformers, and round trips."""

import json
import random
import tracemalloc

import golden
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from support import hf_folders as hf
from support.builders import program
from support.families import MODELS, OF_TRANSFORMERS
from support.hf_models import BASE, rope, save_model

from mesh_transformer.checkpoint.hf import writer as hf_write
from mesh_transformer.checkpoint.hf.safetensors_file import read_header
from mesh_transformer.checkpoint.hf.source import HFSource
from mesh_transformer.checkpoint.hf.writer import write_hf
from mesh_transformer.errors import UserError
from mesh_transformer.families import FAMILIES, gpt_neox

# For float32: logits are up to about 10, and the two programs differ by less than 1e-5.
TOLERANCE = 1e-4
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def tokens(model, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, model.n_vocab, (2, model.seq))


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """The same names, dtypes and bits."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"d_model": 40, "n_heads": 1, "pe_rotary_dims": 40, "layers": 1},
        {"d_model": 56, "n_heads": 7, "pe_rotary_dims": 2, "n_vocab": 128},  # no padding
        {"d_ff": 52, "n_vocab": 5, "layers": 12, "seq": 7},
    ],
    ids=["odd", "one_head", "many_heads", "narrow"],
)
def test_transformers_gives_the_same_logits_for_an_export(tmp_path, sizes) -> None:
    model = hf.model_config(**sizes)
    params = hf.random_params(model)
    # GPTJForCausalLM has no such bias
    assert params["embed"]["tokens"]["b"].all()
    write_hf(hf.MemorySource(params), model, str(tmp_path))
    x = tokens(model)
    np.testing.assert_allclose(
        hf.transformers_logits(tmp_path, x), hf.model_logits(model, params, x), rtol=0, atol=TOLERANCE
    )


def test_transformers_gives_the_same_logits_for_the_golden_weights(original, tmp_path) -> None:
    model = program(golden.config(original / "configs/tiny_mp1.json")).config.model
    params = golden.read_params(original / "mp8/ckpt_full/step_5", model)
    expected = np.load(original / "mp8/f32/eval.npz")
    write_hf(hf.MemorySource(params), model, str(tmp_path))
    found = hf.transformers_logits(tmp_path, expected["tokens"][:, :-1])
    np.testing.assert_allclose(
        found, hf.model_logits(model, params, expected["tokens"][:, :-1]), rtol=0, atol=TOLERANCE
    )
    # the logits of the original program
    np.testing.assert_allclose(found, expected["logits"], rtol=0, atol=TOLERANCE)


def test_exchanged_matrices_change_the_logits(tmp_path) -> None:
    model = hf.model_config()
    params = hf.random_params(model)
    write_hf(hf.MemorySource(params), model, str(tmp_path))
    attention = params["blocks"]["attention/q"]["w"]
    params["blocks"]["attention/q"]["w"] = params["blocks"]["attention/k"]["w"]
    params["blocks"]["attention/k"]["w"] = attention
    x = tokens(model)
    assert np.abs(hf.transformers_logits(tmp_path, x) - hf.model_logits(model, params, x)).max() > 100 * TOLERANCE


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("shards", ["5GB", "40KB"])
def test_a_folder_of_transformers_is_read_exactly(tmp_path, dtype, shards) -> None:
    model = hf.model_config()
    saved = hf.save_transformers_model(tmp_path, model, dtype=dtype, max_shard_size=shards)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards == "40KB")
    source = HFSource(str(tmp_path), model)
    found = hf.read_all(source)
    state = {name: hf.to_numpy(tensor) for name, tensor in saved.state_dict().items()}
    assert all(info.dtype == DTYPES[dtype] for info in source.tensors.values())
    np.testing.assert_array_equal(found["params/blocks/ff/in/w"][2], state["transformer.h.2.mlp.fc_in.weight"].T)
    np.testing.assert_array_equal(found["params/blocks/norm/offset"][1], state["transformer.h.1.ln_1.bias"])
    np.testing.assert_array_equal(found["params/embed/tokens/w"][:131], state["transformer.wte.weight"])
    assert not found["params/embed/tokens/w"][131:].any()
    assert not found["params/embed/tokens/b"].any()
    # both programs compute in float32 from the same stored values
    x = tokens(model)
    np.testing.assert_allclose(
        hf.model_logits(model, hf.to_tree(found), x),
        hf.transformers_logits(tmp_path, x),
        rtol=0,
        atol=TOLERANCE,
    )


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_round_trip_keeps_every_bit(tmp_path, dtype) -> None:
    model = hf.model_config()
    hf.save_transformers_model(tmp_path / "saved", model, dtype=dtype)
    source = HFSource(str(tmp_path / "saved"))
    write_hf(source, model, str(tmp_path / "written"), shard_bytes=30_000)
    found = HFSource(str(tmp_path / "written"), model)
    assert_same(hf.read_all(found), hf.read_all(source))
    header = read_header(str(tmp_path / "saved/model.safetensors"))
    index = json.loads((tmp_path / "written/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == header.keys()
    assert index["metadata"]["total_size"] == sum(t.dtype.itemsize * int(np.prod(t.shape)) for t in header.values())


@pytest.mark.parametrize("family", OF_TRANSFORMERS)
def test_the_order_of_a_table_does_not_matter(tmp_path, monkeypatch, family) -> None:
    """The parts of a fused tensor are in the order of `part`, in whatever order the rows of the table stand."""
    sizes = {"d_model": 16, "n_heads": 8, "n_vocab": 24, "seq": 8}
    # two shared experts, which the folder holds as one
    shared = {"shared_d_ff": 80} if family == "deepseek_v2" else {}
    fields = MODELS.get(family, {"family": family, "layers": 2, "pe_rotary_dims": 2})
    # a head has 2 dims
    narrow = {"pe_rotary_dims": 2} if "pe_rotary_dims" in fields else {}
    model = FAMILIES[family](**{**fields, **sizes, **shared, **narrow})
    source, rows = hf.MemorySource(hf.random_params(model)), list(model.hf_tensors())
    write_hf(source, model, str(tmp_path / "table"))
    random.Random(family).shuffle(rows)
    monkeypatch.setattr(type(model), "hf_tensors", lambda self: rows)
    write_hf(source, model, str(tmp_path / "shuffled"))
    assert_same(*(safetensors.numpy.load_file(tmp_path / name / "model.safetensors") for name in ("table", "shuffled")))


def test_negative_zeros_are_kept_if_the_bias_is_zero(tmp_path) -> None:
    model = hf.model_config()
    params = hf.random_params(model)
    params["embed"]["tokens"]["b"][:] = 0
    params["embed"]["tokens"]["w"][3] = -0.0
    write_hf(hf.MemorySource(params), model, str(tmp_path))
    assert_same(hf.read_all(HFSource(str(tmp_path), model)), hf.read_all(hf.MemorySource(params)))


@pytest.mark.parametrize("stored", list(DTYPES))
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_dtypes_are_rounded_once(tmp_path, stored, dtype) -> None:
    model = hf.model_config()
    source = hf.MemorySource(hf.random_params(model), DTYPES[stored])
    write_hf(source, model, str(tmp_path), dtype=np.dtype(DTYPES[dtype]))
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == dtype
    expected = hf.read_all(source)
    bias = expected.pop("params/embed/tokens/b").astype(np.float32)
    rows = expected["params/embed/tokens/w"]
    # the sum is computed in float32 and then rounded
    folded = rows[: model.n_vocab].astype(np.float32) + bias
    expected["params/embed/tokens/w"] = np.concatenate([folded, np.zeros_like(folded, shape=(256 - 131, 48))])
    found = hf.read_all(HFSource(str(tmp_path), model))
    assert not found.pop("params/embed/tokens/b").any()
    assert_same(found, {name: array.astype(DTYPES[dtype]) for name, array in expected.items()})
    assert np.isfinite(hf.transformers_logits(tmp_path, tokens(model), dtype)).all()


def test_a_value_too_large_for_float16_is_refused(tmp_path) -> None:
    model = hf.model_config()
    params = hf.random_params(model)
    params["blocks"]["ff/out"]["w"][1, 2, 3] = 70_000
    source = hf.MemorySource(params)
    with pytest.raises(UserError, match=r"params/blocks/ff/out/w holds values too large for float16"):
        write_hf(source, model, str(tmp_path / "half"), dtype=np.dtype(np.float16))
    write_hf(source, model, str(tmp_path / "whole"), dtype=np.dtype(ml_dtypes.bfloat16))


def test_slices_equal_parts_of_the_whole(tmp_path, monkeypatch) -> None:
    # blocks of a few rows
    monkeypatch.setattr("mesh_transformer.checkpoint.tensors.ROW_BLOCK_BYTES", 100)
    model = hf.model_config()
    hf.save_transformers_model(tmp_path, model)
    source = HFSource(str(tmp_path))
    whole = hf.read_all(source)
    random = np.random.default_rng(0)
    for name, array in whole.items():
        for _ in range(10):
            ends = [sorted(random.integers(0, size + 1, 2)) for size in array.shape]
            index = tuple(slice(int(a), int(b)) for a, b in ends)
            np.testing.assert_array_equal(source.read(name, index), array[index], err_msg=f"{name} {index}")
    padding = source.read("params/head/logits/w", (hf.ALL, slice(200, 256)))
    assert padding.shape == (48, 56)
    assert not padding.any()


def test_a_matrix_is_read_once_for_all_its_columns(gcs) -> None:
    """Rows of the parameter are columns of the matrix in the file, and a writer requests them in order."""
    model = hf.model_config()
    write_hf(hf.MemorySource(hf.random_params(model)), model, "gs://bucket/hf")
    source = HFSource("gs://bucket/hf")
    before = gcs.bytes_read
    for row in range(0, 48, 16):
        source.read("params/head/logits/w", (slice(row, row + 16), hf.ALL))
    assert gcs.bytes_read - before == 48 * 131 * 4
    for layer in range(3):
        for row in range(0, 48, 16):
            source.read("params/blocks/ff/in/w", (slice(layer, layer + 1), slice(row, row + 16), hf.ALL))
    assert gcs.bytes_read - before == 48 * 131 * 4 + 3 * 48 * 192 * 4


def test_slices_of_a_matrix_need_no_more_memory_than_the_matrix(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("mesh_transformer.checkpoint.tensors.ROW_BLOCK_BYTES", 10_000)
    model = hf.model_config(n_vocab=5000)
    write_hf(hf.MemorySource(hf.random_params(model)), model, str(tmp_path))
    source = HFSource(str(tmp_path))
    matrix, limit = 48 * 5000 * 4, 100_000
    tracemalloc.start()
    whole = source.read("params/head/logits/w", (hf.ALL, hf.ALL))
    assert tracemalloc.get_traced_memory()[1] < whole.nbytes + limit
    del whole
    tracemalloc.reset_peak()
    for row in range(48):
        # 20 kB from all rows of the matrix in the file
        source.read("params/head/logits/w", (slice(row, row + 1), hf.ALL))
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert matrix <= kept <= peak < matrix + limit


def test_a_matrix_over_the_limit_is_not_cached(tmp_path, monkeypatch) -> None:
    model = hf.model_config()
    write_hf(hf.MemorySource(hf.random_params(model)), model, str(tmp_path))
    expected = hf.read_all(HFSource(str(tmp_path)))["params/head/logits/w"]
    limit_name = "mesh_transformer.checkpoint.hf.source.CACHE_BYTES"
    for limit, is_cached in ((model.n_vocab * 48 * 4, True), (model.n_vocab * 48 * 4 - 1, False)):
        monkeypatch.setattr(limit_name, limit)
        source = HFSource(str(tmp_path))
        np.testing.assert_array_equal(source.read("params/head/logits/w", (slice(0, 5), hf.ALL)), expected[:5])
        assert (source._cached is not None) == is_cached


def test_blocks_are_small(tmp_path, monkeypatch) -> None:
    model = hf.model_config()
    source = hf.MemorySource(hf.random_params(model))
    write_hf(source, model, str(tmp_path / "whole"))
    monkeypatch.setattr(hf_write, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(hf_write, "CAST_BYTES", 400)
    source.read_bytes.clear()
    written: list[int] = []
    write_hf(source, model, str(tmp_path / "blocks"), progress=written.append)
    assert max(source.read_bytes) <= 1000
    # one of the longest rows
    assert max(written) == 192 * 4
    assert sum(written) == hf_write.n_bytes(source, model, np.dtype(np.float32))
    assert (tmp_path / "blocks/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()


def test_the_safetensors_library_reads_written_files(tmp_path) -> None:
    from safetensors import safe_open

    model = hf.model_config()
    params = hf.random_params(model)
    write_hf(hf.MemorySource(params), model, str(tmp_path))
    with safe_open(tmp_path / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}
        np.testing.assert_array_equal(
            file.get_slice("transformer.h.1.mlp.fc_out.weight")[3:9],
            params["blocks"]["ff/out"]["w"][1].T[3:9],
        )


def test_another_model_is_refused(tmp_path) -> None:
    model = hf.model_config()
    hf.save_transformers_model(tmp_path / "saved", model)
    with pytest.raises(UserError, match=r"(?s)model.layers: the config has 4, the checkpoint 3.*pe_rotary_dims"):
        HFSource(str(tmp_path / "saved"), hf.model_config(layers=4, pe_rotary_dims=8))
    with pytest.raises(UserError, match=r"params/embed/tokens/w: expected shape \(384, 48\), found \(256, 48\)"):
        write_hf(HFSource(str(tmp_path / "saved")), hf.model_config(n_vocab=300), str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"pe": "t5"}, "model.pe is t5"),
        ({"norm": "rmsnorm"}, "model.norm is rmsnorm"),
        ({"d_head": 8}, "model.n_heads 3 x model.d_head 8 is not model.d_model 48"),
    ],
)
def test_models_that_transformers_does_not_support_are_refused(tmp_path, values, reason) -> None:
    model = hf.model_config(**values)
    with pytest.raises(UserError, match=reason):
        write_hf(hf.MemorySource(hf.random_params(model)), model, str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_the_embedding_matrix(tmp_path, tied) -> None:
    model = hf.model_config()
    hf.save_transformers_model(tmp_path, model, tied=tied)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert ("lm_head.weight" not in read_header(str(tmp_path / "model.safetensors"))) == tied
    found = hf.read_all(HFSource(str(tmp_path)))
    same = np.array_equal(found["params/head/logits/w"], found["params/embed/tokens/w"].T)
    # as in transformers, a stored head is used even if config.json ties it
    assert same == tied
    x = tokens(model)
    np.testing.assert_allclose(
        hf.model_logits(model, hf.to_tree(found), x),
        hf.transformers_logits(tmp_path, x),
        rtol=0,
        atol=TOLERANCE,
    )


@pytest.mark.parametrize("family", ["Llama", "GPTJ"])
def test_a_tied_model_may_store_its_head_alone(tmp_path, family: str) -> None:
    """A family with a field for it, and one in which only config.json ties them."""
    if family == "GPTJ":
        hf.save_transformers_model(tmp_path, hf.model_config(), tied=True)
    else:
        save_model(family, {**BASE, **rope(), "tie_word_embeddings": True}, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    assert "lm_head.weight" not in tensors
    table = "transformer.wte.weight" if family == "GPTJ" else "model.embed_tokens.weight"
    tensors["lm_head.weight"] = tensors.pop(table)
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
    source = HFSource(str(tmp_path))
    prompt = np.random.default_rng(2).integers(1, 100, (1, 20))
    found = hf.model_logits(source.model, hf.to_tree(hf.read_all(source)), prompt)
    np.testing.assert_allclose(found, hf.transformers_logits(tmp_path, prompt), rtol=0, atol=TOLERANCE)


def test_a_stored_copy_of_a_tied_head_is_ignored(tmp_path) -> None:
    model = gpt_neox.GptNeoXConfig(layers=1, d_model=16, n_heads=2, n_vocab=17, seq=9, tied_head=True)
    params = hf.random_params(model)
    write_hf(hf.MemorySource(params), model, str(tmp_path))
    path = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    head = tensors["gpt_neox.embed_in.weight"].copy()
    safetensors.numpy.save_file({**tensors, "embed_out.weight": head}, path, metadata={"format": "pt"})
    assert_same(hf.read_all(HFSource(str(tmp_path))), hf.read_all(hf.MemorySource(params)))
    # transformers does not tie a head that differs from the embedding
    head[3, 5] += 1
    safetensors.numpy.save_file({**tensors, "embed_out.weight": head}, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match="embed_out.weight differs from gpt_neox.embed_in.weight"):
        hf.read_all(HFSource(str(tmp_path)))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    found = hf.read_all(HFSource(str(tmp_path)))
    np.testing.assert_array_equal(found["params/head/logits/w"][:, :17], head.T)
