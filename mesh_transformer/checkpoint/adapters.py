"""The whole model of a base and adapters. A run with `lora` starts from a base, and its steps hold adapters alone.

Readers get the whole model: a matrix with an adapter is read as w + scale a b, in float32.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mesh_transformer.checkpoint.lora_record import KEY, LoraRecord
from mesh_transformer.checkpoint.native.manifest import array_checksum
from mesh_transformer.checkpoint.tensors import (
    CheckedSource,
    DamagedCheckpoint,
    Index,
    TensorInfo,
    TensorSource,
    UpdateCounts,
)
from mesh_transformer.config import ModelConfig
from mesh_transformer.logs import log
from mesh_transformer.spec import Adapter, Array, Decoder, Lora
from mesh_transformer.spec.forms import name_of
from mesh_transformer.spec.lora import LORA_A, LORA_B

_HASH = "hash of "
_PARAMS = "params/"
# of the JSON of a run, what is of the run alone
_OF_RUN = (KEY, "loader", "counters", "provenance", "validation_due")


class BaseSource(CheckedSource):
    """The parameters of a base. It computes the hash of what is read of it.

    The hash is over the names, shapes and values as float32 of the parameters, without rows of padding: a checkpoint
    and its conversion to another format without rounding have one hash. The hash of adapters on a base is over the
    base's hash and the adapters.

    Args:
        source: of any format.
        model: of this checkpoint.
    """

    def __init__(self, source: TensorSource, model: ModelConfig):
        self._source, self._n_vocab = source, model.n_vocab
        self._arrays = {f"{_PARAMS}{path}": array for path, array in model.decoder().arrays().items()}
        self.where = source.where
        self.tensors = {name: info for name, info in source.tensors.items() if name in self._arrays}
        self.hash: str | None = None
        """None until all parameters were read."""
        # the sums of `read`, and the elements that it has read of each parameter
        self._sums: dict[str, int] = {}
        self._elements: dict[str, int] = {}

    @property
    def counts(self) -> UpdateCounts:
        """See `TensorSource`."""
        return UpdateCounts(self._source.counts.step)

    @property
    def extra(self) -> dict[str, Any]:
        """See `TensorSource`."""
        return self._source.extra

    def read(self, name: str, index: Index) -> np.ndarray:
        """See `TensorSource`."""
        part = self._source.read(name, index)
        if not isinstance(self._source, AdaptedSource):
            label = f"{_HASH}{name}"
            self._sums[label] = self._sums.get(label, 0) + self._checksum(name, index, part)
            self._elements[name] = self._elements.get(name, 0) + part.size
        return part

    def finish_reads(self) -> None:
        """Compute the hash of what `read` has read, if that is all."""
        if isinstance(self._source, AdaptedSource):
            self._source.finish_reads()
            self.hash = self._source.hash
        elif self._elements == {name: array.size for name, array in self._arrays.items()}:
            self.hash = self._hash_of(self._sums)

    def labels(self, name: str) -> Sequence[str]:
        """See `CheckedSource`."""
        inner = self._source.labels(name) if isinstance(self._source, CheckedSource) else ()
        return inner if isinstance(self._source, AdaptedSource) else (*inner, f"{_HASH}{name}")

    def read_counted(self, name: str, index: Index, *, count: bool) -> tuple[np.ndarray, dict[str, int]]:
        """See `CheckedSource`."""
        if isinstance(self._source, CheckedSource):
            part, sums = self._source.read_counted(name, index, count=count)
        else:
            part, sums = self._source.read(name, index), {}
        if count and not isinstance(self._source, AdaptedSource):
            sums = {**sums, f"{_HASH}{name}": self._checksum(name, index, part)}
        return part, sums

    def verify(self, sums: Mapping[str, int]) -> None:
        """See `CheckedSource`."""
        if isinstance(self._source, AdaptedSource):
            self._source.verify(sums)
            self.hash = self._source.hash
            return
        hashed = {label: value for label, value in sums.items() if label.startswith(_HASH)}
        if isinstance(self._source, CheckedSource):
            self._source.verify({label: value for label, value in sums.items() if label not in hashed})
        if hashed.keys() == {f"{_HASH}{name}" for name in self._arrays}:
            self.hash = self._hash_of(hashed)

    def _checksum(self, name: str, index: Index, part: np.ndarray) -> int:
        axes, shape = self._arrays[name].axes, self._arrays[name].shape
        starts = [s.indices(n)[0] for s, n in zip(index, shape, strict=True)]
        if "vocab" in axes:
            at = axes.index("vocab")
            rows = max(0, self._n_vocab - starts[at])
            part = part[(*(slice(None),) * at, slice(rows))]
        return array_checksum(part.astype(np.float32, copy=False), starts)

    def _hash_of(self, sums: Mapping[str, int]) -> str:
        return _digest([[name, self._shape(name), sums[f"{_HASH}{name}"] % 2**32] for name in sorted(self._arrays)])

    def _shape(self, name: str) -> list[int]:
        array = self._arrays[name]
        return [self._n_vocab if axis == "vocab" else size for axis, size in zip(array.axes, array.shape, strict=True)]


class _Factors(NamedTuple):
    """The names of a and b of a stack of matrices, and what multiplies their product."""

    a: str
    b: str
    scale: float
    dims: str


class AdaptedSource(CheckedSource):
    """The whole model of a base and the adapters of a checkpoint.

    Args:
        adapters: a step of a run with `lora`, or a folder of PEFT.
        record: what it says of them.

    Raises:
        UserError: the adapters do not fit the model.
    """

    def __init__(self, base: BaseSource, adapters: TensorSource, record: LoraRecord, model: ModelConfig):
        self.base, self._adapters, self._record = base, adapters, record
        self.where = adapters.where
        self._factors = dict(_factors(model.decoder(), record.adapters, adapters))
        # the adapters that were read: small beside the base
        self._read: dict[str, np.ndarray] = {}
        float32 = np.dtype(np.float32)
        self.tensors = {
            name: TensorInfo(info.shape, float32) if name in self._factors else info
            for name, info in base.tensors.items()
        }

    @property
    def counts(self) -> UpdateCounts:
        """See `TensorSource`: the step of the run of the adapters, else of the base."""
        return UpdateCounts(self._adapters.counts.step or self.base.counts.step)

    @property
    def extra(self) -> dict[str, Any]:
        """See `TensorSource`: what the run of the adapters recorded of its model and data, else what the base did."""
        recorded = self._adapters.extra or self.base.extra
        extra = {name: value for name, value in recorded.items() if name not in _OF_RUN}
        config = extra.get("config")
        if isinstance(config, dict):
            extra["config"] = {group: values for group, values in config.items() if group != KEY}
        return extra

    @property
    def hash(self) -> str | None:
        """The hash of base and adapters; None until the base's is known."""
        if self.base.hash is None:
            return None
        adapters = [dataclasses.astuple(adapter) for adapter in self._record.adapters]
        sums = [[name, array_checksum(self._array(name), [0] * self._array(name).ndim)] for name in sorted(self._names)]
        return _digest([self.base.hash, adapters, sums])

    def read(self, name: str, index: Index) -> np.ndarray:
        """See `TensorSource`."""
        return self._adapted(name, index, self.base.read(name, index))

    def finish_reads(self) -> None:
        """After `read` of all parameters: warn if the base is not the base of the run."""
        self.base.finish_reads()
        self._warn_of_other_base()

    def labels(self, name: str) -> Sequence[str]:
        """See `CheckedSource`."""
        return self.base.labels(name)

    def read_counted(self, name: str, index: Index, *, count: bool) -> tuple[np.ndarray, dict[str, int]]:
        """See `CheckedSource`."""
        part, sums = self.base.read_counted(name, index, count=count)
        return self._adapted(name, index, part), sums

    def verify(self, sums: Mapping[str, int]) -> None:
        """See `CheckedSource`. A base that is not the base of the run is a warning."""
        self.base.verify(sums)
        self._warn_of_other_base()

    def _warn_of_other_base(self) -> None:
        warn_of_other_base(self.where, self._record, self.base)

    def _adapted(self, name: str, index: Index, part: np.ndarray) -> np.ndarray:
        factors = self._factors.get(name)
        if factors is None:
            return part
        # a stack has the layers first
        dims = f"l{factors.dims}"
        a = self._array(factors.a)[tuple(s for s, dim in zip(index, dims, strict=True) if dim != "o")]
        b = self._array(factors.b)[tuple(slice(None) if dim == "i" else s for s, dim in zip(index, dims, strict=True))]
        if factors.dims == "oio":
            # (L, R, r) for each head
            a = a[:, None]
        return part.astype(np.float32) + np.float32(factors.scale) * np.matmul(a, b)

    @property
    def _names(self) -> set[str]:
        return {name for factors in self._factors.values() for name in (factors.a, factors.b)}

    def _array(self, name: str) -> np.ndarray:
        if name not in self._read:
            shape = self._adapters.tensors[name].shape
            values = self._adapters.read(name, (slice(None),) * len(shape))
            self._read[name] = values.astype(np.float32, copy=False)
        return self._read[name]


def check_adapters(source: TensorSource, record: LoraRecord, model: ModelConfig) -> None:
    """Check that adapters are of a model.

    Raises:
        DamagedCheckpoint: they are not.
    """
    for _ in _factors(model.decoder(), record.adapters, source):
        pass


def warn_of_other_base(where: str, record: LoraRecord, base: BaseSource) -> None:
    """Warn of adapters at `where` that were trained on another base, if both hashes are known."""
    if None not in (base.hash, record.hash) and base.hash != record.hash:
        log.warning(
            "%s was trained on a base of hash %s, and %s has %s: it is another model, or the same one in other "
            "numbers, such as after a rounding",
            *(where, record.hash, base.where, base.hash),
        )


def _factors(decoder: Decoder, adapters: Sequence[Adapter], source: TensorSource) -> Iterator[tuple[str, _Factors]]:
    """By the name of the stack of a matrix.

    Raises:
        DamagedCheckpoint: the adapters are not of this model, or a tensor has another shape.
    """
    matrices = decoder.matrices_by_path
    with_a = {adapter.path for adapter in adapters if adapter.a_of in ("", adapter.path)}
    for adapter in adapters:
        owner = adapter.a_of or adapter.path
        if adapter.path not in matrices or owner not in with_a or not _share_inputs(decoder, matrices, adapter, owner):
            names = f"{adapter.path!r:.99}, with the a of {owner!r:.99}"
            raise DamagedCheckpoint(f"{source.where} has adapters of another model: one is of {names}")
    stored = dataclasses.replace(decoder, forms=(Lora(adapters=tuple(adapters)),)).arrays()
    expected = {f"{_PARAMS}{path}": array.shape for path, array in stored.items() if array.adapter}
    shapes = {name: info.shape for name, info in source.tensors.items() if name.startswith(_PARAMS)}
    for name in sorted(expected.keys() | shapes.keys()):
        if expected.get(name) != shapes.get(name):
            raise DamagedCheckpoint(
                f"{source.where} has adapters of another model: {name} is {shapes.get(name, 'absent')}, expected "
                f"{expected.get(name, 'none')}"
            )
    for adapter in adapters:
        stacks = zip(decoder.stacks[adapter.path], decoder.stacks[adapter.a_of or adapter.path], strict=True)
        for (matrix, _), (owner, _) in stacks:
            a, b = (f"{_PARAMS}blocks/{name_of(path, end)}" for path, end in ((owner, LORA_A), (matrix, LORA_B)))
            yield f"{_PARAMS}blocks/{matrix}", _Factors(a, b, adapter.scale, matrices[adapter.path].dims)


def _share_inputs(decoder: Decoder, matrices: Mapping[str, Array], adapter: Adapter, owner: str) -> bool:
    """Whether a matrix can have the a of another one: they are of the same layers, and have equally many inputs."""
    if owner == adapter.path:
        return True
    ours, theirs = matrices[adapter.path], matrices.get(owner)
    layers = ([rows for _, rows in decoder.stacks[path]] for path in (adapter.path, owner) if path in decoder.stacks)
    return (
        theirs is not None
        and ours.dims == theirs.dims
        and ours.shape[:-1] == theirs.shape[:-1]
        and len(set(map(str, layers))) == 1
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
