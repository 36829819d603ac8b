"""GGUF files as llama.cpp's converter writes them, by the package `gguf`: of random models, and of vocabularies."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def write(
    path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray], **kinds: Any
) -> Path:
    """Write a file.

    Args:
        metadata: keys with the name of the architecture in them as {}.
        tensors: float32 by name.
        kinds: the types of tensors by name, with _ for a dot; F32 for the others.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        _add(writer, key.format(architecture), value)
    for name, values in tensors.items():
        kind = kinds.get(name.replace(".", "_"), gguf.GGMLQuantizationType.F32)
        data = values if kind == gguf.GGMLQuantizationType.F32 else gguf.quants.quantize(values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list | tuple):
        writer.add_array(key, list(value))
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, int):
        (writer.add_uint32 if 0 <= value < 2**32 else writer.add_int64)(key, value)
    else:
        writer.add_float32(key, float(value))


def byte_pairs(tokens: Sequence[str], merges: Sequence[str], pre: str, special: Sequence[str]) -> dict[str, Any]:
    """The metadata of a tokenizer of byte pairs; the first of `special` begins and ends texts."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": [CONTROL if token in special else NORMAL for token in tokens],
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": tokens.index(special[0]),
        "tokenizer.ggml.eos_token_id": tokens.index(special[0]),
        "tokenizer.ggml.add_bos_token": False,
    }


def llama(vocab: int, *, width: int = 64, seed: int = 0) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Metadata and tensors of a random Llama with one layer and a tied head."""
    random = np.random.default_rng(seed)
    shapes = {
        "token_embd": (vocab, width), "output_norm": (width,), "blk.0.attn_norm": (width,), "blk.0.ffn_norm": (width,),
        **{f"blk.0.attn_{name}": (width, width) for name in ("q", "k", "v", "output")},
        "blk.0.ffn_gate": (width, width), "blk.0.ffn_up": (width, width), "blk.0.ffn_down": (width, width),
    }  # fmt: skip
    metadata = {
        "{}.block_count": 1, "{}.context_length": 512, "{}.embedding_length": width, "{}.feed_forward_length": width,
        "{}.attention.head_count": 4, "{}.attention.head_count_kv": 4, "{}.attention.layer_norm_rms_epsilon": 1e-5,
        "{}.rope.dimension_count": width // 4, "{}.rope.freq_base": 10000.0, "{}.vocab_size": vocab,
    }  # fmt: skip
    tensors = {f"{name}.weight": random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    return metadata, tensors


def gpt2(folder: Path) -> tuple[list[str], list[str]]:
    """The tokens of GPT-2's tokenizer, in order, and its merges."""
    vocabulary = json.loads((folder / "vocab.json").read_text())
    merges = [line for line in (folder / "merges.txt").read_text().split("\n")[1:] if line]
    return sorted(vocabulary, key=vocabulary.__getitem__), merges


def scored(pieces: Sequence[str], *, prefix: bool = True) -> dict[str, Any]:
    """The metadata of a tokenizer of pieces with scores; bytes and three special tokens come first."""
    special = ["<unk>", "<s>", "</s>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))],
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)],
        "tokenizer.ggml.add_space_prefix": prefix,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
