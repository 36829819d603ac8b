"""`load` and `fit`, which import what they need when they are called."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mesh_transformer import environment
from mesh_transformer.errors import out_of_memory

if TYPE_CHECKING:
    from mesh_transformer.runtime.api.model import Model
    from mesh_transformer.runtime.api.training import Run


def load(
    checkpoint: str | os.PathLike[str],
    *,
    mesh: Mapping[str, int] | None = None,
    dtype: str = "auto",
    context: int | None = None,
    slots: int = 4,
    base: str | os.PathLike[str] | None = None,
    adapter: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
) -> Model:
    """Load a model onto the devices of this process.

    Args:
        checkpoint: what `--ckpt` of the commands takes: the folder of a run or of a step, a Hugging Face folder, a GGUF
            file, a name on the hub such as `hf://ORG/NAME`; local or gs://.
        mesh: devices by axis, such as {"tp": 2}. The axis that is left, dp, takes the other devices.
        dtype: of weights and computation: "float32", "bfloat16", or "auto": float32 on a CPU, else bfloat16.
        context: the largest number of tokens of a prompt and its completion, which the cache may round up
            (`Model.context`). None: the model's context, at most 4,096.
        slots: sequences that are computed at a time.
        base: where the base of a run with adapters is now. None: where the run read it.
        adapter: the model gets these adapters: a folder of PEFT, or a run with the group lora.
        overrides: texts as after `--set`, such as "data.tokenizer=FOLDER".

    Raises:
        mesh_transformer.errors.UserError: an argument, the checkpoint, its tokenizer or the devices cannot be used, or
            the model does not fit the memory.
    """
    environment.check_python()
    from mesh_transformer.runtime.api.opening import load_model

    with _explained():
        return load_model(
            os.fspath(checkpoint),
            mesh=mesh,
            dtype=dtype,
            context=context,
            slots=slots,
            base=None if base is None else os.fspath(base),
            adapter=None if adapter is None else os.fspath(adapter),
            overrides=overrides,
        )


def fit(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    tune_from: str | os.PathLike[str] | None = None,
    fresh_opt: bool = False,
    **groups: Mapping[str, Any],
) -> Run:
    """Train a model as `mesh-transformer train` does. A run whose folder holds a checkpoint resumes from it.

    Ctrl-C saves after the current step and returns.

    Args:
        config: a file, the name of a config that comes with the project, or the values of one.
        tune_from: start at step 0 from the weights of this checkpoint, of any format.
        fresh_opt: with `tune_from`: start with fresh optimizer state.
        groups: values of the config, by group: `optimizer={"total_steps": 20}`.

    Raises:
        mesh_transformer.errors.UserError: the config, the devices, the data or a checkpoint cannot be used.
        mesh_transformer.errors.RunError: the loss or a gradient is not finite, or the disk is full.
    """
    environment.check_python()
    from mesh_transformer.runtime.api.training import fit_config

    values = config if isinstance(config, Mapping) else os.fspath(config)
    with _explained():
        return fit_config(values, None if tune_from is None else os.fspath(tune_from), fresh_opt, groups)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """An allocation that fails is a RunError, as in the commands."""
    try:
        yield
    except Exception as error:
        if failure := out_of_memory(error):
            raise failure from error
        raise
