"""GGUF files of a small Llama with a tokenizer: bytes of the header, values of metadata, shapes of tensors."""

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
from support import gguf_files
from support.hf_folders import read_all
from support.mutations import mutated_bytes, mutated_json

from fuzz.harness import Attempt
from mesh_transformer.checkpoint.open import Checkpoint
from mesh_transformer.data.tokens.tokenizer import load_tokenizer
from mesh_transformer.gguf.header import read_header

MERGES = ["a b", "ab c", "Ġ a"]
PAIRS = ["<|end|>", "a", "b", "c", "Ġ", "ab", "abc", "Ġa"]
PIECES = ["▁", "a", "b", "c", "▁a", "ab", "abc"]


@contextmanager
def fuzzer(folder: Path) -> Iterator[Attempt]:
    """Opens a file, its model and its tokenizer, and reads every tensor."""
    path, models = folder / "model.gguf", []
    for vocabulary in (gguf_files.byte_pairs(PAIRS, MERGES, "llama-bpe", PAIRS[:1]), gguf_files.scored(PIECES)):
        metadata, tensors = gguf_files.llama(len(vocabulary["tokenizer.ggml.tokens"]), width=32)
        models.append(({key.format("llama"): value for key, value in metadata.items()} | vocabulary, tensors))

    def attempt(random: Random) -> str:
        metadata, tensors = random.choice(models)
        kind = random.choice(["bytes", "metadata", "shapes"])
        if kind == "metadata":
            mutated = json.loads(_object(mutated_json(random, metadata)))
            metadata = {key: value for key, value in mutated.items() if _can_be_written(value)}
        if kind == "shapes":
            name = random.choice(list(tensors))
            shape = [random.choice([1, 2, 31, 32, 33, 64]) for _ in range(random.choice([1, 2, 3]))]
            tensors = {**tensors, name: np.ones(shape, np.float32)}
        quantised = {"blk_0_attn_q_weight": gguf.GGMLQuantizationType.Q8_0} if kind != "shapes" else {}
        try:
            gguf_files.write(path, "llama", metadata, tensors, **quantised)
        # a value that GGUF cannot hold
        except (OverflowError, UnicodeEncodeError, ValueError, struct.error):
            return "not written"
        if kind == "bytes":
            content, end = path.read_bytes(), min(tensor.start for tensor in read_header(str(path)).tensors.values())
            path.write_bytes(mutated_bytes(random, content[:end]) + content[end:])
        checkpoint = Checkpoint.open(str(path))
        model = checkpoint.model
        assert model is not None
        source = checkpoint.source(model)
        # a file may name a model of any size with tensors of one row
        if sum(np.prod(info.shape, dtype=float) for info in source.tensors.values()) < 1e7:
            read_all(source)
        checkpoint.origin(source)
        tokenizer = load_tokenizer(str(path))
        tokenizer.decode(tokenizer.encode("abc ab", add_special_tokens=True))
        return "read"

    yield attempt


def _object(content: bytes) -> bytes:
    """JSON of an object, also where a mutation is no JSON."""
    try:
        return content if isinstance(json.loads(content), dict) else b"{}"
    except (ValueError, RecursionError):
        return b"{}"


def _can_be_written(value: Any, depth: int = 0) -> bool:
    if isinstance(value, list):
        alike = bool(value) and len({type(one) for one in value}) == 1 and depth < 9
        return alike and all(_can_be_written(one, depth + 1) for one in value)
    if isinstance(value, int) and not isinstance(value, bool):
        return -(2**63) <= value < 2**63
    return isinstance(value, str | float | bool)
