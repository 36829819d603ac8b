"""Writes a native checkpoint, slice by slice, from a checkpoint of any format.

The result equals what `CheckpointStore.save` writes, except for the size of the zarr chunks: `CheckpointStore` restores
it on any mesh, and `NativeSource` reads it.
"""

import json
import math
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorstore as ts

from mesh_transformer import files
from mesh_transformer.checkpoint.identity import with_model
from mesh_transformer.checkpoint.native import manifest as manifests
from mesh_transformer.checkpoint.native import source as native
from mesh_transformer.checkpoint.native.manifest import Manifest, TensorSpec
from mesh_transformer.checkpoint.origin import FOLDER, Origin, write_files
from mesh_transformer.checkpoint.target import new_folder
from mesh_transformer.checkpoint.tensors import TensorInfo, TensorSource, UpdateCounts, slots
from mesh_transformer.config import ModelConfig
from mesh_transformer.logs import Transfer

# with TensorStore's default of 2 GiB a write takes 1.5 times as long
DATA_FILE_BYTES = 16 << 20


def write_native(
    source: TensorSource,
    root: str,
    *,
    model: ModelConfig | None = None,
    origin: Origin | None = None,
    tokenizer: str | None = None,
    overwrite: bool = False,
) -> str:
    """Write `{root}/step_N`, local or `gs://`, where N is the step of `source`; return its path.

    If the source has an optimizer's slots, the whole training state is written (with no average of the noise scale
    yet), else only the parameters and the step. Memory: two blocks of WRITE_BLOCK_BYTES, and what the source holds.

    Args:
        model: the model to record; None: the config that `source` records.
        tokenizer: the name of the tokenizer to record, with `model`.
        origin: the Hugging Face folder that the source came from; its files are kept in the step.

    Raises:
        UserError: the step exists already, or the source is damaged; nothing is left behind.
    """
    folder = files.join(root, f"step_{source.counts.step}")
    with new_folder(folder, overwrite=overwrite, source=source.where, marker=native.COMMIT_MARKER) as partial:
        tensors = _write_tensors(source, files.join(partial, "state"))
        extra = source.extra if model is None else with_model(source.extra, model, tokenizer)
        if origin is not None:
            write_files(origin.files, files.join(partial, FOLDER))
            extra = {**extra, "origin": origin.to_json()}
        document = manifests.encode(Manifest(tensors, dict(extra)))
        files.replace(files.join(partial, "manifest", "metadata"), json.dumps(document).encode())
    return folder


def _write_tensors(source: TensorSource, folder: str) -> dict[str, TensorSpec]:
    """Write in another thread, which Ctrl-C does not interrupt: when this function ends, so have all writes. A write
    that nothing waits for goes on in a thread of TensorStore, while the folder is being deleted."""
    ended = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        try:
            return pool.submit(_write_all, source, folder, ended).result()
        finally:
            ended.set()


def _write_all(source: TensorSource, folder: str, ended: threading.Event) -> dict[str, TensorSpec]:
    scalars = _scalars(source.counts, full=bool(slots(source)))
    files.make_folder(folder)
    store = {**native.ocdbt(folder), "target_data_file_size": DATA_FILE_BYTES}
    context = ts.Context({"file_io_sync": False})
    specs: dict[str, TensorSpec] = {}
    total = sum(math.prod(info.shape) * info.dtype.itemsize for info in source.tensors.values())
    with Transfer("writing", total) as transfer:
        for path, value in scalars.items():
            array = _create(store, path, TensorInfo((), value.dtype), context)
            array.write(value).result()
            specs["/".join(path)] = TensorSpec((), value.dtype.name, manifests.array_checksum(value, ()))
        for name, info in source.tensors.items():
            path = _stored_name(name)
            checksum = _copy(source, name, _create(store, path, info, context), transfer, ended)
            specs["/".join(path)] = TensorSpec(tuple(info.shape), info.dtype.name, checksum)
    return specs


def _copy(source: TensorSource, name: str, array: Any, transfer: Transfer, ended: threading.Event) -> int:
    """Copy one tensor and return its checksum. The next block is read while the previous one is written.

    Raises:
        CancelledError: `ended` was set.
    """
    info, checksum, writing = source.tensors[name], 0, None
    ranges = [range(size) for size in info.shape]
    try:
        for index in native.blocks(ranges, native.chunk_shape(info), info.dtype.itemsize, native.WRITE_BLOCK_BYTES):
            if ended.is_set():
                raise CancelledError
            block = np.ascontiguousarray(source.read(name, index))
            start = [part.start for part in index]
            checksum = (checksum + manifests.array_checksum(block, start)) % 2**32
            if writing is not None:
                writing.result()
            writing = array[index].write(block, can_reference_source_data_indefinitely=True)
            transfer.add(block.nbytes)
    finally:
        if writing is not None:
            writing.result()
    return checksum


def _create(store: dict[str, Any], path: tuple[str, ...], info: TensorInfo, context: ts.Context) -> Any:
    spec = {
        "driver": "zarr",
        "kvstore": {**store, "path": f"{'.'.join(path)}/"},
        "metadata": {"chunks": list(native.chunk_shape(info)), "compressor": None},
    }
    dtype = ts.dtype(info.dtype.name)
    return ts.open(spec, create=True, dtype=dtype, shape=info.shape, context=context).result()


def _scalars(counts: UpdateCounts, *, full: bool) -> dict[tuple[str, ...], np.ndarray]:
    """The scalars of `train.step.TrainState`; with `full` False, only the step."""
    scalars: dict[str, Any] = {"step": np.int32(counts.step)}
    if full:
        schedule = counts.schedule or 0
        scalars |= {
            native.COUNT: np.int32(counts.optimizer or 0),
            native.SCHEDULE: np.int32(schedule),
            # NaN: no average yet
            "noise/g": np.float32("nan"),
            "noise/s": np.float32("nan"),
            "skipped": np.int32(max(0, counts.step - schedule)),
        }
    return {tuple(name.split("/")): np.asarray(value) for name, value in scalars.items()}


def _stored_name(name: str) -> tuple[str, ...]:
    """The path in the saved tree of `params/STAGE/MODULE/FIELD` or of a slot; MODULE may contain slashes."""
    kind, stage, rest = name.split("/", 2)
    module, field = rest.rsplit("/", 1)
    top = (kind,) if kind == "params" else (native.OPTIMIZER.rstrip("/"), kind)
    return (*top, stage, module, field)
