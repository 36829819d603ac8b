"""A run whose adapters begin as other adapters (--adapter): a folder of PEFT, or a run with the group `lora`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from mesh_transformer.checkpoint.adapters import BaseSource, warn_of_other_base
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


def _open(path: str, model: ModelConfig) -> tuple[TensorSource, LoraRecord]:
    source, record = Checkpoint.open(path).adapters(model)
    matrices = model.decoder().matrices_by_path
    others = [adapter.path for adapter in record.adapters if matrices[adapter.path].role == "other"]
    if others:
        raise UserError(
            f"{path} adapts {listed(others)}, which no run trains: write the whole model with to-hf --merge, and give "
            "that with --tune-model-path"
        )
    return source, record


class OtherAdapters:
    """Adapters in the ranks and with the scales of a run, as a `TensorSource`. Open them with `open`.

    Args:
        source: of the adapters.
        record: what they are.
        run: the adapters of the run, by path.
    """

    def __init__(self, source: TensorSource, record: LoraRecord, model: ModelConfig, run: Mapping[str, Adapter]):
        self._source, self._record = source, record
        self.where, self.counts, self.extra = source.where, source.counts, source.extra
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

    @classmethod
    def open(cls, path: str, model: ModelConfig, run: Sequence[Adapter]) -> Self:
        """The adapters at `path`, for a run with the adapters `run`. All processes must call it.

        Raises:
            UserError: they cannot be read, or are of matrices that have none in the run, or their rank is larger; or
                processes have found different steps of a run that goes on.
        """
        by_path = {adapter.path: adapter for adapter in run}
        opened = fail_together(lambda: cls(*_open(path, model), model, by_path))
        steps = multihost_utils.process_allgather(np.int32(opened.counts.step))
        if len(set(np.ravel(steps).tolist())) > 1:
            raise UserError(f"{path} has new steps while this run starts: give one of its folders, {path}/step_N")
        return opened

    def begin(self, params: Params, base: BaseSource) -> Params:
        """The adapters of a run with these in place of new ones. Where a rank is larger, the rest of a is new, and the
        rest of b is zero, as of new adapters.

        Args:
            params: new adapters.
            base: of the run, whose hash is known.
        """
        warn_of_other_base(self.where, self._record, base)
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), params
        )
        named = {
            module: {name: leaf for name, leaf in leaves.items() if f"params/blocks/{module}/{name}" in self.tensors}
            for module, leaves in abstract["blocks"].items()
        }
        loaded = load_user_checkpoint(self, {"params": {"blocks": named}})["params"]["blocks"]
        blocks = {
            module: {
                name: self._with_new(f"params/blocks/{module}/{name}", loaded[module].get(name), leaf)
                for name, leaf in leaves.items()
            }
            for module, leaves in params["blocks"].items()
        }
        log.info("the adapters of %d matrices begin as those of %s", len(self._record.adapters), self.where)
        return {**params, "blocks": blocks}

    def _with_new(self, name: str, loaded: jax.Array | None, fresh: jax.Array) -> jax.Array:
        if loaded is None:
            return fresh
        rank = self._source.tensors[name].shape[-1]
        if not name.endswith(LORA_A) or rank == fresh.shape[-1]:
            return loaded
        merged = jax.jit(lambda a, b: jnp.where(jnp.arange(a.shape[-1]) < rank, a, b), out_shardings=fresh.sharding)
        return merged(loaded, fresh)

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
    dims = decoder.matrices_by_path[adapter.path].dims
    for stack, _ in decoder.stacks[adapter.path]:
        # after the layers; of a, the rank is last
        if (adapter.a_of or adapter.path) == adapter.path:
            yield f"params/blocks/{name_of(stack, LORA_A)}", (1 + len(dims.replace("o", "")), ours.rank, 1.0)
        factor = adapter.scale / ours.scale
        yield f"params/blocks/{name_of(stack, LORA_B)}", (1 + dims.index("i"), ours.rank, factor)


def _resized(shape: Sequence[int], at: int, size: int) -> tuple[int, ...]:
    return (*shape[:at], size, *shape[at + 1 :])
