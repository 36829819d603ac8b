"""config.json of every family."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from support.families import OF_TRANSFORMERS
from support.hf_models import VARIANTS
from support.mutations import mutated_json

from fuzz.harness import Attempt
from mesh_transformer.checkpoint.hf.config import parse_model, read_model
from mesh_transformer.checkpoint.hf.writer import config_json
from mesh_transformer.checkpoint.tensors import parameter_shapes
from mesh_transformer.families import FAMILIES


def documents() -> list[dict[str, Any]]:
    """For each variant of a model in the tests: its keys, and those that this program writes for it."""
    families = [FAMILIES[name] for name in OF_TRANSFORMERS]
    kinds = {family.HF_ARCHITECTURE.partition("For")[0]: family.HF_MODEL_TYPE for family in families}
    kinds["GPT2"] = "gpt2"
    given = [{"model_type": kinds[name], **keys} for name, keys in VARIANTS.values()]
    return [{**config_json(parse_model(keys, "config.json"), np.dtype(np.float32)), **keys} for keys in given]


@contextmanager
def fuzzer(folder: Path) -> Iterator[Attempt]:
    """Reads the config of a Hugging Face folder, and makes the model's specification and its table of tensors."""
    seeds = documents()
    path = folder / "config.json"
    for document in seeds:
        path.write_text(json.dumps(document))
        read_model(str(folder))

    def attempt(random: Random) -> str:
        path.write_bytes(mutated_json(random, random.choice(seeds), seeds))
        model = read_model(str(folder))
        model.decoder()
        model.hf_tensors()
        # traces the model, which takes a tenth of a second
        if random.random() < 0.02:
            parameter_shapes(model)
        return "read"

    yield attempt
