"""Repositories of models on the Hugging Face hub, named hf://ORG/NAME or hf://ORG/NAME@REVISION, and of data sets.

huggingface_hub downloads the files to its cache and follows its own environment variables: HF_HOME, HF_TOKEN,
HF_ENDPOINT, HF_HUB_OFFLINE. Several processes of one host may ask for the same files: the cache locks each file, and
one process downloads it.
"""

import contextlib
import functools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mesh_transformer import liveness
from mesh_transformer.errors import UserError, listed
from mesh_transformer.gguf.parts import part_names
from mesh_transformer.logs import Progress, log

PREFIX = "hf://"
FORM = (
    "hf://ORG/NAME or hf://ORG/NAME@REVISION, such as hf://EleutherAI/pythia-70m@step3000, or a GGUF file in it, "
    "hf://ORG/NAME/FILE.gguf"
)
DATASETS = f"{PREFIX}datasets/"
DATASET_FORM = f"{DATASETS}ORG/NAME, then @REVISION, /FOLDER, :SPLIT as needed, such as {DATASETS}org/name:train"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
# a folder with one of these has a tokenizer
VOCABULARIES = frozenset({"tokenizer.json", "vocab.json"})
CONFIG_FILES = ("config.json", "generation_config.json")
ADAPTER_CONFIG = "adapter_config.json"
# what the reader of a folder looks for (checkpoint/hf/source.py); .bin files only where there is no safetensors file
_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json", "model-*.safetensors")
_ADAPTER = ("adapter_model.safetensors", "adapter_model.bin")
_BIN = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin")
_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"(?P<name>(?:{_PART}/)?{_PART})(?:@(?P<revision>{_PART}(?:/{_PART})*))?", re.ASCII)
# a revision in the name of a file has no slashes, but for refs/...
_FILE = r"(?:[\w+][\w.+-]*/)*[\w+][\w.+-]*\.(?i:gguf)"
_GGUF = re.compile(
    rf"(?P<name>{_PART}/{_PART})(?:@(?P<revision>refs/(?:\w+/)?{_PART}|{_PART}))?/(?P<file>{_FILE})", re.ASCII
)
# of the page of a model, of a revision's files, or of one of them
_ADDRESS = re.compile(
    rf"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<name>{_PART}/{_PART})"
    rf"(?:/(?:tree|blob|resolve|raw)/(?P<revision>{_PART})(?P<file>/{_FILE})?)?/?(?:\?download=true)?",
    re.ASCII,
)


_DATASET = re.compile(
    rf"{DATASETS}(?P<name>(?:{_PART}/)?{_PART})(?:@(?P<revision>refs/convert/{_PART}|{_PART}))?"
    r"(?P<folder>(?:/[^/:]+)*)/?(?::(?P<split>[\w.-]+))?",
    re.ASCII,
)


class Repository(NamedTuple):
    """A repository on the hub, and a branch, a tag or a commit in it; None: its main branch."""

    name: str
    revision: str | None


def is_name(path: str) -> bool:
    """Whether a path names a repository on the hub."""
    return path.startswith(PREFIX)


def as_name(path: str) -> str | None:
    """The hub's name that a user may mean: `path` is ORG/NAME or ORG/NAME@REVISION and no local folder, or the web
    address of a model. None for any other text, and for a path in a local folder that exists."""
    address = _ADDRESS.fullmatch(path)
    if address is not None:
        revision = f"@{address['revision']}" if address["revision"] else ""
        return f"{PREFIX}{address['name']}{revision}{address['file'] or ''}"
    name = _GGUF.fullmatch(path) or _NAME.fullmatch(path)
    local = os.path.exists(path) or os.path.exists(os.path.dirname(path))
    return None if name is None or "/" not in name["name"] or local else f"{PREFIX}{path}"


def parse(path: str) -> Repository:
    """The repository that `path` names, with or without hf://.

    Raises:
        UserError: the name is malformed.
    """
    match = _GGUF.fullmatch(path.removeprefix(PREFIX)) or _NAME.fullmatch(path.removeprefix(PREFIX))
    if match is None or ".." in path or "--" in match["name"]:
        raise UserError(f"{path[:200]!r} is not a name on the Hugging Face hub: expected {FORM}")
    return Repository(match["name"], match["revision"])


def gguf_file(path: str) -> str | None:
    """The file in its repository that `path` names, with or without hf://; None: it names a whole repository."""
    match = _GGUF.fullmatch(path.removeprefix(PREFIX))
    return None if match is None else match["file"]


@functools.cache
def downloaded_gguf(path: str) -> str:
    """The local path of a GGUF file on the hub. It is downloaded with its other parts, and nothing else.

    Raises:
        UserError: as in `model_folder`, or the repository has no such file.
    """
    file = gguf_file(path)
    assert file is not None
    folder = _download(path, parse(path), part_names(file))
    local = os.path.join(folder, file)
    if not os.path.isfile(local):
        raise UserError(f"{path}: the repository has no file {file}{_gguf_files(path)}")
    return local


@functools.cache
def model_folder(path: str, *, weights: bool = True) -> str:
    """A local folder with the files of a model: config.json, the tokenizer and, with `weights`, the weights.

    Later calls in this process return the same folder, even if the repository has changed meanwhile.

    Raises:
        UserError: the name is malformed, there is no such model, it may not be read, or the hub cannot be reached.
    """
    folder = _description(path)
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise UserError(f"{path} has no config.json: expected a model in the format of transformers{_gguf_files(path)}")
    if not weights:
        return folder
    repository = parse(path)._replace(revision=os.path.basename(folder))
    log.info("%s: commit %s, in %s; weights that are not there yet are downloaded", path, repository.revision, folder)
    for patterns in (_SAFETENSORS, _BIN):
        _download(path, repository, (*CONFIG_FILES, *patterns))
        if any(name.endswith(os.path.splitext(patterns[0])[1]) for name in os.listdir(folder)):
            return folder
    raise UserError(
        f"{path} has no weights in {folder}: expected {_SAFETENSORS[0]} or {_BIN[0]}, or shards of them with an index; "
        "without a network they must be there already"
    )


@functools.cache
def adapter_folder(path: str) -> str:
    """A local folder with the adapter of a repository: adapter_config.json and the tensors.

    Raises:
        UserError: as in `model_folder`.
    """
    folder = _description(path)
    repository = parse(path)._replace(revision=os.path.basename(folder))
    log.info("%s: commit %s, in %s", path, repository.revision, folder)
    return _download(path, repository, (ADAPTER_CONFIG, _ADAPTER[0]))


def description_folder(name: str) -> str:
    """A local folder with the files of a repository that are no weights: the configs and the tokenizer; `name` may
    begin with hf://.

    Raises:
        UserError: as in `model_folder`.
    """
    return _description(name)


def forget() -> None:
    """Look names up anew from now on."""
    for function in (model_folder, downloaded_gguf, adapter_folder, _description):
        function.cache_clear()


def pinned(path: str) -> str:
    """The name of a repository with the commit that its revision is now; any other path as it is.

    Raises:
        UserError: as in `model_folder`.
    """
    if not is_name(path):
        return path
    file = gguf_file(path)
    if file is None:
        return f"{PREFIX}{parse(path).name}@{os.path.basename(_description(path))}"
    folder = downloaded_gguf(path).removesuffix(f"/{file}")
    return f"{PREFIX}{parse(path).name}@{os.path.basename(folder)}/{file}"


def check_push(path: str) -> None:
    """Check that `push` to the repository `path` has a name without a revision, and a token that the hub knows.

    Raises:
        UserError: it has not, or the hub cannot be reached.
    """
    import huggingface_hub

    if parse(path).revision is not None:
        raise UserError(f"{path}: an upload goes to the main branch: give ORG/NAME without a revision")
    with _explained(path), liveness.service_call():
        huggingface_hub.HfApi().whoami()


def check_kind(path: str, *, adapters: bool) -> None:
    """Check that the repository `path`, if it exists, holds no adapters where a whole model is uploaded, and the
    reverse: readers would take one for the other.

    Raises:
        UserError: it does, or the hub cannot be reached.
    """
    import huggingface_hub

    api, name = huggingface_hub.HfApi(), parse(path).name
    with _explained(path), liveness.service_call():
        names = api.list_repo_files(name) if api.repo_exists(name) else []
    if ADAPTER_CONFIG in names and not adapters:
        raise UserError(f"{path} holds adapters, which readers would add to their base: give another repository")
    if adapters and any(name.endswith((".safetensors", ".bin")) and name not in _ADAPTER for name in names):
        raise UserError(f"{path} holds a whole model: give the adapters a repository of their own")


def push(folder: str, path: str) -> str:
    """Upload a local folder to the main branch of the repository `path`; return its address.

    A new repository is private. Weights of the repository that are not in the folder are deleted, because a reader
    might take them for the model's.

    Raises:
        UserError: the account may not write there, or the hub cannot be reached.
    """
    import huggingface_hub

    if not sys.stderr.isatty() and "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ:
        huggingface_hub.utils.disable_progress_bars()
    api, name = huggingface_hub.HfApi(), parse(path).name
    with _explained(path), liveness.service_call():
        created = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=created.repo_id,
            folder_path=folder,
            commit_message="Upload by mesh-transformer",
            delete_patterns=[*_SAFETENSORS, *_BIN],
        )
    return str(created)


class DatasetName(NamedTuple):
    """A data set on the hub. An empty folder is the whole repository; without a split, all splits are read."""

    repository: Repository
    folder: str
    split: str | None


def is_dataset(path: str) -> bool:
    """Whether a path names a data set on the hub, or a file of one."""
    return path.startswith(DATASETS)


def parse_dataset(path: str) -> DatasetName:
    """The data set that `path` names.

    Raises:
        UserError: the name is malformed.
    """
    match = _DATASET.fullmatch(path)
    if match is None or ".." in path or "--" in match["name"]:
        raise UserError(f"{path[:200]!r} is not a data set on the Hugging Face hub: expected {DATASET_FORM}")
    return DatasetName(Repository(match["name"], match["revision"]), match["folder"].strip("/"), match["split"])


def dataset_files(path: str) -> list[tuple[str, int]]:
    """Path and size, bytes, of each file of a data set, in any folder. A path has the commit: hf://datasets/N@C/FILE.

    Raises:
        UserError: the name is malformed, there is no such data set, it may not be read, or the hub cannot be reached.
    """
    import huggingface_hub

    api, (name, revision) = huggingface_hub.HfApi(), parse_dataset(path).repository
    with _explained(path), liveness.service_call():
        commit = api.dataset_info(name, revision=revision).sha
        tree = list(api.list_repo_tree(name, recursive=True, revision=commit, repo_type="dataset"))
    # folders have no size
    files = [(entry.path, getattr(entry, "size", None)) for entry in tree]
    return sorted((f"{DATASETS}{name}@{commit}/{file}", size) for file, size in files if size is not None)


def dataset_file(path: str) -> str:
    """The local path of a file that `dataset_files` gave. It is downloaded to the cache if it is not there.

    Raises:
        UserError: it may not be read, or the hub cannot be reached.
    """
    import huggingface_hub

    with _explained(path), liveness.service_call():
        name, revision, file = _file_of(path)
        return huggingface_hub.hf_hub_download(name, file, repo_type="dataset", revision=revision)


def read_dataset_range(path: str, start: int, length: int) -> bytes:
    """Bytes `start` to `start + length` of a file that `dataset_files` gave, from the hub.

    Raises:
        UserError: it may not be read, or the hub cannot be reached.
    """
    from huggingface_hub import constants, hf_hub_url, utils

    headers = {**utils.build_hf_headers(), "Range": f"bytes={start}-{start + length - 1}"}
    with _explained(path), liveness.service_call():
        name, revision, file = _file_of(path)
        url = hf_hub_url(name, file, repo_type="dataset", revision=revision)
        answer = utils.http_backoff("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
        utils.hf_raise_for_status(answer)
    # a proxy may send the whole file
    return bytes(answer.content if answer.status_code == 206 else answer.content[start : start + length])


def _file_of(path: str) -> tuple[str, str, str]:
    """Repository, commit and name of a file that `dataset_files` gave."""
    name, _, rest = path.removeprefix(DATASETS).partition("@")
    revision, _, file = rest.partition("/")
    return name, revision, file


@functools.cache
def _description(path: str) -> str:
    """The folder with the config and the tokenizer. Its name is the commit."""
    return _download(path, parse(path), (*CONFIG_FILES, ADAPTER_CONFIG, *TOKENIZER_FILES))


def _download(path: str, repository: Repository, patterns: Sequence[str]) -> str:
    import huggingface_hub

    with _explained(path), liveness.service_call():
        return huggingface_hub.snapshot_download(
            repository.name, revision=repository.revision, allow_patterns=list(patterns), tqdm_class=_bar()
        )


def _gguf_files(path: str) -> str:
    """What a message about a repository without the wanted file says of its GGUF files."""
    import huggingface_hub

    name, revision = parse(path)
    try:
        with _explained(path), liveness.service_call():
            names = huggingface_hub.HfApi().list_repo_files(name, revision=revision)
    except UserError:
        return ""
    gguf = [file for file in names if file.endswith(".gguf")]
    return f"; it has GGUF files, give one as hf://{name}/FILE: {listed(gguf, most=8)}" if gguf else ""


@functools.cache
def _bar() -> type:
    """The library's progress bar, on the terminal of a command. It also tells the watchdog of progress."""
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named | ({} if Progress.shown() else {"disable": True}))

        def update(self, n: float | None = 1) -> Any:
            liveness.record_progress()
            return super().update(n)

    return Bar


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    """Turn the library's errors into a UserError of one line that says what to do."""
    from huggingface_hub import errors

    token = "with a token of an account that may read it (hf auth login, or the environment variable HF_TOKEN)"
    try:
        yield
    except errors.HFValidationError as error:
        raise UserError(f"{path} is not a name on the Hugging Face hub: expected {FORM}") from error
    except errors.GatedRepoError as error:
        raise UserError(
            f"{path} is gated: accept its conditions on its page on the hub, and run the command {token}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{path}: the repository has no such branch, tag or commit") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{path}: no such repository on the Hugging Face hub, or a private one: check the name, or run the command "
            f"{token}"
        ) from error
    except errors.LocalTokenNotFoundError as error:
        raise UserError(f"{path}: no token of the Hugging Face hub: run hf auth login, or set HF_TOKEN") from error
    except errors.LocalEntryNotFoundError as error:
        raise UserError(
            f"{path} is not in this machine's cache, and the Hugging Face hub cannot be reached ({_reason(error)})"
        ) from error
    # errors of the network, of the server and of the disk; an upload raises RuntimeError
    except (OSError, ValueError, RuntimeError, errors.HTTPError) as error:
        raise UserError(f"{path}: the Hugging Face hub or its cache cannot be used ({_reason(error)})") from error


def _reason(error: BaseException) -> str:
    """The first cause of an error, on one line."""
    from huggingface_hub import errors

    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said}"[:200]
