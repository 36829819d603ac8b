"""The files of a tokenizer: tokenizer.json, tokenizer_config.json, generation_config.json."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from support.chat_templates import chat_folder
from support.mutations import mutated_bytes, mutated_json

from fuzz.harness import Attempt
from mesh_transformer.data.tokens.tokenizer import load_tokenizer

NAMES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
# besides the parts that the valid tokenizer.json has
PARTS = {
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]},
    "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False},
    "decoder": {"type": "Strip", "content": "a", "start": 1, "stop": 1},
    "truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0},
    "padding": {
        "strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "a",
    },
    "model": {"type": "WordLevel", "vocab": {"<|endoftext|>": 0, "a": 1, "b": 2}, "unk_token": "a"},
    "chat_template": "{{ messages }}",
    "added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": True}},
    "extra_special_tokens": {"image_token": "<|im_start|>"},
    "additional_special_tokens": ["<|im_start|>"],
    "model_max_length": 8,
    "tokenizer_class": "GPT2Tokenizer",
}  # fmt: skip


@contextmanager
def fuzzer(folder: Path) -> Iterator[Attempt]:
    """Loads a tokenizer and uses it. One of its files is mutated."""
    chat_folder(folder)
    contents = {folder / name: (folder / name).read_bytes() for name in NAMES}
    donors = [PARTS, *map(json.loads, contents.values())]
    load_tokenizer(str(folder))

    def attempt(random: Random) -> str:
        path = random.choice([*contents][:2] + [*contents])
        content = contents[path]
        if random.random() < 0.1:
            path.write_bytes(mutated_bytes(random, content))
        else:
            path.write_bytes(mutated_json(random, json.loads(content), donors))
        try:
            tokenizer = load_tokenizer(str(folder))
        finally:
            path.write_bytes(content)
        ids = tokenizer.encode("a é <|im_start|>", add_special_tokens=True)
        tokenizer.encode_literal(["b\n"])
        tokenizer.decode(ids, special_names=True)
        for token in [*ids[:4], 0, tokenizer.n_vocab - 1]:
            tokenizer.token_name(token)
            tokenizer.token_bytes(token)
        return "read"

    yield attempt
