"""Random weights for the benchmarks, in our format and in those of the peers."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from common import config_of


def make_checkpoint(arguments: argparse.Namespace, folder: Path) -> str:
    """Write random weights in the native format, and in the formats of the peers. Returns the native folder."""
    import jax

    from mesh_transformer.checkpoint.store import CheckpointStore
    from mesh_transformer.runtime.convert import to_hf
    from mesh_transformer.runtime.session.session import Session

    store = CheckpointStore(str(folder / "native"))
    placement = Session.open(config_of(arguments)).placement
    params = jax.jit(placement.model.init, out_shardings=placement.shardings)(jax.random.key(0))
    store.save(1, {"step": jax.numpy.asarray(1, np.int32), "params": params}, {})
    store.close()
    if arguments.peers != "none":
        to_hf(arguments.config, arguments.overrides, str(folder / "native"), str(folder / "hf"), dtype="fp32")
    if arguments.peers == "all":
        convert_to_ctranslate2(folder)
    return str(folder / "native")


def load_torch(folder: str) -> Any:
    """Load the Hugging Face folder with torch, on the GPU if there is one."""
    import torch
    from transformers import AutoModelForCausalLM

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    return AutoModelForCausalLM.from_pretrained(f"{folder}/hf", dtype=dtype).to(device).eval()


def random_torch(config: Any, dtype: Any, **options: Any) -> Any:
    """The model of a config in transformers with random weights of a torch dtype, on the GPU if there is one. `options`
    go into its config.json."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from mesh_transformer.checkpoint.hf.writer import config_json

    torch.manual_seed(0)
    keys = config_json(config.model, np.dtype(np.float32)) | options
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**keys), dtype=dtype)


def convert_to_ctranslate2(folder: Path) -> None:
    """Convert the Hugging Face folder to CTranslate2's format, with a vocabulary of words, which CTranslate2 needs."""
    from ctranslate2.converters import TransformersConverter
    from transformers import AutoConfig, GPTNeoXConfig, GPTNeoXForCausalLM

    # CTranslate2 4.8 reads GPT-NeoX by the names of transformers 4
    old_names = {
        (GPTNeoXConfig, "rotary_pct"): lambda config: config.rope_parameters["partial_rotary_factor"],
        (GPTNeoXForCausalLM, "embed_out"): lambda model: model.lm_head,
    }
    for (kind, name), value in old_names.items():
        if not hasattr(kind, name):
            setattr(kind, name, property(value))
    save_words(folder / "hf", AutoConfig.from_pretrained(folder / "hf").vocab_size)
    TransformersConverter(str(folder / "hf")).convert(str(folder / "ct2"), force=True)


def save_words(folder: Path, n_vocab: int) -> None:
    """Write a tokenizer with one artificial word for each token of a model."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(n_vocab)}, unk_token="t0"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", bos_token="t0", eos_token="t0")
    fast.save_pretrained(folder)
