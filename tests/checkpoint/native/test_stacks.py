"""Stacks of an earlier version are read as the stacks of a decoder with several runs of layers. The expected rows are
cut by hand."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from support.array_source import ArraySource

from mesh_transformer.checkpoint.load import load, restore
from mesh_transformer.checkpoint.native.manifest import flatten
from mesh_transformer.checkpoint.native.source import NativeSource
from mesh_transformer.checkpoint.native.writer import write_native
from mesh_transformer.checkpoint.tensors import Counts, DamagedCheckpoint
from mesh_transformer.errors import UserError

# layers 0, 2 and 4 are dense, 1, 3, 5 and 6 have experts
ALL = [("0/attention/q/w", (0, 1, 2, 3)), ("1/attention/q/w", (4, 5)), ("2/attention/q/w", (6,))]
DENSE = [("0/ff/in/w", (0, 2)), ("1/ff/in/w", (4,))]
EXPERTS = [("0/ff/experts/in", (1, 3)), ("1/ff/experts/in", (5,)), ("2/ff/experts/in", (6,))]
STACKS = {"attention/q/w": ALL, "ff/in/w": DENSE, "ff/experts/in": EXPERTS}
WIDTHS = {"attention/q/w": (4, 6), "ff/in/w": (4, 5), "ff/experts/in": (3, 4, 2)}


class Runs(NamedTuple):
    """The part of a decoder that a source reads."""

    stacks: dict[str, list[tuple[str, tuple[int, ...]]]] = STACKS


def stored_arrays() -> dict[str, np.ndarray]:
    random, arrays = np.random.default_rng(0), {"params/embed/tokens/w": np.ones((8, 4), np.float32)}
    for slot in ("params", "mu", "nu"):
        for parameter, stacks in STACKS.items():
            shape = (sum(len(layers) for _, layers in stacks), *WIDTHS[parameter])
            arrays[f"{slot}/blocks/{parameter}"] = random.standard_normal(shape, np.float32)
    return arrays


def expected_arrays() -> dict[str, np.ndarray]:
    stored = stored_arrays()
    found = {name: array for name, array in stored.items() if "blocks" not in name}
    for slot in ("params", "mu", "nu"):
        queries, dense = stored[f"{slot}/blocks/attention/q/w"], stored[f"{slot}/blocks/ff/in/w"]
        experts = stored[f"{slot}/blocks/ff/experts/in"]
        for run, (rows, dense_rows, expert_rows) in enumerate(
            [
                (slice(0, 4), slice(0, 2), slice(0, 2)),
                (slice(4, 6), slice(2, 3), slice(2, 3)),
                (slice(6, 7), slice(0), slice(3, 4)),
            ]
        ):
            found[f"{slot}/blocks/{run}/attention/q/w"] = queries[rows]
            found[f"{slot}/blocks/{run}/ff/in/w"] = dense[dense_rows]
            found[f"{slot}/blocks/{run}/ff/experts/in"] = experts[expert_rows]
    return {name: array for name, array in found.items() if len(array)}


@pytest.fixture
def step(tmp_path: Path) -> Path:
    return Path(write_native(ArraySource(stored_arrays(), Counts(7, 7, 7)), str(tmp_path)))


def source_of(step: Path) -> NativeSource:
    return NativeSource(str(step), Runs())  # type: ignore[arg-type]


def abstract_of(arrays: dict[str, np.ndarray], names: Any = None) -> dict[str, Any]:
    """A tree whose paths are the names, on two devices that split the layers where they can."""
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    tree: dict[str, Any] = {}
    for name in names or arrays:
        *path, last = name.split("/")
        spec = jax.sharding.PartitionSpec("x") if len(arrays[name]) % 2 == 0 else jax.sharding.PartitionSpec()
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = jax.ShapeDtypeStruct(
            arrays[name].shape, np.float32, sharding=jax.sharding.NamedSharding(mesh, spec)
        )
    return tree


def with_changed_row(step: Path, row: int) -> Path:
    """A step like another one, but for one bit of a row of a stored stack, which its manifest does not know."""
    arrays = stored_arrays()
    arrays["params/blocks/attention/q/w"][row].view(np.uint32)[1, 2] ^= 1
    changed = Path(write_native(ArraySource(arrays, Counts(7, 7, 7)), str(step.parent / "changed")))
    shutil.copy(step / "manifest/metadata", changed / "manifest/metadata")
    return changed


def test_a_source_has_the_stacks_of_each_run(step: Path) -> None:
    source, expected = source_of(step), expected_arrays()
    assert {name: info.shape for name, info in source.tensors.items()} == {n: a.shape for n, a in expected.items()}
    for name, array in expected.items():
        np.testing.assert_array_equal(source.read(name, (slice(None),) * array.ndim), array, err_msg=name)
        inner = (slice(len(array) - 1, None), slice(1, 3), *(slice(None),) * (array.ndim - 2))
        np.testing.assert_array_equal(source.read(name, inner), array[inner], err_msg=name)
    assert source.counts == Counts(7, 7, 7)


def test_all_tensors_are_loaded_onto_a_mesh(step: Path) -> None:
    """`load` compares the checksums of the stored stacks with the sums over their parts."""
    expected = expected_arrays()
    found = flatten(load(source_of(step), abstract_of(expected)))
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_the_state_of_a_run_is_restored_whole(step: Path) -> None:
    expected = expected_arrays()
    tree = {name if name.startswith("params") else f"opt_state/{name}": array for name, array in expected.items()}
    scalars = {"step": 7, "opt_state/count": 7, "opt_state/schedule": 7, "skipped": 0}
    abstract = abstract_of(tree)
    whole = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    integer, number = (jax.ShapeDtypeStruct((), dtype, sharding=whole) for dtype in (np.int32, np.float32))
    abstract |= {"step": integer, "skipped": integer, "noise": {"g": number, "s": number}}
    abstract["opt_state"] |= {"count": integer, "schedule": integer}
    found = flatten(restore(source_of(step), abstract, part=False))
    for name, array in {**tree, **scalars}.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize("parts", ["all", "the damaged one", "another one"])
@pytest.mark.parametrize("row", [0, 4, 6])
def test_a_changed_bit_of_a_stored_stack_is_detected(step: Path, parts: str, row: int) -> None:
    expected, run = expected_arrays(), {0: 0, 4: 1, 6: 2}[row]
    changed = with_changed_row(step, row)
    chosen = {"the damaged one": [run], "another one": [(run + 1) % 3]}.get(parts, range(3))
    names = [f"params/blocks/{number}/attention/q/w" for number in chosen]
    with pytest.raises(DamagedCheckpoint, match="wrong checksum of params/blocks/attention/q/w"):
        load(source_of(changed), abstract_of(expected, names))
    with pytest.raises(DamagedCheckpoint, match="wrong checksum of params/blocks/attention/q/w"):
        source_of(changed).read(names[0], (slice(None),) * 3)


def test_a_stack_of_another_number_of_layers_stays_whole(step: Path) -> None:
    """The message names the stack that the file has."""
    fewer = {**STACKS, "attention/q/w": ALL[:2]}
    source = NativeSource(str(step), Runs(fewer))  # type: ignore[arg-type]
    assert source.tensors["params/blocks/attention/q/w"].shape == (7, 4, 6)
    assert "params/blocks/0/attention/q/w" not in source.tensors
    with pytest.raises(UserError, match=r"params/blocks/1/attention/q/w: expected \(2, 4, 6\) float32, found nothing"):
        load(source, abstract_of(expected_arrays(), ["params/blocks/1/attention/q/w"]))


def test_a_file_with_a_stack_for_each_run_is_read_as_it_is(tmp_path: Path) -> None:
    step = Path(
        write_native(
            source_of(Path(write_native(ArraySource(stored_arrays(), Counts(7, 7, 7)), str(tmp_path / "old")))),
            str(tmp_path / "new"),
        )
    )
    for source in (source_of(step), NativeSource(str(step))):
        assert {name: info.shape for name, info in source.tensors.items()} == {
            name: array.shape for name, array in expected_arrays().items()
        }
        for name, array in expected_arrays().items():
            np.testing.assert_array_equal(source.read(name, (slice(None),) * array.ndim), array, err_msg=name)
