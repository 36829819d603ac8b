"""A checkpoint by its path. The table `FORMATS` recognizes it by the contents of its folder."""

import contextlib
import functools
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

from mesh_transformer import files, hub
from mesh_transformer.checkpoint.adapters import AdaptedSource, BaseSource, check_adapters
from mesh_transformer.checkpoint.classic.folder import step_numbers
from mesh_transformer.checkpoint.classic.format import ClassicStep
from mesh_transformer.checkpoint.format import Folder, StoredCheckpoint
from mesh_transformer.checkpoint.gguf.format import GgufFile
from mesh_transformer.checkpoint.hf.format import HFFolder, HubModel, weights_of
from mesh_transformer.checkpoint.lora_record import LoraRecord
from mesh_transformer.checkpoint.native.format import NativeStep
from mesh_transformer.checkpoint.origin import Origin
from mesh_transformer.checkpoint.peft.format import PeftFolder
from mesh_transformer.checkpoint.tensors import TensorSource
from mesh_transformer.config import ModelConfig
from mesh_transformer.errors import UserError, listed
from mesh_transformer.logs import log

BASE_ADVICE = "--base DIR says where it is now"
# adapters may have adapters as their base
_MOST_BASES = 4
# The first that finds a checkpoint decides. Native steps beside classic ones are of a run that was resumed from these.
# A folder with adapter_config.json is adapters, as transformers reads it.
FORMATS: tuple[type[StoredCheckpoint], ...] = (GgufFile, PeftFolder, HubModel, NativeStep, ClassicStep, HFFolder)
# what to do with a file that is given in place of a folder, by the end of its name
_NO_FOLDERS = {
    ".safetensors": "give the folder that holds it, with config.json beside it",
    ".bin": "give the folder that holds it, with config.json beside it",
    ".gguf": "it does not begin as a GGUF file does; download it again",
    **dict.fromkeys((".tar", ".tgz", ".tar.gz", ".tar.zst", ".zip"), "unpack it, and give the folder"),
}


class CheckpointTokenizer(NamedTuple):
    """What `data.tokenizer.load_tokenizer` gets.

    Args:
        spec: a name or a folder; None: nothing names a tokenizer.
        kept: whether `spec` is a folder that each native step has a copy of (origin.py).
    """

    spec: str | None = None
    kept: bool = False


class Checkpoint:
    """A checkpoint by its path: a step folder, a run's folder (its newest step), a Hugging Face folder, a folder of
    adapters of PEFT or a GGUF file, each local or `gs://`, or a name on the hub, hf://ORG/NAME[@REVISION] or
    hf://ORG/NAME[@REVISION]/FILE.gguf.

    Nothing is read before it is asked for, and then it is read once: a checkpoint stays the step that was found first.
    Whoever has written to a path opens it anew.

    Raises:
        UserError: at each question: there is no checkpoint, or its layout is not supported (the message lists the
            folder's contents), or it cannot be read, or the hub has no such model or cannot be reached.
    """

    def __init__(self, path: str, base: Self | None = None):
        self.path, self._given_base = path, base

    @classmethod
    def open(cls, path: str, *, base: str | Self | None = None) -> Self:
        """The checkpoint at a path, which is looked at when the first question is asked.

        Args:
            base: the base of its adapters, or where it is now; None: where they record it.
        """
        return cls(path, cls(base) if isinstance(base, str) else base)

    def reopened(self) -> Self:
        """This checkpoint, looked at anew."""
        return type(self)(self.path, None if self._given_base is None else self._given_base.reopened())

    def __str__(self) -> str:
        return self.path

    @functools.cached_property
    def _given(self) -> Folder:
        return Folder(self.path)

    @functools.cached_property
    def _stored(self) -> StoredCheckpoint:
        for format in FORMATS:
            try:
                checkpoint = format.find(self._given)
            except PermissionError as error:
                raise UserError(f"{self.path} cannot be read by this account: {error}") from error
            if checkpoint is not None:
                if format not in (HFFolder, HubModel) and (weights := weights_of(self._given)):
                    log.warning(
                        "%s holds a Hugging Face model too (%s): its %s checkpoint is read; move one of them to a "
                        "folder of its own",
                        *(self.path, weights[0], checkpoint.FORMAT),
                    )
                return checkpoint
        raise _missing(self._given)

    @property
    def has_base(self) -> bool:
        """Whether it holds adapters of a base."""
        return self._stored.has_base

    @property
    def base_is_given(self) -> bool:
        """Whether the base of its adapters was given, and is not the one that they name."""
        return self._given_base is not None

    @functools.cached_property
    def base(self) -> Self:
        """The base of its adapters."""
        if self._given_base is not None:
            return self._given_base
        path = self._stored.base
        log.info("the base of %s is %s", self.folder, path)
        return type(self).open(path)

    @property
    def _describing(self) -> "Checkpoint":
        """The checkpoint that says what the model is: itself, or its base."""
        checkpoint: Checkpoint = self
        for _ in range(_MOST_BASES + 1):
            if not checkpoint._stored.DESCRIBED_BY_BASE:
                return checkpoint
            with checkpoint._explain_base():
                _ = checkpoint.base._stored
            checkpoint = checkpoint.base
        raise self._too_deep()

    @property
    def place(self) -> str:
        """A path by which another process finds this checkpoint: of a run the step; a name on the hub with its commit;
        a local path from the root."""
        if hub.is_name(self.path):
            return hub.pinned(self.path)
        path = self.folder if os.path.isdir(self.path) or files.is_remote(self.path) else self.path
        return path if files.is_remote(path) else os.path.abspath(path)

    def recorded_group(self, name: str) -> dict[str, Any]:
        """A group of the config that it records, such as "lora", as JSON that anybody may have written; empty: none."""
        group = self._stored.recorded.get(name) if isinstance(self._stored.recorded, dict) else None
        return group if isinstance(group, dict) else {}

    @property
    def format(self) -> str:
        """The name of its format, such as "native"."""
        return self._stored.FORMAT

    @property
    def folder(self) -> str:
        """Its own folder: of a run the step's, of a name on the hub the one in the cache."""
        return self._stored.folder.path

    @property
    def model(self) -> ModelConfig | None:
        """The model that it records; None: it records none."""
        return self._describing._stored.model

    @functools.cached_property
    def config(self) -> dict[str, Any] | None:
        """The config that it records, with grouped keys: the model, and the tokenizer if it names one. None: it does
        not record its model."""
        if self.model is None:
            return None
        recorded = self._describing._stored.recorded
        data = recorded.get("data") if isinstance(recorded, dict) else None
        tokenizer = data.get("tokenizer") if isinstance(data, dict) else None
        if self.adapters_tokenizer is not None:
            tokenizer = None
        return {
            "model": self.model.model_dump(mode="json"),
            "data": {"tokenizer": tokenizer if isinstance(tokenizer, str) else None},
        }

    @functools.cached_property
    def tokenizer(self) -> CheckpointTokenizer:
        """The tokenizer that the config names, else the tokenizer of the Hugging Face folder that the checkpoint is or
        came from, else the tokenizer in the folder of the run.

        If the Hugging Face folder has no tokenizer, the result still names the folder, so that `load_tokenizer` says
        what is missing: GPT-2's tokenizer would be wrong.
        """
        if self.adapters_tokenizer is not None:
            return CheckpointTokenizer(self.adapters_tokenizer)
        if self._stored.DESCRIBED_BY_BASE:
            return self._describing.tokenizer
        if self.config is not None and self.config["data"]["tokenizer"] is not None:
            return CheckpointTokenizer(self.config["data"]["tokenizer"])
        if self._stored.tokenizer is not None:
            return CheckpointTokenizer(self._stored.tokenizer, kept=True)
        origin, root = self._stored.hf_folder, split_step(self.path)[0]
        run = self._given if root == self._given.path else Folder(root)
        if origin is not None and _has_tokenizer(origin):
            return CheckpointTokenizer(origin.path, kept=True)
        if _has_tokenizer(run):
            return CheckpointTokenizer(run.path)
        return CheckpointTokenizer(None if origin is None else origin.path, kept=True)

    @property
    def adapters_tokenizer(self) -> str | None:
        """The folder of adapters that has a tokenizer in place of its base's, such as one with a chat template."""
        return self.folder if self._stored.DESCRIBED_BY_BASE and _has_tokenizer(self._stored.folder) else None

    @functools.cached_property
    def generation_config(self) -> dict[str, Any]:
        """What generation_config.json of the model that it is or came from says; empty: there is none.

        Raises:
            UserError: as above, or the file is no JSON object.
        """
        return self._describing._stored.generation_config

    def source(self, model: ModelConfig) -> TensorSource:
        """Its tensors. Adapters give the tensors of the whole model. No tensor is read yet; the weights of a name on
        the hub are downloaded.

        Each call opens them: a source may hold a whole matrix, so it lives no longer than its reader wants.

        Args:
            model: the config's model. The checkpoint must be of this model.

        Raises:
            UserError: as above, or it is of another model, or damaged.
        """
        return self._source(model, _MOST_BASES)

    def adapters(self, model: ModelConfig) -> tuple[TensorSource, LoraRecord]:
        """The tensors of its adapters alone, and what they are.

        Raises:
            UserError: as above, or it holds a whole model.
        """
        source, record = self._stored.adapters(model)
        check_adapters(source, record, model)
        return source, record

    def _source(self, model: ModelConfig, bases: int) -> TensorSource:
        if not self.has_base:
            if self._given_base is not None:
                raise UserError(f"{self.folder} is a whole model, not adapters of {self._given_base}: it has no base")
            return self._stored.source(model)
        if not bases:
            raise self._too_deep()
        source, record = self.adapters(model)
        return AdaptedSource(self._base_source(model, bases - 1), source, record, model)

    def _too_deep(self) -> UserError:
        return UserError(
            f"{self.path} is the base of the base of {_MOST_BASES} others, or a base of itself: merge some of them"
        )

    def _base_source(self, model: ModelConfig, bases: int) -> BaseSource:
        with self._explain_base():
            return BaseSource(self.base._source(model, bases), model)

    @contextlib.contextmanager
    def _explain_base(self) -> Iterator[None]:
        """Say in an error that it is of the base."""
        try:
            yield
        except UserError as error:
            advice = "" if self.base_is_given else f"; {BASE_ADVICE}"
            raise UserError(f"the base of {self.folder}, {self.base}, cannot be opened: {error}{advice}") from error

    def origin(self, source: TensorSource) -> Origin | None:
        """The Hugging Face folder that it came from, or is; None: none.

        Args:
            source: its own, of any model.

        Raises:
            UserError: as above, or a file is too large.
        """
        if self._stored.DESCRIBED_BY_BASE and isinstance(source, AdaptedSource):
            return self.base.origin(source.base)
        return self._stored.origin(source)


def finished_steps(root: str) -> list[str]:
    """The names of the finished steps of all formats directly under `root`, ascending."""
    folder = Folder(root)
    return [name for name in folder.steps if any(format.is_step(folder.inside(name)) for format in FORMATS)]


def check_only_step(root: str, step: int) -> None:
    """Refuse a root with finished steps, native or classic, other than `step`.

    Readers of the root use its newest step, and a run deletes older steps.

    Raises:
        UserError: there are other steps; the message names them.
    """
    others = [name for name in finished_steps(root) if name != f"step_{step}"]
    if others:
        raise UserError(
            f"{root} holds {listed(others)}: step_{step} of another checkpoint cannot be written to the same folder; "
            "choose another folder"
        )


def step_of(root: str, step: int) -> Checkpoint:
    """One step, native or classic, of the run in a folder.

    Raises:
        UserError: the folder has no such step.
    """
    names, name = files.list_dir(root), f"step_{step}"
    if name not in names:
        raise UserError(f"no checkpoint of step {step} in {root}: available are {step_numbers(names)}")
    return Checkpoint.open(files.join(root, name))


def split_step(path: str) -> tuple[str, int | None]:
    """Split `run/step_N` into the run's folder and the step. For any other path: the path and None."""
    if hub.is_name(path):
        return path, None
    path = path.rstrip("/")
    match = re.fullmatch(r"(.*/)?step_(\d+)", path)
    return ((match[1] or "./").rstrip("/"), int(match[2])) if match else (path, None)


def _has_tokenizer(folder: Folder) -> bool:
    return not hub.VOCABULARIES.isdisjoint(folder.names)


def _missing(folder: Folder) -> UserError:
    """The error that says what a folder without a checkpoint holds, or what a path is that is no folder."""
    path, names = folder.path, folder.names
    scheme, separator, _ = path.partition("://")
    if separator and not files.is_remote(path):
        return UserError(f"{scheme}:// cannot be read: copy {path} to a local folder or to gs://")
    if path.endswith((".gguf", ".safetensors", ".bin")) and not files.is_file(path):
        return UserError(f"no such file: {path}{files.seen_from(path)}")
    if advice := next((words for suffix, words in _NO_FOLDERS.items() if path.endswith(suffix)), None):
        return UserError(f"{path} is not the folder of a checkpoint: {advice}")
    if gguf := [name for name in names if name.endswith(".gguf")]:
        return UserError(f"{path} holds GGUF files: give one of them: {listed(gguf, most=8)}")
    root, _, name = path.rpartition("/")
    if not names and re.fullmatch(r"step_\d+", name) and (steps := finished_steps(root or ".")):
        return UserError(f"no {name} in {root or '.'}: it has {listed(steps)}")
    hint = "" if names or files.is_remote(path) else f"; a model on the Hugging Face hub is named {hub.FORM}"
    return UserError(
        f"no checkpoint in {path}{files.seen_from(path)}: expected the folder of a run or one of its step_N folders, a "
        "classic step_N folder with shard_0 in it, a Hugging Face folder with config.json and weights, or a GGUF file; "
        "found "
        f"{listed(names, most=8)}{hint}"
    )
