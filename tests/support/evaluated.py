"""Small models for the harness: our EvalModel, and the same weights in the harness's `hf` model."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from mesh_transformer.checkpoint.hf.writer import write_hf
from mesh_transformer.config import ModelConfig
from mesh_transformer.data.tokens.tokenizer import Tokenizer
from mesh_transformer.parallel.sharding import Params
from mesh_transformer.runtime.evaluation.model import EvalModel
from mesh_transformer.runtime.session.session import Session
from support import hf_folders as hf
from support.builders import program

# PIQA and LAMBADA both have longer texts
SEQ = 144
GPT2: dict[str, Any] = {
    "layers": 2, "d_model": 32, "n_heads": 8, "n_vocab": 50257, "seq": SEQ, "pe_rotary_dims": 4,
}  # fmt: skip


def gpt2_model(**values: Any) -> ModelConfig:
    """A small model with GPT-2's vocabulary."""
    return hf.model_config(**{**GPT2, **values})


def session_of(model: ModelConfig, *overrides: str, devices: int = 1) -> Session:
    """A session of a model on the first `devices` devices."""
    made = program({"model": model.model_dump()}, *overrides, devices=devices)
    return Session(made.config, made.config.check_devices(devices), made.placement)


def ours(
    model: ModelConfig,
    params: Params,
    tokenizer: Tokenizer,
    *overrides: str,
    devices: int = 1,
    **options: Any,
) -> EvalModel:
    """An EvalModel with these weights."""
    session = session_of(model, *overrides, devices=devices)
    made = EvalModel(session, tokenizer, **options)
    made.load(jax.device_put(params, session.whole_sequences.shardings))
    return made


def theirs(model: ModelConfig, params: Params, tokenizer_folder: Path, folder: Path, batch: int = 8) -> Any:
    """The harness's `hf` model with our export of these weights. Its `computed` counts the tokens that the model
    reads."""
    import torch
    from lm_eval.models.huggingface import HFLM
    from transformers import GPT2TokenizerFast, GPTJForCausalLM

    class Counting(HFLM):
        computed = 0

        def _model_call(self, inps: Any, **options: Any) -> Any:
            self.computed += inps.numel()
            return super()._model_call(inps, **options)

    write_hf(hf.MemorySource(params), model, str(folder))
    made = GPTJForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    tokenizer = GPT2TokenizerFast.from_pretrained(tokenizer_folder)
    return Counting(pretrained=made, tokenizer=tokenizer, batch_size=batch)


@dataclasses.dataclass
class HarnessRequest:
    """A request with the attribute that an LM reads."""

    args: tuple[Any, ...]


def harness_requests(*args: Sequence[Any]) -> list[HarnessRequest]:
    """Requests with these arguments."""
    return [HarnessRequest(tuple(one)) for one in args]
