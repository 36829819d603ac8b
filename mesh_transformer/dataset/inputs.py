"""Finds the files of inputs: files, folders, patterns, objects in buckets, data sets of the Hugging Face hub."""

import fnmatch
import glob
import logging
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mesh_transformer import files, hub
from mesh_transformer.data.corpus.formats import allowed, format_of
from mesh_transformer.errors import UserError, listed, plural

_log = logging.getLogger(__name__)
# how the names of files show their split
_SPLITS = ("train", "validation", "valid", "dev", "val", "test")


@dataclass(frozen=True)
class InputFile:
    """A file of an input: its path (local ones are absolute), the key of its format in FORMATS, its size in bytes."""

    path: str
    format: str
    size: int


@dataclass(frozen=True)
class Input:
    """An input of the command.

    Args:
        spec: as the user gave it, without the share.
        share: of its documents, above 0 and at most 1.
        files: sorted by path.
    """

    spec: str
    share: float
    files: tuple[InputFile, ...]


def read_inputs(specs: Sequence[str]) -> list[Input]:
    """The inputs that X or X=SHARE name.

    X is a file, a folder with all files below it, a pattern with *, ?, [] and **, the same on gs://, the beginning of
    names on gs://, or hf://datasets/ORG/NAME with @REVISION, /FOLDER and :SPLIT where needed. Names that begin with a
    dot are left out. X=SHARE is a path if a file or folder has this whole name.

    Raises:
        UserError: there is no such input, it has no file or a file of an unknown kind, a share is not above 0 and at
            most 1, or a file is in two inputs.
    """
    if not specs:
        raise UserError("no input: give at least one --input")
    inputs = [_read(spec) for spec in specs]
    names = Counter(source.spec.rstrip("/") for source in inputs)
    if twice := [name for name, count in names.items() if count > 1]:
        raise UserError(f"the input {twice[0]} is given {names[twice[0]]} times: give it once, with its share")
    owners: dict[str, str] = {}
    for source in inputs:
        for file in source.files:
            if file.path in owners:
                raise UserError(
                    f"{file.path} is in two inputs, {owners[file.path]} and {source.spec}: choose inputs without "
                    "common files"
                )
            owners[file.path] = source.spec
    if empty := [file.path for source in inputs for file in source.files if not file.size]:
        _log.warning("%s: %s", plural(len(empty), "file has no bytes", "files have no bytes"), listed(empty))
    return inputs


def _read(spec: str) -> Input:
    name, share = _share(spec)
    sized_files = sorted(set(_remote_files(name) if _is_remote(name) else _local_files(name)))
    named = [(path, size, format_of(path)) for path, size in sized_files]
    if unknown := [path for path, _, format in named if not format]:
        raise UserError(
            f"{name}: {plural(len(unknown), 'file')} of an unknown kind: {listed(unknown)}; allowed: {allowed()}: move "
            "the others away, or choose files with a pattern"
        )
    return Input(
        name, share, tuple(InputFile(path, format, size) for path, size, format in named if format is not None)
    )


def _share(spec: str) -> tuple[str, float]:
    """(X, SHARE) of X=SHARE. (`spec`, 1) if the end is no number, or if a file has the whole name."""
    name, equals, end = spec.rpartition("=")
    try:
        share = float(end)
    except ValueError:
        return spec, 1.0
    if not equals or _exists(spec):
        return spec, 1.0
    if not name or not 0 < share <= 1:
        raise UserError(f"--input {spec}: the share {end} must be above 0 and at most 1; there is no file {spec}")
    return name, share


def _is_remote(name: str) -> bool:
    return files.is_remote(name) or hub.is_name(name)


def _exists(name: str) -> bool:
    if files.is_remote(name):
        return any(path == name or path.startswith(f"{name}/") for path, _ in files.objects(name))
    return not hub.is_name(name) and os.path.exists(name)


def _remote_files(name: str) -> list[tuple[str, int]]:
    return _objects(name) if files.is_remote(name) else _hub_files(name)


def _local_files(name: str) -> Iterator[tuple[str, int]]:
    if os.path.exists(name):
        paths = [name]
    elif glob.has_magic(name):
        paths = glob.glob(name, recursive=True)
        if not paths:
            raise UserError(f"no file matches {name}{files.seen_from(name)}")
    else:
        raise UserError(f"no such file or folder: {name}{files.seen_from(name)}")
    below = [file for path in paths for file in (_below(path) if os.path.isdir(path) else [path])]
    if not below:
        raise UserError(f"{name}: no file in this folder; allowed: {allowed()}")
    for path in below:
        try:
            status = os.stat(path)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path} is neither a file nor a folder: move it away")
        yield os.path.abspath(path), status.st_size


def _below(folder: str) -> Iterator[str]:
    for root, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(root, name) for name in names if not name.startswith("."))


def _refuse(error: OSError) -> None:
    raise UserError(f"{error.filename} cannot be read: {error.strerror}") from error


def _objects(name: str) -> list[tuple[str, int]]:
    """The objects that match the pattern. For a name without a pattern: the object of this name, else the objects in
    the folder of this name, else the objects whose names begin with it."""
    bucket = name.removeprefix("gs://").partition("/")[0]
    if not bucket or glob.has_magic(bucket):
        raise UserError(f"{name}: expected gs://BUCKET/NAME")
    pattern = re.search(r"[*?[]", name)
    objects = files.objects(name[: pattern.start()] if pattern else name)
    named = [(path, size) for path, size in objects if not path.endswith("/") and not _hidden(path, name)]
    if pattern:
        chosen = [pair for pair in named if _matches(pair[0].split("/"), name.rstrip("/").split("/"))]
    else:
        folder = name.rstrip("/") + "/"
        exact = [pair for pair in named if pair[0] == name]
        chosen = exact or [pair for pair in named if pair[0].startswith(folder)] or named
    if not chosen:
        raise UserError(f"no object {'matches' if pattern else 'has a name that begins with'} {name}")
    return chosen


def _hidden(path: str, name: str) -> bool:
    """Whether a part of the path that the user did not write begins with a dot."""
    written = name.rstrip("/").split("/")
    return any(part.startswith(".") and part not in written for part in path.split("/"))


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a path, or a folder that it is in, matches a pattern, as `glob` matches local ones."""
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_matches(parts[i:], pattern[1:]) for i in range(len(parts)))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _hub_files(name: str) -> list[tuple[str, int]]:
    """The Parquet files of a data set, in its folder and of its split."""
    if not hub.is_dataset(name):
        raise UserError(f"{name[:200]!r} is no data set of the hub: expected {hub.DATASET_FORM}")
    _, folder, split = hub.parse_dataset(name)
    data_files = hub.dataset_files(name)
    below = {path: path.partition("@")[2].partition("/")[2] for path, _ in data_files}
    inside = [pair for pair in data_files if below[pair[0]].startswith(f"{folder}/" if folder else "")]
    tables = [pair for pair in inside if format_of(pair[0]) == "parquet"]
    if not tables:
        raise UserError(
            f"{name}: no .parquet file{f' in the folder {folder}' if folder else ''}. The hub keeps a converted copy "
            "of many data sets: give the revision @refs/convert/parquet, or download the files and give their folder"
        )
    by_split = {known: [pair for pair in tables if _is_of(below[pair[0]], known)] for known in {*_SPLITS, split or ""}}
    if split is not None:
        if not by_split[split]:
            known = [known for known in _SPLITS if by_split[known]]
            raise UserError(f"{name}: no .parquet file of the split {split}; its files show the splits {listed(known)}")
        return by_split[split]
    several = [known for known in _SPLITS if by_split[known]]
    if len(several) > 1:
        raise UserError(f"{name} has files of the splits {listed(several)}: choose one, such as {name}:{several[0]}")
    return tables


def _is_of(path: str, split: str) -> bool:
    """Whether a path has the name of a split as a word: data/train-00000-of-00004.parquet, en/train/0.parquet."""
    return re.search(rf"(?<![a-zA-Z0-9]){re.escape(split)}(?![a-zA-Z])", path) is not None if split else False
