"""Checkpoints of the original program, read and written in any number of shards."""

import logging
import shutil
from pathlib import Path

import golden
import ml_dtypes
import numpy as np
import pytest
from support.classic_folders import RandomSource, model_config, stored, values, write

from mesh_transformer.checkpoint.classic.source import ClassicSource, StepContents, inspect
from mesh_transformer.checkpoint.classic.writer import write_classic
from mesh_transformer.checkpoint.native.manifest import flatten
from mesh_transformer.checkpoint.open import Checkpoint, step_of
from mesh_transformer.config import load_config

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
CHECKPOINTS = [
    ("tiny_mp8", "mp8/ckpt_full/step_5", StepContents(8, True)),
    ("tiny_mp8", "mp8/ckpt_init/step_0", StepContents(8, True)),
    ("tiny_mp8", "mp8/ckpt_slim_bf16/step_5", StepContents(8, False)),
    ("tiny_mp1", "mp1/ckpt_params/step_5", StepContents(1, False)),
    ("variant_fixed_layernorm", "variants/fixed_layernorm/ckpt_params/step_0", StepContents(4, False)),
    ("variant_t5_layernorm", "variants/t5_layernorm/ckpt_params/step_0", StepContents(4, False)),
    (
        "variant_rotary_rmsnorm-bias",
        "variants/rotary_rmsnorm-bias/ckpt_params/step_0",
        StepContents(4, False),
    ),
]
SUMS = ("embed/tokens/b", "blocks/ff_out/b")


def opened(original: Path, config: str, checkpoint: str):
    model = load_config(str(original / f"configs/{config}.json"), ["mesh.tp=1"]).model
    return model, ClassicSource(str(original / checkpoint), model)


@pytest.mark.parametrize(("config", "checkpoint", "contents"), CHECKPOINTS)
def test_the_same_shards_give_the_same_bytes(original, tmp_path, caplog, config, checkpoint, contents):
    model, source = opened(original, config, checkpoint)
    write_classic(source, model, str(tmp_path), contents.shards)
    expected, found = stored(original / checkpoint), stored(tmp_path)
    assert list(found) == list(expected)
    assert not [name for name in expected if found[name] != expected[name]]
    assert inspect(str(tmp_path)) == source.contents == contents
    assert not caplog.records


@pytest.mark.parametrize(
    ("config", "checkpoint", "shards"),
    [
        ("tiny_mp8", "mp8/ckpt_full/step_5", 1),
        ("tiny_mp8", "mp8/ckpt_full/step_5", 4),
        ("tiny_mp1", "mp1/ckpt_params/step_5", 8),
        ("variant_fixed_layernorm", "variants/fixed_layernorm/ckpt_params/step_0", 2),
        ("variant_t5_layernorm", "variants/t5_layernorm/ckpt_params/step_0", 8),
        ("variant_rotary_rmsnorm-bias", "variants/rotary_rmsnorm-bias/ckpt_params/step_0", 1),
    ],
)
def test_other_shards_hold_the_same_weights(original, tmp_path, config, checkpoint, shards):
    """Compared with the reference reader: equal, except sums of biases, within one unit in the last place."""
    model, source = opened(original, config, checkpoint)
    write_classic(source, model, str(tmp_path / "out"), shards)
    expected = flatten(golden.read_params(original / checkpoint, model))
    found = flatten(golden.read_params(tmp_path / "out", model))
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_max_ulp(found[name], array, maxulp=1 if name in SUMS else 0)
    again = ClassicSource(str(tmp_path / "out"), model)
    assert again.counts == source.counts
    moved, before = values(again), values(source)
    assert not [name for name in before if not np.array_equal(moved[name], before[name])]
    write_classic(again, model, str(tmp_path / "back"), source.contents.shards)
    assert stored(tmp_path / "back") == stored(original / checkpoint)


def test_a_full_checkpoint_of_one_shard(shared, tmp_path):
    """A copy in one shard, and a round trip through eight, have the same bytes."""
    model, source = opened(shared / "golden", "tiny_mp1", "mp1/ckpt_full/step_5")
    assert source.contents == StepContents(1, True)
    write_classic(source, model, str(tmp_path / "one"), 1)
    write_classic(source, model, str(tmp_path / "eight"), 8)
    write_classic(ClassicSource(str(tmp_path / "eight"), model), model, str(tmp_path / "back"), 1)
    expected = stored(shared / "golden/mp1/ckpt_full/step_5")
    assert stored(tmp_path / "one") == stored(tmp_path / "back") == expected


def test_tensors_are_the_parameters_of_the_model(original):
    model, source = opened(original, "tiny_mp8", "mp8/ckpt_full/step_5")
    params = flatten({"params": golden.read_params(original / "mp8/ckpt_full/step_5", model)})
    found = values(source)
    assert {name for name in found if name.startswith("params/")} == set(params)
    for name, array in params.items():
        np.testing.assert_array_equal(found[name], array)
    assert {name.partition("/")[2] for name in found if name.startswith("mu/")} == {
        name.partition("/")[2] for name in params
    }


@pytest.mark.parametrize(("dtype", "reference"), [(BFLOAT16, "ckpt_slim_bf16"), (np.dtype(np.float16), None)], ids=str)
def test_slim(original, tmp_path, dtype, reference):
    model, source = opened(original, "tiny_mp8", "mp8/ckpt_full/step_5")
    write_classic(source, model, str(tmp_path), 8, full=False, dtype=dtype)
    if reference is not None:
        assert stored(tmp_path) == stored(original / "mp8" / reference / "step_5")
    slim, full = values(ClassicSource(str(tmp_path), model)), values(source)
    assert slim.keys() == {name for name in full if name.startswith("params/")}
    for name, array in slim.items():
        # each of the eight parts of a bias is rounded, small ones to the spacing of float16's subnormal numbers
        tolerance = 8 * 2.0**-25 if name.endswith(SUMS) and dtype == np.float16 else 0
        expected = full[name].astype(dtype).astype(np.float64)
        np.testing.assert_allclose(array.astype(np.float64), expected, rtol=0, atol=tolerance, err_msg=name)


def test_different_shards_keep_the_function_of_the_model(original, tmp_path, caplog):
    model, source = opened(original, "tiny_mp8", "mp8/ckpt_perturbed/step_7")
    with caplog.at_level(logging.WARNING):
        write_classic(source, model, str(tmp_path), 8)
    assert [record.message.count("differs between shards") for record in caplog.records] == [1, 0]
    assert "unused shards" in caplog.records[1].message
    expected = flatten(golden.read_params(original / "mp8/ckpt_perturbed/step_7", model))
    for name, array in flatten(golden.read_params(tmp_path, model)).items():
        np.testing.assert_array_max_ulp(array, expected[name], maxulp=1 if name in SUMS else 0)


def test_moments_of_a_summed_bias_are_averaged(tmp_path):
    source = write(tmp_path, 2, full=True)
    path = tmp_path / "shard_1/0.npz"
    arrays = dict(np.load(path))
    # the first moment of the embedding's bias
    arrays["arr_1"] = arrays["arr_1"] + 1
    np.savez(path, *arrays.values())
    found = values(ClassicSource(str(tmp_path), model_config()))
    expected = values(source)
    np.testing.assert_allclose(found["mu/embed/tokens/b"], expected["mu/embed/tokens/b"] + 0.5, rtol=1e-6)
    np.testing.assert_array_equal(found["nu/embed/tokens/b"], expected["nu/embed/tokens/b"])
    np.testing.assert_array_equal(found["params/embed/tokens/b"], expected["params/embed/tokens/b"])


@pytest.mark.parametrize("norm", ["layernorm-nobias", "rmsnorm", "scalenorm", "scalenorm-bias"])
@pytest.mark.parametrize("shards", [1, 2])
def test_every_norm(tmp_path, norm, shards):
    source = write(tmp_path, shards, full=True, norm=norm)
    found = ClassicSource(str(tmp_path), model_config(norm=norm))
    expected = values(source)
    assert found.counts == source.counts
    assert all(np.array_equal(array, expected[name]) for name, array in values(found).items())
    assert found.tensors == source.tensors


@pytest.mark.parametrize("compressed", [False, True])
def test_slices_are_parts_of_the_whole(tmp_path, compressed):
    write(tmp_path, 4)
    if compressed:
        for path in tmp_path.glob("*/*.npz"):
            np.savez_compressed(path, *dict(np.load(path)).values())
    rng = np.random.default_rng(0)
    whole = values(ClassicSource(str(tmp_path), model_config()))
    # a new source, in which no array has passed its CRC check
    source = ClassicSource(str(tmp_path), model_config())
    for _ in range(5):
        for name, array in whole.items():
            bounds = [sorted(rng.integers(0, size + 1, 2)) for size in array.shape]
            index = tuple(slice(int(a), int(b)) for a, b in bounds)
            np.testing.assert_array_equal(source.read(name, index), array[index], err_msg=f"{name} {index}")


def test_fortran_order_is_read(tmp_path):
    source = write(tmp_path, 1)
    path = tmp_path / "shard_0/2.npz"
    np.savez(path, *[np.asfortranarray(array) for array in np.load(path).values()])
    assert b"'fortran_order': True" in path.read_bytes()
    expected = values(source)
    found = values(ClassicSource(str(tmp_path), model_config()))
    assert all(np.array_equal(array, expected[name]) for name, array in found.items())


def test_the_newest_step_of_a_root(tmp_path):
    for step in (5, 10):
        write(tmp_path / f"step_{step}", 1)
    assert Checkpoint.open(str(tmp_path)).source(model_config()).where.endswith("step_10")
    (tmp_path / "meta.json").write_text('{"step": 5, "checkpoints": [5], "aux": {"5": {"train_loader": {"used": 3}}}}')
    source = Checkpoint.open(str(tmp_path)).source(model_config())
    assert source.where.endswith("step_5")
    assert source.extra == {"aux": {"train_loader": {"used": 3}}}
    assert step_of(str(tmp_path), 10).source(model_config()).where.endswith("step_10")


def test_memory_of_a_conversion_is_two_arrays(tmp_path):
    """The largest slices that are read are single layers and the vocabulary's matrices."""
    config = model_config()
    sizes = []

    class Watched(RandomSource):
        def read(self, name, index):
            sizes.append(super().read(name, index).size)
            return super().read(name, index)

    write_classic(Watched(config, full=True), config, str(tmp_path / "out"), 2)
    assert max(sizes) == 4 * config.d_model**2
    shutil.rmtree(tmp_path / "out")
