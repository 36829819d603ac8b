"""The tokenizer in the metadata of a GGUF file, as the files of a Hugging Face tokenizer.

Byte pairs ("gpt2" in `tokenizer.ggml.model`) and SentencePiece's pieces with scores ("llama") are read.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mesh_transformer import files
from mesh_transformer.errors import UserError
from mesh_transformer.gguf.header import Header, decimal
from mesh_transformer.gguf.splits import SPLITS, pre_tokenizer

# the largest known tokenizer.json has 34 MB
MAX_FILE_BYTES = 128 << 20
# the types of tokens in ggml
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_IDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
# what SentencePiece's files leave out, as llama.cpp assumes it (src/llama-vocab.cpp)
_PIECES = {"bos": 1, "eos": 2, "unk": 0}
# tokens that end an answer in llama.cpp and are control tokens, whatever the file says (src/llama-vocab.cpp,
# special_eog_ids)
_ENDS = frozenset({
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>",
    "_<EOT>", "[EOT]", "[EOS]", "<｜end▁of▁sentence｜>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
    "<end_of_utterance>", "<turn|>", "[e~[",
})  # fmt: skip
# where these are, "<|end|>" ends a part of an answer only
_PARTS = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})
# Phi-3's special tokens take the white space behind them, but for these
_KEEPS_SPACE = {"<unk>", "<s>", "<|endoftext|>"}
# more than any piece or merge: the work grows with their squares
MAX_TOKEN_CHARS, MAX_MERGE_CHARS, MAX_MERGED_CHARS = 1 << 10, 1 << 12, 1 << 26
_SAMPLING = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "penalty_repeat": "repetition_penalty"}
_SPACE = "▁"
_MODEL, _TOKENS = "tokenizer.ggml.model", "tokenizer.ggml.tokens"


def generation_config(header: Header) -> dict[str, Any]:
    """generation_config.json: the tokens that begin and end a text, and the sampling options that the file proposes."""
    ids, tokens = _ids(header), _tokens(header)
    types = _types(header, tokens)
    others = [header.get(f"tokenizer.ggml.{name}_token_id", int) for name in ("eot", "eom")]
    named = [id for id, token in enumerate(tokens) if token in _ENDS and types[id] == _CONTROL]
    ends = [id for id in dict.fromkeys([ids.get("eos"), *others, *named]) if id is not None and 0 <= id < len(tokens)]
    given = {ours: header.get(f"general.sampling.{name}", float) for name, ours in _SAMPLING.items()}
    proposed = {name: decimal(value) if isinstance(value, float) else value for name, value in given.items()}
    return {
        "bos_token_id": ids.get("bos"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        **{
            name: decimal(value) if isinstance(value, float) else value
            for name, value in proposed.items()
            if value is not None
        },
    }


def tokenizer_beside(header: Header, names: Iterable[str]) -> dict[str, bytes]:
    """The tokenizer of a file as `tokenizer_files`; if it cannot be read, the one in the file's folder.

    Args:
        names: the files of a tokenizer.

    Raises:
        UserError: as in `tokenizer_files`, and there is none in the folder.
    """
    folder = os.path.dirname(header.path) or "."
    try:
        contents = tokenizer_files(header)
        reason = UserError(f"{header.path} has no tokenizer")
    except UserError as error:
        contents, reason = {}, error
    if contents:
        return contents
    beside = {name for name in files.list_dir(folder) if name in names}
    if "tokenizer.json" not in beside:
        raise reason
    made = {name: files.join(folder, name) for name in sorted(beside)}
    return {name: files.read_range(path, 0, min(files.size(path), MAX_FILE_BYTES)) for name, path in made.items()}


def tokenizer_files(header: Header) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and generation_config.json by name; empty: the file has no tokenizer.

    Raises:
        UserError: the tokenizer is not supported, or damaged.
    """
    kind = header.get(_MODEL, str, "none")
    if kind in ("none", "no_vocab"):
        return {}
    tokens = _tokens(header)
    if len(tokens) < 2:
        raise UserError(f"{header.path}: its tokenizer has no tokens")
    vocabulary = {token: id for id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for id, token in enumerate(tokens) if vocabulary[token] != id)
        raise UserError(f"{header.path}: its tokenizer has the token {twice!r:.80} twice")
    if kind == "gpt2":
        definition, begins = _byte_pairs(header, vocabulary)
    elif kind == "llama":
        definition, begins = _pieces(header, vocabulary)
    else:
        raise _other(header, f"tokenizer.ggml.model is {kind!r:.40}: only gpt2 and llama can be read")
    ids, types = _ids(header), _types(header, tokens)
    if "eos" not in ids:
        raise _other(header, "its tokenizer has no end token")
    name = header.get("general.name", str, "").lower()
    strips = "phi-3" in name or "phi3" in name
    special = {_CONTROL, _UNKNOWN} if kind == "llama" else {_CONTROL}
    added = [
        {
            "id": id, "content": token, "single_word": False, "lstrip": False,
            "rstrip": strips and token not in _KEEPS_SPACE, "normalized": False, "special": types[id] in special,
        }
        for id, token in enumerate(tokens)
        if types[id] in special | {_USER_DEFINED}
    ]  # fmt: skip
    around = _around(header, ids, tokens, begins=begins)
    whole = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **definition,
        "post_processor": around,
    }  # fmt: skip
    return {
        "tokenizer.json": json.dumps(whole, ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(_config(header, ids, tokens), ensure_ascii=False, indent=2).encode(),
        "generation_config.json": json.dumps(generation_config(header), indent=2).encode(),
    }


def _byte_pairs(header: Header, vocabulary: Mapping[str, int]) -> tuple[dict[str, Any], bool]:
    name = header.get("tokenizer.ggml.pre", str)
    split = SPLITS.get(name)
    if split is None:
        raise _other(header, f"tokenizer.ggml.pre is {name!r:.40}: docs/gguf.md has the names that are known")
    merges = header.get("tokenizer.ggml.merges", list)
    if merges is None:
        raise _other(header, "its tokenizer has no merges")
    pairs = [_pair(header, merge, vocabulary) for merge in merges]
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": split.whole_words,
        "vocab": vocabulary, "merges": pairs,
    }  # fmt: skip
    bytes_ = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    normalizer = None if split.normalizer is None else {"type": split.normalizer}
    return {
        "normalizer": normalizer, "pre_tokenizer": pre_tokenizer(split), "decoder": bytes_, "model": model,
    }, split.begins  # fmt: skip


def _pair(header: Header, merge: str, vocabulary: Mapping[str, int]) -> list[str]:
    """The two sides of a merge. A side may have a space itself, as in GLM-4's."""
    at = merge.find(" ", 1)
    while at > 0 and len(merge) <= MAX_MERGE_CHARS:
        left, right = merge[:at], merge[at + 1 :]
        if left in vocabulary and right in vocabulary and left + right in vocabulary:
            return [left, right]
        at = merge.find(" ", at + 1)
    raise UserError(f"{header.path}: the merge {merge!r:.80} of its tokenizer does not join two tokens to a third")


def _pieces(header: Header, vocabulary: Mapping[str, int]) -> tuple[dict[str, Any], bool]:
    """SentencePiece's pieces. Of two merges the one to the piece with the higher score comes first."""
    scores = header.get("tokenizer.ggml.scores", np.ndarray)
    if scores is None or len(scores) != len(vocabulary):
        raise _other(header, "its tokenizer has no score for each token")
    types = _types(header, list(vocabulary))
    normal = {token for token, id in vocabulary.items() if types[id] not in (_CONTROL, _UNKNOWN, _BYTE)}
    merges: list[tuple[float, int, int, str, str]] = []
    chars = 0
    for token in normal:
        score = float(scores[vocabulary[token]])
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in normal and right in normal:
                merges.append((-score, -len(left), -len(right), left, right))
                chars += len(token)
        if len(token) > MAX_TOKEN_CHARS or chars > MAX_MERGED_CHARS:
            raise UserError(f"{header.path}: its pieces are longer, or overlap more, than any tokenizer's")
    merges.sort()
    prefix = header.get("tokenizer.ggml.add_space_prefix", bool, True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    normalizers = [{"type": "Prepend", "prepend": _SPACE}, replace] if prefix else [replace]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []),
    ]  # fmt: skip
    unknown = _ids(header).get("unk", 0)
    model = {
        "type": "BPE", "dropout": None, "unk_token": list(vocabulary)[unknown], "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
        "vocab": vocabulary, "merges": [[left, right] for *_, left, right in merges],
    }  # fmt: skip
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers}, "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders}, "model": model,
    }, True  # fmt: skip


def _around(header: Header, ids: Mapping[str, int], tokens: Sequence[str], *, begins: bool) -> dict[str, Any] | None:
    """The start and end tokens around a text."""
    wanted = {
        name: header.get(f"tokenizer.ggml.add_{name}_token", bool, default)
        for name, default in (("bos", begins), ("eos", False))
    }
    names = [name for name in ("bos", "eos") if wanted[name] and name in ids]
    if not names:
        return None
    token = {name: {"SpecialToken": {"id": tokens[ids[name]], "type_id": 0}} for name in names}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    single = [*([token["bos"]] if "bos" in token else []), text, *([token["eos"]] if "eos" in token else [])]
    return {
        "type": "TemplateProcessing", "single": single, "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            tokens[ids[name]]: {"id": tokens[ids[name]], "ids": [ids[name]], "tokens": [tokens[ids[name]]]}
            for name in names
        },
    }  # fmt: skip


def _config(header: Header, ids: Mapping[str, int], tokens: Sequence[str]) -> dict[str, Any]:
    """tokenizer_config.json: the names of special tokens, and the chat templates."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{f"{name}_token": tokens[id] for name, id in ids.items()},
    }
    template = header.get("tokenizer.chat_template", str)
    tools = header.get("tokenizer.chat_template.tool_use", str)
    if template is not None:
        both = [{"name": "default", "template": template}, {"name": "tool_use", "template": tools}]
        config["chat_template"] = template if tools is None else both
    return config


def _ids(header: Header) -> dict[str, int]:
    """The special tokens by their names in tokenizer_config.json."""
    count = len(_tokens(header))
    assumed = _PIECES if header.get(_MODEL, str) == "llama" else {}
    ids: dict[str, int] = {}
    for name, key in _IDS.items():
        id = header.get(f"tokenizer.ggml.{key}_token_id", int, assumed.get(name))
        # some files have -1 as a number without a sign
        id = id if id is None or 0 <= id < count else assumed.get(name)
        if id is not None and id < count:
            ids[name] = id
    return ids


def _tokens(header: Header) -> list[str]:
    """The tokens. llama.cpp names an empty one by its number too."""
    tokens: list[str] = header.get(_TOKENS, list, [])
    return [token or f"[EMPTY_{id}]" for id, token in enumerate(tokens)]


def _types(header: Header, tokens: Sequence[str]) -> list[int]:
    """The type of each token."""
    stored = header.get("tokenizer.ggml.token_type", np.ndarray)
    if stored is not None and len(stored) != len(tokens):
        raise UserError(f"{header.path}: its tokenizer has no type for each token")
    types: list[int] = [1] * len(tokens) if stored is None else stored.tolist()
    ends = _ENDS - ({"<|end|>"} if any(parts <= set(tokens) for parts in _PARTS) else set())
    for id, token in enumerate(tokens):
        if token in ends:
            types[id] = _CONTROL
    return types


def _other(header: Header, reason: str) -> UserError:
    return UserError(
        f"{header.path}: {reason}; put the model's own tokenizer.json beside the file, or name its folder with --set "
        "data.tokenizer=FOLDER (--tokenizer FOLDER)"
    )
