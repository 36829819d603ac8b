"""Reads a checkpoint of the original program, in any number of shards, as whole tensors. See folder.py."""

import posixpath
import re
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from mesh_transformer import files
from mesh_transformer.checkpoint.classic import folder as layout
from mesh_transformer.checkpoint.classic.folder import Leaf
from mesh_transformer.checkpoint.classic.npz import Member, NpzReader
from mesh_transformer.checkpoint.tensors import Index, TensorInfo, UpdateCounts, parameter_shapes
from mesh_transformer.config import ModelConfig
from mesh_transformer.errors import UserError, plural
from mesh_transformer.logs import log
from mesh_transformer.spec import Split

OPEN_AT_ONCE = 16
DIFFERS = "differs between shards, unlike in the original program's files: the sum or mean over the shards is read"
UNUSED = "has values in unused shards, unlike in the original program's files: these values are dropped"


class StepContents(NamedTuple):
    """The number of shards in a step folder, and whether it is full."""

    shards: int
    # with Adam's moments
    full: bool


class ClassicSource:
    """A step folder, full or slim, as a `TensorSource`."""

    def __init__(self, folder: str, config: ModelConfig, *, recorded: dict[str, Any] | None = None) -> None:
        """Open a step folder and compare the header of every array with the config. Reads no values but the counts.

        Args:
            recorded: the content of the folder's model.json, if it has been read.

        Raises:
            UserError: the checkpoint is of another model or is incomplete; the message names the file, the array, the
                expected and the found value.
        """
        self.where = folder.rstrip("/")
        self.contents = inspect(self.where)
        shards = self.contents.shards
        try:
            layout.check_shards(config, shards, self.where)
        except UserError as error:
            raise UserError(f"{error}. If the checkpoint has a shard_{shards}, the copy is incomplete") from error
        self._shapes = parameter_shapes(config)
        self._reader = NpzReader()
        self._members = self._open(config)
        self._leaves: dict[str, list[Leaf]] = defaultdict(list)
        for leaf in self._members:
            if leaf.tensor is not None:
                self._leaves[leaf.tensor].append(leaf)
        for parts in self._leaves.values():
            # in the files layer_10 comes before layer_2
            parts.sort(key=lambda leaf: leaf.layer or 0)
        self.tensors = {name: self._info(name, parts) for name, parts in self._leaves.items()}
        self.counts = self._counts()
        self.extra = self._extra(layout.read_config(self.where) if recorded is None else recorded)
        self._warned: set[str] = set()

    def read(self, name: str, index: Index) -> np.ndarray:
        """A slice of a tensor, in its stored dtype. Padding of the vocabulary is zero.

        Raises:
            DamagedCheckpoint: the bytes are missing or damaged.
        """
        info, parts = self.tensors[name], self._leaves[name]
        ranges = [range(*part.indices(size)) for part, size in zip(index, info.shape, strict=True)]
        out = np.zeros([len(part) for part in ranges], info.dtype)
        if parts[0].layer is None:
            self._read_leaf(parts[0], ranges, out)
        else:
            for number, layer in enumerate(ranges[0]):
                self._read_leaf(parts[layer], ranges[1:], out[number : number + 1].reshape(out.shape[1:]))
        return out

    def _read_leaf(self, leaf: Leaf, ranges: list[range], out: np.ndarray) -> None:
        members = self._members[leaf]
        index = tuple(slice(part.start, part.stop) for part in ranges)
        if leaf.split in (Split.ROWS, Split.COLUMNS):
            self._concatenate(members, leaf.axis, ranges, out)
        elif leaf.split is Split.FIRST:
            self._reader.read(members[0], index, out)
            self._compare_unused(leaf)
        else:
            out[...] = self._combined(leaf)[index]

    def _concatenate(self, members: list[Member], axis: int, ranges: list[range], out: np.ndarray) -> None:
        """Copy the slice `ranges` of the arrays, concatenated along `axis`, into `out`."""
        width, requested = members[0].shape[axis], ranges[axis]
        for shard, member in enumerate(members):
            first, stop = max(requested.start, shard * width), min(requested.stop, (shard + 1) * width)
            if first >= stop:
                continue
            source: list[slice] = [slice(r.start, r.stop) for r in ranges]
            source[axis] = slice(first - shard * width, stop - shard * width)
            target = [slice(None)] * len(ranges)
            target[axis] = slice(first - requested.start, stop - requested.start)
            self._reader.read(member, tuple(source), out[tuple(target)])

    def _combined(self, leaf: Leaf) -> np.ndarray:
        """A whole replicated or summed array. Equal parts are multiplied, not added one by one, to round only once."""
        values = np.stack([self._all(member) for member in self._members[leaf]])
        whole = values.astype(np.float64)
        agree = all(value.tobytes() == values[0].tobytes() for value in values)
        if not agree:
            self._warn(leaf, DIFFERS)
        if leaf.split is Split.SUM:
            total = whole[0] * len(whole) if agree else whole.sum(0)
            return np.asarray(total, values.dtype)
        return values[0] if agree else np.asarray(whole.mean(0), values.dtype)

    def _compare_unused(self, leaf: Leaf) -> None:
        """Warn when an unused array is not as the original program leaves it. Its values are dropped."""
        if UNUSED in self._warned:
            return
        for member in self._members[leaf][1:]:
            if (self._all(member) != leaf.unused).any():
                self._warn(leaf, UNUSED)
                return

    def _warn(self, leaf: Leaf, what: str) -> None:
        """Log each warning once, with the first array that it applies to."""
        if what not in self._warned:
            self._warned.add(what)
            log.warning("%s: %s %s", self.where, leaf.name, what)

    def _all(self, member: Member) -> np.ndarray:
        out = np.empty(member.shape, member.dtype)
        self._reader.read(member, tuple(slice(None) for _ in member.shape), out)
        return out

    def _open(self, config: ModelConfig) -> dict[Leaf, list[Member]]:
        """The arrays of each leaf, one per shard, checked against the config."""
        order = layout.leaves(config, full=self.contents.full)
        expected_files = [
            (layout.shard_file(self.where, shard, number), expected)
            for shard in range(self.contents.shards)
            for number, expected in enumerate(layout.group_by_file(order))
        ]
        with ThreadPoolExecutor(OPEN_AT_ONCE) as pool:
            found = list(pool.map(lambda file: self._reader.open(file[0]), expected_files))
        total = sum(len(arrays) for arrays in found[: len(layout.group_by_file(order))])
        if total != len(order):
            raise UserError(f"{self.where}/shard_0: {layout.explain_count(config, total)}")
        members: dict[Leaf, list[Member]] = defaultdict(list)
        for (path, expected), arrays in zip(expected_files, found, strict=True):
            if set(arrays) != {f"arr_{i}" for i in range(len(expected))}:
                names = ", ".join(sorted(arrays))[:200]
                raise UserError(f"{path}: expected arr_0 to arr_{len(expected) - 1}, found {names}")
            for i, leaf in enumerate(expected):
                members[leaf].append(self._checked(arrays[f"arr_{i}"], leaf))
        return members

    def _checked(self, member: Member, leaf: Leaf) -> Member:
        shape = leaf.shard_shape(self.contents.shards)
        counts = leaf.split is Split.COUNT
        if member.shape != shape or (member.dtype == np.int32) != counts:
            raise UserError(
                f"{member} ({leaf.name}): expected {shape} of {'int32' if counts else 'floats'}, "
                f"found {member.shape} {member.dtype}: set model.d_model, n_heads, n_vocab, seq, pe and norm as in "
                f"the training run ({self.where} has {self.contents.shards} shards)"
            )
        return member

    def _info(self, name: str, parts: list[Leaf]) -> TensorInfo:
        first = self._members[parts[0]][0]
        for member in (member for leaf in parts for member in self._members[leaf]):
            if member.dtype != first.dtype:
                raise UserError(f"{member}: expected {first.dtype} as in {first}, found {member.dtype}")
        return TensorInfo(self._shapes[name.partition("/")[2]], first.dtype)

    def _counts(self) -> UpdateCounts:
        counts: dict[str, int] = {}
        for leaf, members in self._members.items():
            if leaf.split is not Split.COUNT:
                continue
            values = [int(self._all(member)) for member in members]
            if len(set(values)) > 1 or values[0] < 0:
                raise UserError(
                    f"{members[0]} ({leaf.name}): expected the same count of 0 or more in all shards, found {values}"
                )
            counts[leaf.name] = values[0]
        return UpdateCounts(counts[layout.STEP], counts.get(layout.ADAM_COUNT), counts.get(layout.SCHEDULE_COUNT))

    def _extra(self, config: dict[str, Any] | None) -> dict[str, Any]:
        """{"aux": ...}: the step's entry in meta.json (the loader's position); {"config": ...}: the recorded model."""
        root, name = posixpath.split(self.where)
        match = re.fullmatch(r"step_(\d+)", name)
        meta = layout.read_meta(root) if match else None
        extra: dict[str, Any] = {} if config is None else {"config": config}
        if match and meta and match[1] in meta.aux:
            extra["aux"] = meta.aux[match[1]]
        return extra


def inspect(folder: str) -> StepContents:
    """The contents of a step folder. The first array of a full checkpoint is a scalar, Adam's count.

    Raises:
        UserError: shards or files are missing.
    """
    names = files.list_dir(folder)
    numbers = sorted(int(match[1]) for name in names if (match := re.fullmatch(r"shard_(\d{1,5})", name)))
    if not numbers:
        raise UserError(f"{folder}: expected the folders shard_0, shard_1, ..., found {names[:5] or 'nothing'}")
    missing = sorted(set(range(numbers[-1] + 1)) - set(numbers))
    if missing:
        raise UserError(f"{folder}: shard_{missing[0]} is missing, found {plural(len(numbers), 'shard')}")
    for number in numbers:
        existing = set(files.list_dir(files.join(folder, f"shard_{number}")))
        absent = [f"{i}.npz" for i in range(layout.FILES_PER_SHARD) if f"{i}.npz" not in existing]
        if absent:
            raise UserError(f"{folder}/shard_{number}: {', '.join(absent)} missing: the copy may be incomplete")
    first = NpzReader().open(layout.shard_file(folder, 0, 0)).get("arr_0")
    full = first is not None and first.shape == () and first.dtype == np.int32
    return StepContents(len(numbers), full)
