"""The tokenizer of a GGUF file. tests/golden/gguf_tokens has what llama.cpp makes of odd texts."""

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from support import gguf_files

from mesh_transformer.checkpoint.open import Checkpoint
from mesh_transformer.data.tokens.tokenizer import Tokenizer, load_tokenizer, save_tokenizer
from mesh_transformer.errors import UserError
from mesh_transformer.gguf.header import read_header
from mesh_transformer.gguf.splits import SPLITS
from mesh_transformer.gguf.tokens import generation_config

STORED = json.loads(lzma.decompress((Path(__file__).parents[1] / "golden/gguf_tokens/token_ids.json.xz").read_bytes()))
TEXTS = STORED["texts"]
# llama.cpp has no normal forms of Unicode, which the models' own tokenizers apply: letters with combining marks
COMPOSED = {"e\u0301e\u0301", "E\u0301A", "a\u0300b\u0301c\u0302", "x\u0323\u0307", "\u00e9 e\u0301"}
PAIRS = ["<|end|>", "<|im_end|>", "[x y]", "a", "b", "c", "Ġ", "ab", "abc", "Ġa"]
MERGES = ["a b", "ab c", "Ġ a"]


def tokenizer(path: Path, metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a file with this vocabulary."""
    model, tensors = gguf_files.llama(len(metadata["tokenizer.ggml.tokens"]), width=8)
    return load_tokenizer(str(gguf_files.write(path, "llama", {**model, **metadata}, tensors)))


def small(path: Path, **changes: Any) -> Tokenizer:
    """The tokenizer of a file with ten tokens; changes without the first part of the key."""
    metadata = gguf_files.byte_pairs(PAIRS, MERGES, "gpt-2", PAIRS[:2])
    return tokenizer(path, metadata | {f"tokenizer.{key.replace('__', '.')}": value for key, value in changes.items()})


@pytest.mark.parametrize("name", SPLITS)
def test_words_are_split_as_in_llama_cpp(texts: Path, tmp_path: Path, name: str) -> None:
    tokens, merges = gguf_files.gpt2(texts / "gpt2_tokenizer")
    ours = tokenizer(tmp_path / "a.gguf", gguf_files.byte_pairs(tokens, merges, name, ["<|endoftext|>"]))
    theirs = STORED["ids"][STORED["splits"][name]]
    found = ours.encode_literal(TEXTS)
    unequal = {text for text, ids, expected in zip(TEXTS, found, theirs, strict=True) if ids != expected}
    assert unequal == (COMPOSED if SPLITS[name].normalizer else set())


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_are_joined_as_in_llama_cpp(tmp_path: Path, prefix: bool) -> None:
    ours = tokenizer(tmp_path / "a.gguf", gguf_files.scored(STORED["pieces"], prefix=prefix))
    assert ours.encode_literal(TEXTS) == STORED["piece_ids"][str(prefix)]
    assert (ours.bos, ours.eot, ours.end_tokens) == (1, 2, (2,))
    assert ours.encode("a", add_special_tokens=True)[0] == 1
    assert [ours.decode(ours.encode(text)) for text in ("a b", "  a", "日本")] == ["a b", "  a", "日本"]


def test_the_vocabulary_is_enough_for_the_texts() -> None:
    assert len(TEXTS) > 300
    # some splittings differ only in normal forms, and in words that are tokens
    assert len(set(map(str, STORED["ids"]))) == 10


def test_special_tokens(tmp_path: Path) -> None:
    types = [gguf_files.CONTROL, gguf_files.CONTROL, gguf_files.USER_DEFINED, *[gguf_files.NORMAL] * 7]
    ours = small(tmp_path / "a.gguf", ggml__token_type=types, ggml__add_bos_token=True, chat_template="{{ x }}")
    assert ours.encode("abc[x y]<|im_end|>") == [8, 2, 1]
    # a user-defined token is no special one: it splits every text, and stays in the decoded one
    assert ours.encode_literal(["ab[x y]<|im_end|>"])[0][:2] == [7, 2]
    assert ours.decode([8, 2, 1, 0]) == "abc[x y]"
    assert ours.encode("a", add_special_tokens=True) == [0, 3]
    assert ours.chat_template == "{{ x }}"
    assert ours.special_names["eos_token"] == "<|end|>"
    # llama.cpp ends an answer at tokens of this name too
    assert ours.end_tokens == (0, 1)


def test_a_side_of_a_merge_may_have_a_space(tmp_path: Path) -> None:
    tokens = [*PAIRS, "a b", "c d", "a bc d", " ", "d", "a ", "c "]
    merges = ["a  ", "c  ", "a  b", "c  d", "a b c d"]
    metadata = gguf_files.byte_pairs(tokens, merges, "gpt-2", PAIRS[:2])
    content = json.loads(_definition(tmp_path, metadata))
    assert content["model"]["merges"] == [["a", " "], ["c", " "], ["a ", "b"], ["c ", "d"], ["a b", "c d"]]


def _definition(tmp_path: Path, metadata: dict[str, Any]) -> str:
    model, tensors = gguf_files.llama(len(metadata["tokenizer.ggml.tokens"]), width=8)
    path = gguf_files.write(tmp_path / "a.gguf", "llama", {**model, **metadata}, tensors)
    save_tokenizer(str(path), str(tmp_path))
    return (tmp_path / "tokenizer.json").read_text()


def test_proposed_sampling_options(tmp_path: Path) -> None:
    model, tensors = gguf_files.llama(10, width=8)
    metadata = {
        **model, **gguf_files.byte_pairs(PAIRS, MERGES, "gpt-2", PAIRS[:2]), "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20, "tokenizer.ggml.eot_token_id": 5,
    }  # fmt: skip
    path = gguf_files.write(tmp_path / "a.gguf", "llama", metadata, tensors)
    expected = {"bos_token_id": 0, "eos_token_id": [0, 5, 1], "temperature": 0.5, "top_k": 20}
    assert generation_config(read_header(str(path))) == expected


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ggml__pre": "mystery"}, "tokenizer.ggml.pre is 'mystery': docs/gguf.md has the names that are known"),
        ({"ggml__model": "bert"}, "tokenizer.ggml.model is 'bert': only gpt2 and llama can be read"),
        ({"ggml__model": "none"}, "has no tokenizer"),
        ({"ggml__merges": ["a x"]}, "the merge 'a x' of its tokenizer does not join two tokens"),
        ({"ggml__tokens": [*PAIRS[:-1], "a"]}, "its tokenizer has the token 'a' twice"),
        ({"ggml__token_type": [1, 2]}, "no type for each token"),
        ({"ggml__eos_token_id": 10}, "its tokenizer has no end token"),
        ({"ggml__tokens": ["a"]}, "its tokenizer has no tokens"),
        ({"ggml__eos_token_id": "0"}, "tokenizer.ggml.eos_token_id is '0': expected a whole number"),
        ({"ggml__merges": ["a" + " " * 5000]}, "the merge 'a .* does not join two tokens"),
        ({"chat_template": 7}, "tokenizer.chat_template is 7: expected a text"),
        ({"ggml__model": "llama"}, "no score for each token"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, changes: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        small(tmp_path / "a.gguf", **changes)


def test_an_unknown_splitting_takes_the_tokenizer_beside_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path too, and what is written from the file."""
    _definition(tmp_path, gguf_files.byte_pairs(PAIRS, MERGES, "gpt-2", PAIRS[:2]))
    beside = json.loads((tmp_path / "tokenizer.json").read_text())
    monkeypatch.chdir(tmp_path)
    for changes in ({"ggml__pre": "mystery"}, {"ggml__model": "none"}):
        assert small(Path("other.gguf"), **changes).encode("abc") == [8]
        checkpoint = Checkpoint.open("other.gguf")
        assert checkpoint.model is not None
        origin = checkpoint.origin(checkpoint.source(checkpoint.model))
        assert origin is not None
        assert json.loads(origin.files["tokenizer.json"]) == beside


def test_without_any_tokenizer_the_weights_are_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UserError, match="mystery"):
        small(tmp_path / "a.gguf", ggml__pre="mystery")
    checkpoint = Checkpoint.open(str(tmp_path / "a.gguf"))
    assert checkpoint.model is not None
    origin = checkpoint.origin(checkpoint.source(checkpoint.model))
    assert origin is not None
    assert sorted(origin.files) == ["config.json", "generation_config.json"]
    assert "what is written has no tokenizer" in caplog.text


def test_tokens_that_look_like_control_tokens_are_some(tmp_path: Path) -> None:
    """As in llama.cpp: files of some converters have them as ordinary ones."""
    ours = small(tmp_path / "a.gguf", ggml__token_type=[gguf_files.CONTROL, *[gguf_files.NORMAL] * 9])
    assert (ours.encode("a<|im_end|>"), ours.end_tokens) == ([3, 1], (0, 1))


def test_the_special_tokens_of_phi_3_take_the_space_behind_them(tmp_path: Path) -> None:
    metadata = gguf_files.byte_pairs(PAIRS, MERGES, "gpt-2", PAIRS[:2])
    plain = tokenizer(tmp_path / "a.gguf", metadata)
    phi3 = tokenizer(tmp_path / "b.gguf", {**metadata, "general.name": "Phi 3 Mini is Phi-3"})
    assert (plain.encode("<|im_end|> a"), phi3.encode("<|im_end|> a")) == ([1, 9], [1, 3])


def test_long_pieces_are_refused_at_once(tmp_path: Path) -> None:
    """Their merges would take gigabytes."""
    with pytest.raises(UserError, match="its pieces are longer, or overlap more"):
        tokenizer(tmp_path / "a.gguf", gguf_files.scored(["a" * length for length in range(1, 900)]))


def test_special_tokens_out_of_range_are_left_out(tmp_path: Path) -> None:
    """Some files have -1 as a number without a sign."""
    assert "pad_token" not in small(tmp_path / "a.gguf", ggml__padding_token_id=2**32 - 1).special_names
