"""Our own form, read slice by slice: the tensors of a step folder that `CheckpointStore` or `write_native` wrote.

The tensors lie in an OCDBT key-value store as zarr arrays. Their keys are the paths in the saved tree joined by "."
(`params.blocks.attention/q.w`); the manifest joins the same paths by "/".
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import tensorstore as ts

from mesh_transformer import files
from mesh_transformer.checkpoint import manifest as manifests
from mesh_transformer.checkpoint.agree import first_cause
from mesh_transformer.checkpoint.manifest import DamagedCheckpoint, Manifest
from mesh_transformer.checkpoint.tensors import Counts, Index, TensorInfo

# The places of `train.step.TrainState` that other forms have too; tests/checkpoint/test_native.py holds them together.
ADAM, SCHEDULE = "opt_state/1", "opt_state/3"
PREFIXES = {"params/": "params/", f"{ADAM}/mu/": "mu/", f"{ADAM}/nu/": "nu/"}
MAX_MANIFEST_BYTES = 64 << 20
CACHE_BYTES = 1 << 20  # for the index of the key-value store; of tensors nothing is kept


class NativeSource:
    """One native step folder, local or `gs://`, as a `TensorSource`."""

    def __init__(self, folder: str):
        """Open it.

        Raises:
            DamagedCheckpoint: the manifest or the store's index is missing or broken.
            UserError: there is no such folder.
        """
        self.where = folder
        self._manifest = read_manifest(folder)
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})
        self._base = ocdbt(files.join(folder, "state"))
        self._names = {_our_name(name): name for name in self._manifest.tensors}
        self._open_arrays: dict[str, Any] = {}
        self._lock = threading.Lock()

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Parameters and moments by our names."""
        specs = {ours: self._manifest.tensors[name] for ours, name in self._names.items() if ours}
        return {ours: TensorInfo(spec.shape, _dtype(spec.dtype)) for ours, spec in specs.items()}

    @cached_property
    def counts(self) -> Counts:
        """Step and optimizer counts."""
        return Counts(
            self._scalar("step") or 0, self._scalar(f"{ADAM}/count"), self._scalar(f"{SCHEDULE}/count")
        )

    @property
    def extra(self) -> dict[str, Any]:
        """The JSON given to `CheckpointStore.save`."""
        return self._manifest.extra

    def read(self, name: str, index: Index) -> np.ndarray:
        """The slice of a tensor, in its stored dtype.

        Raises:
            DamagedCheckpoint: its bytes are missing or broken.
        """
        return self._read(self._names[name], index)

    def _scalar(self, name: str) -> int | None:
        return int(self._read(name, ())) if name in self._manifest.tensors else None

    def _read(self, stored: str, index: Index) -> np.ndarray:
        spec = self._manifest.tensors[stored]
        try:
            array = self._array(stored)
            if (tuple(array.shape), array.dtype.numpy_dtype) != (spec.shape, _dtype(spec.dtype)):
                raise DamagedCheckpoint(f"{stored}: expected {spec}, found {array.shape} {array.dtype.name}")
            return _read_chunks(array, index) if index else np.asarray(array.read().result())
        except (ValueError, OSError, KeyError) as error:
            raise DamagedCheckpoint(f"{self.where}: {stored}: {first_cause(error)}") from error

    def _array(self, stored: str) -> Any:
        with self._lock:
            if stored not in self._open_arrays:
                spec = {"driver": "zarr", "kvstore": {**self._base, "path": f"{self._keys[stored]}/"}}
                self._open_arrays[stored] = ts.open(spec, open=True, context=self._context).result()
            return self._open_arrays[stored]

    @cached_property
    def _keys(self) -> dict[str, str]:
        """The key of each tensor's zarr array, by its name in the manifest."""
        store = ts.KvStore.open(self._base, context=self._context).result()
        keys = [key.decode() for key in store.list().result()]
        arrays = [key.removesuffix("/.zarray") for key in keys if key.endswith("/.zarray")]
        return {key.replace(".", "/"): key for key in arrays}


def read_manifest(folder: str) -> Manifest:
    """The manifest of a step folder.

    Raises:
        DamagedCheckpoint: it is broken or of another form.
        UserError: it is missing.
    """
    with files.open_binary(files.join(folder, "manifest", "metadata")) as file:
        content = file.read(MAX_MANIFEST_BYTES + 1)
    if len(content) > MAX_MANIFEST_BYTES:
        raise DamagedCheckpoint(f"the manifest of {folder} is over {MAX_MANIFEST_BYTES} bytes")
    try:
        return manifests.decode(json.loads(content))
    except ValueError as error:
        raise DamagedCheckpoint(f"the manifest of {folder} is no JSON: {error}") from error


def ocdbt(folder: str) -> dict[str, Any]:
    """TensorStore's spec of the key-value store in a folder, local or `gs://`."""
    if not files.is_remote(folder):
        return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{os.path.abspath(folder)}/"}}
    bucket, _, path = folder.removeprefix("gs://").partition("/")
    return {"driver": "ocdbt", "base": {"driver": "gcs", "bucket": bucket, "path": f"{path}/"}}


def _read_chunks(array: Any, index: Index) -> np.ndarray:
    """The slice, a row of chunks at a time: TensorStore would hold all chunks that it touches at once."""
    spans = [range(*s.indices(n)) for s, n in zip(index, array.shape, strict=True)]
    out = np.empty([len(span) for span in spans], array.dtype.numpy_dtype)
    step, first = array.chunk_layout.read_chunk.shape[0], spans[0]
    for start in range(first.start - first.start % step, first.stop, step):
        a, b = max(start, first.start), min(start + step, first.stop)
        out[a - first.start : b - first.start] = array[(slice(a, b), *index[1:])].read().result()
    return out


def _our_name(stored: str) -> str:
    """`mu/embed/tokens/w` of `opt_state/1/mu/embed/tokens/w`; empty for what other forms have not."""
    for prefix, ours in PREFIXES.items():
        if stored.startswith(prefix):
            return ours + stored.removeprefix(prefix)
    return ""


def _dtype(name: str) -> np.dtype:
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))
