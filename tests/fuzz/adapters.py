"""Adapters of a small Llama and of a Mixtral: folders of PEFT, config and tensors, and the manifest of a step."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from support import hf_folders as hf
from support import peft_folders
from support.mutations import manifest_of, mutated_bytes, mutated_json

from fuzz.harness import Attempt
from mesh_transformer import hub
from mesh_transformer.checkpoint.open import Checkpoint
from mesh_transformer.checkpoint.peft.pairs import ADAPTER_TENSORS


@contextmanager
def fuzzer(folder: Path) -> Iterator[Attempt]:
    """Opens adapters on their base, reads every tensor of the whole model, and asks for the base that they name. One
    file is mutated."""
    for name in peft_folders.MODELS:
        peft_folders.write(folder / name, name)
    contents = {path: path.read_bytes() for path in folder.glob("*/peft/*")}
    manifests = {path: path.read_bytes() for path in folder.glob("*/run/step_1/manifest/metadata")}

    def attempt(random: Random) -> str:
        path = random.choice([*contents, *manifests])
        adapters = path.parent if path in contents else path.parents[2]
        whole = contents.get(path) or manifests[path]
        path.write_bytes(_mutated(random, path, whole))
        try:
            checkpoint = Checkpoint.open(str(adapters), base=str(adapters.parent / "base"))
            if (model := checkpoint.model) is None:
                return "no model recorded"
            hf.read_all(checkpoint.source(model))
            _ = Checkpoint.open(str(adapters)).base
        finally:
            path.write_bytes(whole)
        return "read"

    yield attempt


def _mutated(random: Random, path: Path, content: bytes) -> bytes:
    if path.name not in (hub.ADAPTER_CONFIG, ADAPTER_TENSORS):
        body = json.loads(content)["body"]
        return mutated_bytes(random, content) if random.random() < 0.1 else manifest_of(mutated_json(random, body))
    if random.random() < 0.2:
        return mutated_bytes(random, content)
    if path.name == hub.ADAPTER_CONFIG:
        return mutated_json(random, json.loads(content))
    length = int.from_bytes(content[:8], "little")
    header = mutated_json(random, json.loads(content[8 : 8 + length]))
    return len(header).to_bytes(8, "little") + header + content[8 + length :]
