"""A native checkpoint written slice by slice from a checkpoint of any form.

What lies in the folder afterwards is what `CheckpointStore.save` would have written, but for the size of the zarr
chunks: `CheckpointStore` restores it, on any mesh, and `NativeSource` reads it.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorstore as ts

from mesh_transformer import files
from mesh_transformer.checkpoint import manifest as manifests
from mesh_transformer.checkpoint.forms import COMMIT_MARKER
from mesh_transformer.checkpoint.manifest import Manifest, TensorSpec
from mesh_transformer.checkpoint.native import ADAM, SCHEDULE, ocdbt
from mesh_transformer.checkpoint.target import Transfer, new_folder
from mesh_transformer.checkpoint.tensors import Counts, Index, TensorInfo, TensorSource

CHUNK_BYTES = 16 << 20  # of a zarr chunk, and of what is read at a time
EMPTY_NODES = (("opt_state", "0"), ("opt_state", "2", "inner_state"))  # of the optimizer: they hold no array


def write_native(source: TensorSource, root: str, *, overwrite: bool = False) -> str:
    """Write `{root}/step_N`, N being the step that `source` is of; returns that folder. Local or `gs://`.

    With moments in the source the whole training state is written (the averages of the noise scale empty), else the
    parameters and the step. At any moment two slices of CHUNK_BYTES are held, and what the source holds.

    Raises:
        UserError: the step is there already; the source is damaged. Nothing is left behind.
    """
    folder = files.join(root, f"step_{source.counts.step}")
    with new_folder(folder, overwrite=overwrite, source=source.where) as temporary:
        tensors = _write_tensors(source, files.join(temporary, "state"))
        document = manifests.encode(Manifest(tensors, dict(source.extra)))
        _write_json(files.join(temporary, "manifest"), "metadata", document)
    with files.open_binary(
        files.join(folder, COMMIT_MARKER), "wb"
    ) as file:  # last: on gs:// it finishes the step
        file.write(b"written by write_native\n")
    return folder


def slices(info: TensorInfo, limit: int) -> Iterator[Index]:
    """The tensor in whole chunks of at most `limit` bytes, in order."""
    chunk = chunk_shape(info, limit)
    starts = itertools.product(*(range(0, size, step) for size, step in zip(info.shape, chunk, strict=True)))
    for start in starts:
        yield tuple(slice(a, min(a + c, size)) for a, c, size in zip(start, chunk, info.shape, strict=True))


def chunk_shape(info: TensorInfo, limit: int) -> tuple[int, ...]:
    """The largest block of at most `limit` bytes that is contiguous in C order: layer after layer, row after row."""
    elements, shape = max(1, limit // info.dtype.itemsize), list(info.shape)
    for dim, size in enumerate(info.shape):
        inner = math.prod(info.shape[dim + 1 :])
        shape[dim] = max(1, min(size, elements // max(1, inner)))
    return tuple(max(1, size) for size in shape)


def _write_tensors(source: TensorSource, folder: str) -> dict[str, TensorSpec]:
    scalars = _scalars(source.counts, with_moments=any(name.startswith("mu/") for name in source.tensors))
    names = {name: _stored_name(name) for name in source.tensors}
    files.make_folder(folder)
    store, context = ocdbt(folder), ts.Context({"file_io_sync": False})
    specs: dict[str, TensorSpec] = {}
    total = sum(math.prod(info.shape) * info.dtype.itemsize for info in source.tensors.values())
    with Transfer("writing", total) as transfer:
        for path, value in scalars.items():
            array = _create(store, path, TensorInfo((), value.dtype), context)
            array.write(value).result()
            specs["/".join(path)] = TensorSpec((), value.dtype.name, manifests.sum_bits(value))
        for name, path in names.items():
            checksum = _copy(source, name, _create(store, path, source.tensors[name], context), transfer)
            info = source.tensors[name]
            specs["/".join(path)] = TensorSpec(tuple(info.shape), info.dtype.name, checksum)
    paths = [*scalars, *names.values()]
    _write_json(folder, "_METADATA", _orbax_metadata(paths, full=len(scalars) > 1))
    return specs


def _copy(source: TensorSource, name: str, array: Any, transfer: Transfer) -> int:
    """One tensor, the next slice being read while the one before is written. Returns its checksum."""
    checksum, writing = 0, None
    for index in slices(source.tensors[name], CHUNK_BYTES):
        block = np.ascontiguousarray(source.read(name, index))
        checksum = (checksum + manifests.sum_bits(block)) % 2**32
        if writing is not None:
            writing.result()
        writing = array[index].write(block, can_reference_source_data_indefinitely=True)
        transfer.add(block.nbytes)
    if writing is not None:
        writing.result()
    return checksum


def _create(store: dict[str, Any], path: tuple[str, ...], info: TensorInfo, context: ts.Context) -> Any:
    spec = {
        "driver": "zarr",
        "kvstore": {**store, "path": f"{'.'.join(path)}/"},
        "metadata": {"chunks": list(chunk_shape(info, CHUNK_BYTES)), "compressor": None},
    }
    return ts.open(
        spec, create=True, dtype=ts.dtype(info.dtype.name), shape=info.shape, context=context
    ).result()


def _scalars(counts: Counts, *, with_moments: bool) -> dict[tuple[str, ...], np.ndarray]:
    """The numbers of `train.step.TrainState`; without moments only the step."""
    scalars: dict[tuple[str, ...], Any] = {("step",): np.int32(counts.step)}
    if with_moments:
        adam, schedule = counts.adam or 0, counts.schedule or 0
        scalars |= {
            (*ADAM.split("/"), "count"): np.int32(adam),
            (*SCHEDULE.split("/"), "count"): np.int32(schedule),
            ("noise", "g"): np.float32("nan"),  # no average yet
            ("noise", "s"): np.float32("nan"),
            ("skipped",): np.int32(max(0, counts.step - schedule)),
        }
    return {path: np.asarray(value) for path, value in scalars.items()}


def _stored_name(name: str) -> tuple[str, ...]:
    """The path in the tree of `params/STAGE/MODULE/FIELD` or of a moment; modules may have a slash in their names."""
    kind, stage, rest = name.split("/", 2)
    module, field = rest.rsplit("/", 1)
    top = ("params",) if kind == "params" else (*ADAM.split("/"), kind)
    return (*top, stage, module, field)


def _orbax_metadata(paths: list[tuple[str, ...]], *, full: bool) -> dict[str, Any]:
    """The file from which Orbax takes the tree."""
    leaf = {"value_type": "jax.Array", "skip_deserialize": False}
    empty = {"value_type": "None", "skip_deserialize": True}
    nodes = [(path, leaf) for path in paths] + [(path, empty) for path in EMPTY_NODES if full]
    tree = {
        str(path): {
            "key_metadata": [{"key": key, "key_type": 1 if key.isdecimal() else 2} for key in path],
            "value_metadata": value,
        }
        for path, value in nodes
    }
    return {
        "tree_metadata": tree,
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


def _write_json(folder: str, name: str, document: dict[str, Any]) -> None:
    files.make_folder(folder)
    with files.open_binary(files.join(folder, name), "wb") as file:
        file.write(json.dumps(document).encode())
