"""PyTorch's own files (pytorch_model.bin), read tensor by tensor through torch, which maps them into memory.

A .bin file holds a pickle. Before torch sees it (with weights_only), its list of names is read without executing
anything: only what a plain dictionary of tensors needs may be there, in a pickle of bounded size.
"""

from __future__ import annotations

import pickletools
import re
import zipfile
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from mesh_transformer import files
from mesh_transformer.checkpoint.tensors import Index
from mesh_transformer.errors import UserError

MAX_PICKLE_BYTES = 16 << 20  # GPT-J-6B's is 40 kB
_HARMLESS = re.compile(
    r"collections OrderedDict|torch \w+Storage|torch\._utils _rebuild_(tensor_v2|parameter)"
)


class TorchTensor(NamedTuple):
    """One tensor of a file, read in slices. The file is mapped for the time of a read."""

    path: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self, index: Index) -> np.ndarray:
        """A slice: (sizes of `index`)."""
        return _to_numpy(_load(self.path)[self.name].detach()[index]).copy()


def read_catalogue(path: str) -> dict[str, TorchTensor]:
    """The tensors of a local file by name.

    Raises:
        UserError: torch is not installed, or the file is missing, damaged, or more than a dictionary of tensors.
    """
    _check_container(path)
    catalogue = {}
    for name, tensor in _load(path).items():
        _check_tensor(path, name, tensor)
        dtype = _to_numpy(tensor.detach()[:0] if tensor.ndim else tensor.detach()).dtype
        catalogue[name] = TorchTensor(path, name, tuple(tensor.shape), dtype)
    return catalogue


def _check_container(path: str) -> None:
    files.size(path)  # says that a file is missing
    try:
        with zipfile.ZipFile(path) as archive:
            pickles = [item for item in archive.infolist() if item.filename.split("/")[-1] == "data.pkl"]
            if len(pickles) != 1 or any(item.compress_type for item in archive.infolist()):
                raise UserError(f"{path} is not laid out as torch.save does it")
            if pickles[0].file_size > MAX_PICKLE_BYTES:
                raise UserError(f"{path}: its pickle is over {MAX_PICKLE_BYTES} bytes")
            names = _globals(archive.read(pickles[0]))
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  (zipfile and pickletools raise many kinds on damaged files)
        raise UserError(
            f"{path} cannot be read ({error}): it is damaged, or older than torch 1.6; in that case load it with torch "
            "and save it again"
        ) from error
    strange = [name for name in names if not _HARMLESS.fullmatch(name)]
    if strange:
        raise UserError(f"{path} is no plain dictionary of tensors, its pickle names {strange[0]!r:.80}")


def _globals(pickle: bytes) -> list[str]:
    """The functions and classes that a pickle names; STACK_GLOBAL, which torch.save does not use, as `?`."""
    found = []
    for opcode, argument, _ in pickletools.genops(pickle):
        if opcode.name in ("GLOBAL", "INST"):
            found.append(str(argument))
        elif opcode.name in ("STACK_GLOBAL", "EXT1", "EXT2", "EXT4"):
            found.append("?")
    return found


def _load(path: str) -> dict[str, Any]:
    try:
        import torch
    except ImportError as error:
        raise UserError(
            f"{path} is read through PyTorch, which is not installed: pip install -e '.[torch]', or convert it to "
            "safetensors elsewhere"
        ) from error
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # noqa: BLE001  (torch raises many kinds on damaged files)
        reason = str(error).split("\n")[0][:300]
        raise UserError(f"{path} cannot be read by torch: {reason}") from error
    if not isinstance(loaded, dict):
        raise UserError(f"{path} holds a {type(loaded).__name__}, not a dictionary of tensors")
    return loaded


def _check_tensor(path: str, name: Any, tensor: Any) -> None:
    import torch

    if not isinstance(name, str):
        raise UserError(f"{path}: {name!r:.80} is no name of a tensor")
    if not isinstance(tensor, torch.Tensor):
        raise UserError(f"{path}: {name} is a {type(tensor).__name__}, not a tensor")
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() < end:
        raise UserError(f"{path}: {name}: its bytes are not all there, or not in order")


def _to_numpy(tensor: Any) -> np.ndarray:
    import torch

    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
