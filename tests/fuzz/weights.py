"""Safetensors files, one and several with their index, and the config.json beside them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from support import hf_folders as hf
from support.mutations import mutated_bytes, mutated_json

from fuzz.harness import Attempt
from mesh_transformer.checkpoint.hf.source import SAFETENSORS, HFSource
from mesh_transformer.checkpoint.hf.writer import write_hf

MODEL = hf.model_config(layers=2, d_model=12, n_vocab=7, vocab_multiple=8, seq=8, pe_rotary_dims=4)
INDEX = f"{SAFETENSORS}.index.json"
SHARD_BYTES = 5000


@contextmanager
def fuzzer(folder: Path) -> Iterator[Attempt]:
    """Opens a folder and reads every tensor. One file is mutated: a header, an index, or any bytes."""
    source = hf.MemorySource(hf.random_params(MODEL))
    for name, options in {"whole": {}, "sharded": {"shard_bytes": SHARD_BYTES}}.items():
        write_hf(source, MODEL, str(folder / name), **options)
        hf.read_all(HFSource(str(folder / name), MODEL))
    contents = {path: path.read_bytes() for path in sorted(folder.glob("*/*")) if path.name != "generation_config.json"}

    def attempt(random: Random) -> str:
        path = random.choice(list(contents))
        path.write_bytes(_mutated(random, path, contents[path]))
        try:
            # a command that converts a model takes any; one that resumes a run knows it
            hf.read_all(HFSource(str(path.parent), random.choice([None, MODEL])))
        finally:
            path.write_bytes(contents[path])
        return "read"

    yield attempt


def _mutated(random: Random, path: Path, content: bytes) -> bytes:
    if random.random() < 0.3:
        return mutated_bytes(random, content)
    if path.suffix == ".json":
        return mutated_json(random, json.loads(content))
    length = int.from_bytes(content[:8], "little")
    header = mutated_json(random, json.loads(content[8 : 8 + length]))
    return len(header).to_bytes(8, "little") + header + content[8 + length :]
