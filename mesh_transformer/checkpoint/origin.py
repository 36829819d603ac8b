"""The Hugging Face folder that a checkpoint came from: its files without the weights, and the dtype of its weights.

A native step has copies of the files in its folder `hf` (step_1000/hf/config.json, tokenizer.json, ...), and the dtype
in its manifest. So the step has its tokenizer, and an export writes the same files back.
"""

from collections.abc import Container, Mapping
from typing import Any, NamedTuple, Self

import ml_dtypes
import numpy as np

from mesh_transformer import files, hub
from mesh_transformer.errors import UserError

FOLDER = "hf"
NAMES = (*hub.CONFIG_FILES, *hub.TOKENIZER_FILES)
# the largest known tokenizer.json has 34 MB
MAX_FILE_BYTES = 128 << 20
# what a manifest may name
_DTYPES = {str(dtype): dtype for dtype in map(np.dtype, (np.float32, np.float16, ml_dtypes.bfloat16))}


class Origin(NamedTuple):
    """The files by name, with config.json, and the dtype of the weights; None: they had several."""

    files: Mapping[str, bytes]
    dtype: np.dtype | None

    def without(self, names: Container[str]) -> Self:
        """The origin without these files."""
        return self._replace(files={name: content for name, content in self.files.items() if name not in names})

    def to_json(self) -> dict[str, Any]:
        """What the manifest of a native step records."""
        return {"dtype": None if self.dtype is None else str(self.dtype)}


def read_files(folder: str) -> dict[str, bytes] | None:
    """The files of a Hugging Face folder, local or `gs://`, without the weights; None if it has no config.json.

    Raises:
        UserError: a file is too large.
    """
    names = [name for name in files.list_dir(folder) if name in NAMES]
    if "config.json" not in names:
        return None
    return {name: _read(files.join(folder, name)) for name in names}


def read_origin(step_folder: str, extra: Mapping[str, Any]) -> Origin | None:
    """The origin of a native step with the JSON `extra`; None if it has none.

    Raises:
        UserError: a file is too large.
    """
    contents, recorded = read_files(files.join(step_folder, FOLDER)), extra.get("origin")
    if contents is None:
        return None
    name = recorded.get("dtype") if isinstance(recorded, dict) else None
    return Origin(contents, _DTYPES.get(name) if isinstance(name, str) else None)


def write_files(contents: Mapping[str, bytes], folder: str) -> None:
    """Write files into a folder, local or `gs://`."""
    for name, content in contents.items():
        files.replace(files.join(folder, name), content)


def _read(path: str) -> bytes:
    if (size := files.size(path)) > MAX_FILE_BYTES:
        raise UserError(f"{path} has {size} bytes: at most {MAX_FILE_BYTES} are read of a file without weights")
    return files.read_range(path, 0, size)
