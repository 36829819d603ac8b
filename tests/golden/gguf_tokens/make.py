"""Make token_ids.json.xz: what llama.cpp makes of odd texts, for each splitting of words, and for pieces with scores.

By hand, with `pip install xllamacpp`: PYTHONPATH=$PWD:$PWD/tests python -m golden.gguf_tokens.make TEXTS.json
"""

import json
import lzma
import sys
import tempfile
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support import gguf_files
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import golden
from mesh_transformer.gguf.splits import SPLITS


def llama_cpp(metadata: Mapping[str, Any], texts: list[str]) -> list[list[int]]:
    """The tokens of each text by llama.cpp, in a file with the vocabulary of `metadata`."""
    import xllamacpp

    model, tensors = gguf_files.llama(len(metadata["tokenizer.ggml.tokens"]), width=32)
    with tempfile.TemporaryDirectory() as folder:
        path = gguf_files.write(Path(folder) / "model.gguf", "llama", {**model, **metadata}, tensors)
        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel, params.warmup = str(path), 256, 1, False
        server = xllamacpp.Server(params)
        ids = []
        for text in texts:
            body = json.dumps({"content": text, "add_special": False, "parse_special": False}).encode()
            request = urllib.request.Request(
                f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request) as answer:
                ids.append(json.load(answer)["tokens"])
    return ids


def pieces(lines: list[str]) -> list[str]:
    """Pieces from short to long, as SentencePiece would learn them of these lines; the score of each is its place."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=700, show_progress=False))
    return [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]


def main() -> None:
    texts = json.loads(Path(sys.argv[1]).read_text())
    with tempfile.TemporaryDirectory() as folder:
        data = golden.unpack("texts", Path(folder))
        tokens, merges = gguf_files.gpt2(data / "gpt2_tokenizer")
        lines = [json.loads(line)["text"] for line in (data / "lambada/lambada_test.jsonl").read_text().splitlines()]
    by_split: dict[Any, list[list[int]]] = {}
    for name, split in SPLITS.items():
        if split not in by_split:
            metadata = gguf_files.byte_pairs(tokens, merges, name, ["<|endoftext|>"])
            by_split[split] = llama_cpp(metadata, texts)
    names = list(dict.fromkeys(SPLITS.values()))
    learned = pieces(lines)
    spm = {str(prefix): llama_cpp(gguf_files.scored(learned, prefix=prefix), texts) for prefix in (True, False)}
    made = {
        "texts": texts,
        "splits": {name: names.index(split) for name, split in SPLITS.items()},
        "ids": [by_split[split] for split in names],
        "pieces": learned,
        "piece_ids": spm,
    }
    content = json.dumps(made, ensure_ascii=False, separators=(",", ":")).encode()
    (Path(__file__).parent / "token_ids.json.xz").write_bytes(lzma.compress(content, preset=9))


if __name__ == "__main__":
    main()
