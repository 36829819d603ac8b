"""What a format of checkpoints is: a class in the file format.py of its folder, and a line of the table in open.py."""

import functools
import re
from typing import Any, ClassVar, Self

from mesh_transformer import files, hub
from mesh_transformer.checkpoint.identity import recorded_model
from mesh_transformer.checkpoint.lora_record import LoraRecord
from mesh_transformer.checkpoint.origin import Origin
from mesh_transformer.checkpoint.tensors import TensorSource
from mesh_transformer.config import ModelConfig, strict_json
from mesh_transformer.errors import UserError

GENERATION_CONFIG = "generation_config.json"


class Folder:
    """A folder, local or `gs://`, or a name on the Hugging Face hub. It need not exist.

    It is listed once, when its names are first asked for, and so is each folder in it: this is one look, which no
    writer keeps.
    """

    def __init__(self, path: str):
        self.path = path if hub.is_name(path) else path.rstrip("/") or "/"
        self._inside: dict[str, Folder] = {}

    @functools.cached_property
    def names(self) -> list[str]:
        """The names in it, sorted."""
        return files.list_dir(self.path)

    @property
    def steps(self) -> list[str]:
        """The names of the form step_N in it, ascending by N."""
        steps = [name for name in self.names if re.fullmatch(r"step_\d+", name)]
        return sorted(steps, key=lambda name: int(name.removeprefix("step_")))

    def inside(self, name: str) -> "Folder":
        """The folder of this name in it."""
        return self._inside.setdefault(name, Folder(files.join(self.path, name)))


class StoredCheckpoint:
    """A checkpoint that was found in a folder. A format is a subclass. What it reads to answer, it reads once.

    Args:
        folder: of the checkpoint itself: of a run, the step.
    """

    # the name of the format in messages
    FORMAT: ClassVar[str]
    # whether it holds adapters alone, and its base says what the model, the tokenizer and the origin are
    DESCRIBED_BY_BASE: ClassVar[bool] = False

    def __init__(self, folder: Folder):
        self.folder = folder

    @classmethod
    def find(cls, folder: Folder) -> Self | None:
        """The checkpoint that a folder is; of a run, its newest step. None: the folder has none of this format.

        Raises:
            UserError: it has one that cannot be read.
        """
        raise NotImplementedError

    @classmethod
    def is_step(cls, folder: Folder) -> bool:
        """Whether a folder is a finished step of a run in this format."""
        return False

    @property
    def recorded(self) -> Any:
        """The config that it records, as JSON that anybody may have written; None: none."""
        return None

    @functools.cached_property
    def model(self) -> ModelConfig | None:
        """The model that it records; None: it records none.

        Raises:
            UserError: the recorded model cannot be read.
        """
        return recorded_model(self.recorded, self.folder.path)

    @property
    def hf_folder(self) -> Folder | None:
        """The folder with config.json and the tokenizer of the Hugging Face folder that it is or came from, if any."""
        return None

    @property
    def has_base(self) -> bool:
        """Whether it holds adapters of a base."""
        return False

    @property
    def base(self) -> str:
        """The path of its base, if it has one.

        Raises:
            UserError: it does not say which.
        """
        raise NotImplementedError

    def adapters(self, model: ModelConfig) -> tuple[TensorSource, LoraRecord]:
        """Its tensors and what they are, if it has a base; see `open.Checkpoint.adapters`."""
        raise UserError(f"{self.folder.path} is a whole model, not adapters of one")

    @property
    def tokenizer(self) -> str | None:
        """What `load_tokenizer` gets for the tokenizer that the checkpoint itself has, if it has no `hf_folder`."""
        return None

    @property
    def generation_config(self) -> dict[str, Any]:
        """The sampling options that its authors propose, as in generation_config.json; empty: none.

        Raises:
            UserError: they cannot be read.
        """
        folder = self.hf_folder
        if folder is None or GENERATION_CONFIG not in folder.names:
            return {}
        return strict_json.read_object(files.join(folder.path, GENERATION_CONFIG))

    def source(self, model: ModelConfig) -> TensorSource:
        """Its tensors; see `open.Checkpoint.source`."""
        raise NotImplementedError

    def origin(self, source: TensorSource) -> Origin | None:
        """The Hugging Face folder that it came from; see `open.Checkpoint.origin`."""
        return None
