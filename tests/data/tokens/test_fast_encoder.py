"""The faster encoder gives the ids of tokenizers for the vocabularies of four families, or is not used.

GPT-2's vocabulary is the real one. The others are small, with the splitting, the normalizer and the added tokens of
their families.
"""

import copy
import hashlib
import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN

from mesh_transformer.data.corpus.options import SequenceOptions
from mesh_transformer.data.corpus.sequences import prepare
from mesh_transformer.data.tokens import byte_level, fast_encoder, tiktoken_encoder
from mesh_transformer.data.tokens.byte_level import Unsupported
from mesh_transformer.data.tokens.fast_encoder import LiteralEncoder
from mesh_transformer.data.tokens.probe import probe_texts
from mesh_transformer.data.tokens.tiktoken_encoder import TiktokenEncoder
from mesh_transformer.data.tokens.tokenizer import load_tokenizer

FAMILIES = ("gpt2", "llama3", "qwen", "neox")
LLAMA3 = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
SPECIAL = AddedToken("<|endoftext|>", special=True, normalized=False)
THINK = [AddedToken(name, special=False, normalized=False) for name in ("<think>", "</think>", "<thinker>")]
SPACES = [AddedToken(" " * n, special=False, normalized=True) for n in range(2, 25)]
# bytes that no text has, and GPT-NeoX's vocabulary neither
NO_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}


def trained(repo, kind):
    """A tokenizer of 1,500 tokens in the form of a family."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    made = Tokenizer(models.BPE())
    made.decoder = decoders.ByteLevel()
    alphabet = [c for byte, c in bytes_to_unicode().items() if kind != "neox" or byte not in NO_UTF8]
    if kind == "neox":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        pattern = LLAMA3 if kind == "llama3" else QWEN
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    if kind != "llama3":
        made.normalizer = normalizers.NFC()
    text = [path.read_text() for path in sorted((repo / "docs").glob("*.md"))]
    made.train_from_iterator(text, trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False))
    made.add_special_tokens([SPECIAL])
    made.add_tokens({"neox": SPACES, "qwen": THINK, "llama3": []}[kind])
    definition = json.loads(made.to_str())
    if kind == "llama3":
        model = definition["model"]
        ids = model["vocab"]
        pairs = [
            (ids[token], ids[token[:at]], ids[token[at:]], token[:at], token[at:])
            for token in ids
            for at in range(1, len(token))
            if token[:at] in ids and token[at:] in ids
        ]
        model |= {"merges": [list(pair[3:]) for pair in sorted(pairs)], "ignore_merges": True}
    return definition


def loaded(folder, definition):
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def tokenizers(repo, texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    made = {kind: loaded(folder / kind, trained(repo, kind)) for kind in FAMILIES[1:]}
    return {"gpt2": load_tokenizer(str(texts / "gpt2_tokenizer")), **made}


@pytest.fixture(scope="module")
def fast(tokenizers):
    return {kind: TiktokenEncoder(byte_level.read(made.definition(), made.merged)) for kind, made in tokenizers.items()}


@pytest.fixture
def at_once(monkeypatch):
    """The other encoder starts with the first text, and takes over after the probe."""
    monkeypatch.setattr(fast_encoder, "_BEFORE_CHARS", 0)
    monkeypatch.setattr(fast_encoder, "_COMPARED_CHARS", 0)


@pytest.mark.parametrize("kind", FAMILIES)
def test_odd_texts_have_the_ids_of_tokenizers(tokenizers, fast, kind, repo):
    texts = [*probe_texts(["<|endoftext|>", "<think>", " " * 24]), (repo / "CHANGELOG.md").read_text()]
    texts += ["x" * 100_000, " " * 40_000 + "x", "<think><thinker></thin", "a" + " " * 60 + "b\n" + " " * 25]
    expected = tokenizers[kind].encode_literal(texts)
    for text, ids in zip(texts, expected, strict=True):
        assert fast[kind].encode(text) == ids, text[:100]


DRAWN = st.text() | st.text("aA1 \n\t'sS\u0301\u00e9\u212b.<think>|endoftext", max_size=60)


@settings(max_examples=60)
@given(st.lists(DRAWN, max_size=4))
def test_drawn_texts_have_the_ids_of_tokenizers(tokenizers, fast, texts):
    valid = [text.encode("utf-8", "replace").decode() for text in texts]
    for kind in FAMILIES:
        assert [fast[kind].encode(text) for text in valid] == tokenizers[kind].encode_literal(valid)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_encoder_of_a_corpus(tokenizers, at_once, threads):
    encoder = LiteralEncoder(tokenizers["gpt2"], threads)
    # tiktoken panics on so much white space; a lone surrogate is no text
    texts = ["a", "\n" * 400_000 + "b", "c\ud800", "<|endoftext|>", ""]
    for _ in range(2):
        assert encoder.encode(texts) == tokenizers["gpt2"].encode_literal(texts)
        assert encoder.fast
    assert encoder.encode([]) == []


def test_the_first_texts_are_encoded_by_tokenizers(tokenizers, monkeypatch):
    monkeypatch.setattr(fast_encoder, "_BEFORE_CHARS", 10)
    encoder = LiteralEncoder(tokenizers["gpt2"])
    assert encoder.encode(["hello"]) == [[31373]]
    assert not encoder.fast
    assert encoder.encode(["hello"]) == [[31373]]
    assert encoder.fast
    plain = LiteralEncoder(load_tokenizer("bytes"))
    assert plain.encode(["a" * 20]) == [[97] * 20]
    assert not plain.fast


@pytest.mark.parametrize("when", ["probe", "later"])
def test_a_difference_is_named_and_tokenizers_goes_on(tokenizers, at_once, monkeypatch, caplog, when):
    monkeypatch.setattr(fast_encoder, "_COMPARED_CHARS", 100)
    text = "Don't stop!!!" if when == "probe" else "a text that differs"
    right = TiktokenEncoder.encode

    def wrong(self, given):
        ids = right(self, given)
        return [*ids[:2], ids[2] + 1, *ids[3:]] if given.startswith(text) else ids

    monkeypatch.setattr(TiktokenEncoder, "encode", wrong)
    encoder = LiteralEncoder(tokenizers["gpt2"])
    assert encoder.encode(["hello"]) == [[31373]]
    assert encoder.encode(["a text that differs"]) == tokenizers["gpt2"].encode_literal(["a text that differs"])
    assert not encoder.fast
    (message,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"for the text {text!r}"[:-1].strip("'\"") in message
    assert "from token 2 on: tokenizers encodes it and all later texts" in message


def test_a_panic_ends_the_use(tokenizers, at_once, monkeypatch, caplog):
    monkeypatch.setattr(tiktoken_encoder, "_LONG_SPACE", tiktoken_encoder.re.compile(r"(?!)"))
    encoder = LiteralEncoder(tokenizers["gpt2"], 1)
    texts = ["a", "\n" * 1_000_000 + "b"]
    assert encoder.encode(texts) == tokenizers["gpt2"].encode_literal(texts)
    assert not encoder.fast
    assert "tiktoken failed on one of 2 texts" in caplog.text


def changed(definition, path, value):
    """A copy in which the entry at `path` has another value."""
    found = made = copy.deepcopy(definition)
    for key in path[:-1]:
        found = found[key]
    found[path[-1]] = value
    return made


LAST = ("added_tokens", -1)
CHANGES = {
    "its normalizer is": (("normalizer",), {"type": "Lowercase"}),
    "its pre-tokenizer is": (("pre_tokenizer", "pretokenizers", 0, "pattern", "Regex"), r"\p{L}+"),
    "its pre-tokenizer": (("pre_tokenizer", "pretokenizers", 0, "behavior"), "MergedWithNext"),
    "its pre-tokenizer is {": (("pre_tokenizer", "pretokenizers", 1, "add_prefix_space"), True),
    "its model has dropout 0.1": (("model", "dropout"), 0.1),
    "its model has byte_fallback True": (("model", "byte_fallback"), True),
    "its added token '<thinker>' takes characters": ((*LAST, "lstrip"), True),
}


@pytest.mark.parametrize("message", CHANGES)
def test_another_kind_is_refused(tokenizers, message):
    made = tokenizers["qwen"]
    with pytest.raises(Unsupported) as error:
        byte_level.read(changed(made.definition(), *CHANGES[message]), made.merged)
    assert message in str(error.value)


def test_other_tables_are_refused(tokenizers, tmp_path):
    qwen, llama3 = (tokenizers[kind].definition() for kind in ("qwen", "llama3"))
    merges = qwen["model"]["merges"]
    swapped = [*merges[:100], merges[101], merges[100], *merges[102:]]
    cases = {
        "not in the order of the ids": changed(qwen, ("model", "merges"), swapped),
        "do not have": changed(llama3, ("model", "merges"), llama3["model"]["merges"][:-1]),
        "no token for 1 bytes": copy.deepcopy(qwen),
    }
    cases["no token for 1 bytes"]["model"]["vocab"].pop("\u00a1")
    for message, definition in cases.items():
        with pytest.raises(Unsupported, match=message):
            byte_level.read(definition, tokenizers["qwen"].merged)


def test_a_token_that_no_merge_reaches_is_refused(tmp_path):
    """b and c are merged first, so that a, b, c never become ab and c: another library would merge a and bc."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    ids = {c: id for id, c in enumerate([*bytes_to_unicode().values(), "bc", "ab", "abc", "<|endoftext|>"])}
    made = Tokenizer(models.BPE(vocab=ids, merges=[("b", "c"), ("a", "b"), ("ab", "c")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens([SPECIAL])
    tokenizer = loaded(tmp_path / "x", json.loads(made.to_str()))
    assert len(tokenizer.encode_literal(["abc"])[0]) == 2
    with pytest.raises(Unsupported, match="its merges do not make the token 'abc'"):
        byte_level.read(tokenizer.definition(), tokenizer.merged)


def test_other_classes_of_characters_are_refused(monkeypatch):
    import tiktoken

    made = tiktoken.Encoding
    monkeypatch.setattr(tiktoken, "Encoding", lambda name, **given: made(name, **{**given, "pat_str": r"\p{Lu}+"}))
    with pytest.raises(Unsupported, match=r"differ on \\p\{L\} and U\+0061"):
        tiktoken_encoder._compare_class(r"\p{L}")


def test_without_tiktoken_or_with_an_old_one(tokenizers, at_once, monkeypatch, caplog):
    import tiktoken

    caplog.set_level("DEBUG")
    monkeypatch.setattr(tiktoken, "__version__", "0.9.0")
    encoder = LiteralEncoder(tokenizers["gpt2"])
    assert encoder.encode(["hello"]) == [[31373]]
    assert "tiktoken is of version 0.9.0, 0.14 is needed" in caplog.text
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    encoder = LiteralEncoder(tokenizers["gpt2"])
    assert encoder.encode(["hello"]) == [[31373]]
    assert "pip install tiktoken" in caplog.text


def test_records_have_the_same_bytes(tokenizers, at_once, monkeypatch, tmp_path):
    with (tmp_path / "a.jsonl").open("w") as file:
        file.writelines(json.dumps(text) + "\n" for text in probe_texts(["<|endoftext|>"]))
    sums = []
    for missing in (False, True):
        if missing:
            monkeypatch.setitem(sys.modules, "tiktoken", None)
        written = prepare([str(tmp_path / "a.jsonl")], "a", str(tmp_path), tokenizers["gpt2"], SequenceOptions(seq=64))
        with open(written.path, "rb") as file:
            sums.append(hashlib.file_digest(file, "sha256").hexdigest())
    assert sums[0] == sums[1]
