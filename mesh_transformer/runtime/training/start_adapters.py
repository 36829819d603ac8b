"""A run whose adapters begin as other adapters (--adapter): a folder of PEFT, or a run with the group `lora`."""

import json
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

from mesh_transformer.checkpoint.load import fail_together
from mesh_transformer.checkpoint.lora_record import LoraRecord
from mesh_transformer.checkpoint.open import Checkpoint
from mesh_transformer.checkpoint.tensors import Index, TensorInfo, TensorSource
from mesh_transformer.config import ModelConfig
from mesh_transformer.errors import UserError, listed, set_options
from mesh_transformer.logs import log
from mesh_transformer.parallel.sharding import Params
from mesh_transformer.runtime.session.weights import load_user_checkpoint
from mesh_transformer.spec import Adapter
from mesh_transformer.spec.forms import name_of
from mesh_transformer.spec.lora import LORA_A, LORA_B


def settings_of(path: str, model: ModelConfig) -> list[str]:
    """The group lora of the adapters at `path`, as after --set: their largest rank, and their matrices.

    Raises:
        UserError: they cannot be read, or are of another model, or adapt what a run does not.
    """
    _, record = _open(path, model)
    rank, scales = max(adapter.rank for adapter in record.adapters), {adapter.scale for adapter in record.adapters}
    # of several, each is a part of its b
    scale = scales.pop() if len(scales) == 1 and min(scales) > 0 else 1.0
    targets = json.dumps(_targets(record.adapters))
    return [f"lora.rank={rank}", f"lora.alpha={json.dumps(scale * rank)}", f"lora.targets={targets}"]


def _targets(adapters: Sequence[Adapter]) -> list[str]:
    return list(dict.fromkeys(adapter.path.removesuffix("/w") for adapter in adapters))


def begin_as(params: Params, path: str, model: ModelConfig, adapters: Sequence[Adapter]) -> Params:
    """The adapters of a run, those at `path` in place of new ones where it has them.

    Args:
        params: new adapters.
        adapters: of the run. Where a rank is larger than at `path`, the rest of a and b is zero and stays so.

    Raises:
        UserError: the adapters at `path` cannot be read, or are of matrices that have none in the run, or their rank is
            larger.
    """
    source, record = fail_together(lambda: _open(path, model))
    given = fail_together(lambda: _Resized(source, record, model, {adapter.path: adapter for adapter in adapters}))
    named = {
        module: {name: leaf for name, leaf in leaves.items() if f"params/blocks/{module}/{name}" in given.tensors}
        for module, leaves in params["blocks"].items()
    }
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), named)
    loaded = load_user_checkpoint(given, {"params": {"blocks": abstract}})["params"]["blocks"]
    log.info("the adapters of %d of %d matrices begin as those of %s", len(record.adapters), len(adapters), path)
    blocks = {module: {**leaves, **loaded[module]} for module, leaves in params["blocks"].items()}
    return {**params, "blocks": blocks}


def _open(path: str, model: ModelConfig) -> tuple[TensorSource, LoraRecord]:
    source, record = Checkpoint.open(path).adapters(model)
    others = [adapter.path for adapter in record.adapters if _role(adapter.path, model) == "other"]
    if others:
        raise UserError(
            f"{path} adapts {listed(others)}, which no run trains: write the whole model with to-hf --merge, and give "
            "that with --tune-model-path"
        )
    return source, record


def _role(path: str, model: ModelConfig) -> str:
    decoder = model.decoder()
    matrices = (decoder.matrices(kind) for kind in decoder.kinds)
    return next(arrays[path].role for arrays in matrices if path in arrays)


class _Resized:
    """Adapters in the ranks and with the scales of a run, as a `TensorSource`."""

    def __init__(self, source: TensorSource, record: LoraRecord, model: ModelConfig, run: Mapping[str, Adapter]):
        self._source, self.where, self.counts, self.extra = source, source.where, source.counts, source.extra
        # name -> its dimension of the rank, the rank in the run, and what multiplies it
        self._changes: dict[str, tuple[int, int, float]] = {}
        for adapter in record.adapters:
            ours, matrix = run.get(adapter.path), adapter.path.removesuffix("/w")
            if ours is None:
                every = json.dumps(_targets([*run.values(), *record.adapters]))
                raise UserError(
                    f"{source.where} adapts {matrix}, which lora.targets leaves out: add it "
                    f"({set_options(f'lora.targets={every}')})"
                )
            if (ours.a_of or ours.path) != (adapter.a_of or adapter.path):
                raise UserError(f"{source.where}: the adapter of {matrix} shares an a with other matrices than here")
            if adapter.rank > ours.rank:
                raise UserError(
                    f"{source.where} has rank {adapter.rank} at {matrix}, and lora.rank is {ours.rank}: set "
                    f"{set_options(f'lora.rank={adapter.rank}')} or more"
                )
            self._changes |= dict(_changes(adapter, ours, model))
        self.tensors = {
            name: TensorInfo(_resized(source.tensors[name].shape, at, rank), np.dtype(np.float32))
            for name, (at, rank, _) in self._changes.items()
        }

    def read(self, name: str, index: Index) -> np.ndarray:
        """See `TensorSource`."""
        at, rank, factor = self._changes[name]
        shape = self._source.tensors[name].shape
        values = self._source.read(name, tuple(slice(None) if n == at else s for n, s in enumerate(index)))
        padding = [(0, rank - shape[at] if n == at else 0) for n in range(len(shape))]
        padded = np.pad(values.astype(np.float32), padding) * np.float32(factor)
        return padded[tuple(index[at] if n == at else slice(None) for n in range(len(shape)))]


def _changes(adapter: Adapter, ours: Adapter, model: ModelConfig) -> Iterator[tuple[str, tuple[int, int, float]]]:
    decoder = model.decoder()
    dims = next(
        decoder.matrices(kind)[adapter.path].dims for kind in decoder.kinds if adapter.path in decoder.matrices(kind)
    )
    for stack, _ in decoder.stacks[adapter.path]:
        # after the layers; of a, the rank is last
        if (adapter.a_of or adapter.path) == adapter.path:
            yield f"params/blocks/{name_of(stack, LORA_A)}", (1 + len(dims.replace("o", "")), ours.rank, 1.0)
        factor = adapter.scale / ours.scale
        yield f"params/blocks/{name_of(stack, LORA_B)}", (1 + dims.index("i"), ours.rank, factor)


def _resized(shape: Sequence[int], at: int, size: int) -> tuple[int, ...]:
    return (*shape[:at], size, *shape[at + 1 :])
