"""The adapters of a model in a folder of PEFT, as a `TensorSource`. Shapes: see table.py; E experts."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from mesh_transformer.checkpoint.lora_record import LoraRecord
from mesh_transformer.checkpoint.peft.config import AdapterConfig
from mesh_transformer.checkpoint.peft.pairs import Pair
from mesh_transformer.checkpoint.peft.table import ROUTER, Group, Member, b_of, groups_of, sides
from mesh_transformer.checkpoint.tensors import FileTensor, Index, TensorInfo, UpdateCounts
from mesh_transformer.config import ModelConfig
from mesh_transformer.errors import UserError
from mesh_transformer.families.experts import WithExperts
from mesh_transformer.spec import Adapter, Lora
from mesh_transformer.spec.forms import name_of
from mesh_transformer.spec.lora import LORA_A, LORA_B

_OF_LAYER = "model.layers."


class _Factors(NamedTuple):
    """The adapters of the matrices of a group in a layer.

    Args:
        scales: of its pairs.
        a: its (D, R), or (E, D, R).
        b: its b of a matrix, in the shape of the parameter, times its scale and over another one.
    """

    rank: int
    scales: frozenset[float]
    a: Callable[[], np.ndarray]
    b: Callable[[Member, float], np.ndarray]


class _Stack(NamedTuple):
    """Where a stack of a's, or of the b's of a matrix, comes from: of each layer in it, the adapters."""

    layers: list[_Factors | None]
    b_of: Member | None
    scale: float


class PeftSource:
    """The adapters in a folder, padded with zeros to the largest rank of a matrix in any layer. A layer without a pair
    has zeros. The two a's of an expert with one for each input matrix stand side by side, and their b's are zero for
    the other one's.

    Args:
        folder: for messages.
        pairs: of the folder.
        model: of the base.

    Raises:
        UserError: a pair is of another model.
    """

    def __init__(self, folder: str, pairs: Mapping[str, Pair], config: AdapterConfig, model: ModelConfig):
        self.where, self.counts = folder, UpdateCounts(0)
        self.extra: dict[str, Any] = {}
        self._config, self._model = config, model
        if model.HF_MODEL_TYPE is None:
            raise UserError(f"{folder} is of PEFT, and transformers has no models of family {model.family}")
        self._pairs = _by_stored_name(pairs, model)
        self._unused = set(self._pairs)
        stacks = model.decoder().stacks
        groups: list[tuple[Group, dict[int, _Factors | None]]] = []
        for group in groups_of(model):
            layers_of_group = [layer for _, layers in stacks[group.members[0].path] for layer in layers]
            groups.append((group, {layer: self._of_layer(group, layer) for layer in layers_of_group}))
        self._refuse_unused()
        adapters = []
        self._stacks: dict[str, _Stack] = {}
        for group, by_layer in groups:
            given = [factors for factors in by_layer.values() if factors is not None]
            if not given:
                continue
            rank, scales = max(factors.rank for factors in given), {s for factors in given for s in factors.scales}
            # of several, each is a part of its b
            scale = scales.pop() if len(scales) == 1 else 1.0
            for member in group.members:
                adapters.append(Adapter(path=member.path, rank=rank, scale=scale, a_of=group.owner))
                for stack, layers in stacks[member.path]:
                    of_layers = [by_layer[layer] for layer in layers]
                    if member.path == group.owner:
                        self._stacks[f"params/blocks/{name_of(stack, LORA_A)}"] = _Stack(of_layers, None, scale)
                    self._stacks[f"params/blocks/{name_of(stack, LORA_B)}"] = _Stack(of_layers, member, scale)
        self.record = LoraRecord(config.base or "", None, tuple(adapters))
        arrays = replace(model.decoder(), forms=(Lora(adapters=self.record.adapters),)).arrays()
        adapters_size = sum(array.size for array in arrays.values() if array.adapter)
        if adapters_size > sum(array.size for array in arrays.values()) - adapters_size:
            # of a file with one pair of a large rank
            raise UserError(
                f"{folder} has adapters of {adapters_size} numbers, more than the model: merge it with PEFT"
            )
        float32 = np.dtype(np.float32)
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(arrays[name.removeprefix("params/")].shape, float32) for name in self._stacks
        }

    def read(self, name: str, index: Index) -> np.ndarray:
        """See `TensorSource`."""
        stack, shape = self._stacks[name], self.tensors[name].shape
        layers = range(*index[0].indices(shape[0]))
        values = np.zeros((len(layers), *shape[1:]), np.float32)
        for row, layer in zip(values, layers, strict=True):
            factors = stack.layers[layer]
            if factors is None:
                continue
            if stack.b_of is None:
                row[..., : factors.rank] = factors.a()
            else:
                at = stack.b_of.array.dims.index("i")
                row[(*(slice(None),) * at, slice(factors.rank))] = factors.b(stack.b_of, stack.scale)
        return values[(slice(None), *index[1:])]

    def _of_layer(self, group: Group, layer: int) -> _Factors | None:
        if group.of_experts:
            return self._of_all_experts(group, layer) or self._of_each_expert(group, layer)
        pair = self._take(group.module(layer))
        if pair is None:
            return None
        pair.check(*sides(group.members[0], self._model))
        router = group.members[0].path == ROUTER
        scale = self._config.scale(self._config.of_parameter(pair.module) if router else pair.module, pair.rank)

        def b(member: Member, over: float) -> np.ndarray:
            return b_of(member, _scaled(_read(pair.b), scale, over), self._model)

        return _Factors(pair.rank, frozenset((scale,)), lambda: _read(pair.a).T, b)

    def _of_all_experts(self, group: Group, layer: int) -> _Factors | None:
        """From one pair of all experts of a layer (PEFT 0.21): the expert is the slow index of a, the fast one of b."""
        experts, (inputs, outputs) = group.experts, sides(group.members[0], self._model)
        container, _, _ = group.module(layer).partition(".experts.")
        for module in (f"{container}.experts", f"{container}.experts.base_layer"):
            pair = self._pairs.get(module)
            # the shapes say which of the two parameters it is of
            if pair is None or (pair.a.shape[1], pair.b.shape[0]) != (inputs, outputs * len(group.members)):
                continue
            self._take(module)
            pair.check(inputs, outputs * len(group.members), experts)
            return self._from_all(pair, group, experts, outputs)
        return None

    def _from_all(self, pair: Pair, group: Group, experts: int, outputs: int) -> _Factors:
        rank = pair.a.shape[0] // experts
        named = f"{pair.module.removesuffix('.base_layer')}.{group.parameter}"
        scale = self._config.scale(named, rank)

        def a() -> np.ndarray:
            return _read(pair.a).reshape(experts, rank, -1).transpose(0, 2, 1)

        def b(member: Member, over: float) -> np.ndarray:
            at = group.members.index(member) * outputs
            b_FRE = _read(pair.b).reshape(-1, rank, experts)[at : at + outputs]
            return _scaled(b_FRE, scale, over).transpose(2, 1, 0)

        return _Factors(rank, frozenset((scale,)), a, b)

    def _of_each_expert(self, group: Group, layer: int) -> _Factors | None:
        """From one pair for each matrix of each expert (transformers 4)."""
        experts, (inputs, outputs) = group.experts, sides(group.members[0], self._model)
        # by number of the matrix in the group, and expert
        pairs: dict[tuple[int, int], Pair] = {}
        for at, member in enumerate(group.members):
            for expert in range(experts):
                pair = self._take(member.row.foreign.format(layer, e=expert).removesuffix(".weight"))
                if pair is not None:
                    pair.check(inputs, outputs)
                    pairs[at, expert] = pair
        if not pairs:
            return None
        scales = {place: self._config.scale(pair.module, pair.rank) for place, pair in pairs.items()}
        ranks = [max((p.rank for (at, _), p in pairs.items() if at == n), default=0) for n in range(len(group.members))]
        rank, first = sum(ranks), [sum(ranks[:at]) for at in range(len(ranks))]

        def a() -> np.ndarray:
            a_EDR = np.zeros((experts, inputs, rank), np.float32)
            for (at, expert), pair in pairs.items():
                a_EDR[expert, :, first[at] : first[at] + pair.rank] = _read(pair.a).T
            return a_EDR

        def b(member: Member, over: float) -> np.ndarray:
            b_ERF, at = np.zeros((experts, rank, outputs), np.float32), group.members.index(member)
            for (of, expert), pair in pairs.items():
                if of == at:
                    b = _scaled(_read(pair.b), scales[of, expert], over)
                    b_ERF[expert, first[at] : first[at] + pair.rank] = b.T
            return b_ERF

        return _Factors(rank, frozenset(scales.values()), a, b)

    def _take(self, module: str) -> Pair | None:
        self._unused.discard(module)
        return self._pairs.get(module)

    def _refuse_unused(self) -> None:
        if not self._unused:
            return
        pair = self._pairs[min(self._unused)]
        shapes = f"{pair.a.shape} and {pair.b.shape}"
        raise UserError(
            f"{pair.a.path}: {pair.module:.200} with {shapes} is no matrix of the layers of this "
            f"{self._model.HF_ARCHITECTURE} with {self._model.layers} layers: the adapter is of another model"
        )


def _by_stored_name(pairs: Mapping[str, Pair], model: ModelConfig) -> dict[str, Pair]:
    """The pairs by the names of the released files, where transformers 5 calls the module of the experts otherwise."""
    if not isinstance(model, WithExperts):
        return dict(pairs)
    named: dict[str, Pair] = {}
    for module, pair in pairs.items():
        if named.setdefault(_stored_name(module, model.HF_MODULE), pair) is not pair:
            raise UserError(f"{pair.a.path}: {module:.200} is there under two names: keep one of them")
    return named


def _stored_name(module: str, of_experts: str) -> str:
    layer, dot, rest = module.removeprefix(_OF_LAYER).partition(".mlp.")
    return f"{_OF_LAYER}{layer}.{of_experts}.{rest}" if dot and module.startswith(_OF_LAYER) else module


def _scaled(b: np.ndarray, scale: float, over: float) -> np.ndarray:
    return b if scale == over else b * np.float32(scale / over)


def _read(tensor: FileTensor) -> np.ndarray:
    return tensor.read((slice(None), slice(None))).astype(np.float32)
