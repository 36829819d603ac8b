"""The text of a stream against the text of all tokens decoded at once."""

import codecs
import functools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from golden import unpack
from hypothesis import given
from hypothesis import strategies as st

from mesh_transformer.data.tokens.text_stream import TextStream, token_text
from mesh_transformer.data.tokens.tokenizer import ByteTokenizer, HubTokenizer, Tokenizer, load_tokenizer

TEXTS = st.text(
    st.one_of(
        st.sampled_from("ab .\n'"),
        st.sampled_from("éßñ…日本語한글ไทย\u0301\u200d\ufe0f"),
        st.sampled_from("🙂👩🏽👩‍🚀🇩🇪𝕏"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=30,
)


@functools.cache
def gpt2() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return load_tokenizer(str(unpack("texts", Path(folder)) / "gpt2_tokenizer"))


@functools.cache
def sentencepiece() -> Tokenizer:
    """Like Llama's tokenizer: a sign for a space starts each word, the first sign of a text is dropped, rare characters
    are bytes."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz.", "he", "▁the", "▁a", "日", "\ufffd"]
    vocabulary = [(piece, -float(i > 2) - 1 / len(piece)) for i, piece in enumerate(pieces)]
    backend = Backend(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")
    return HubTokenizer(tokenizer, "sentencepiece", fingerprint="sentencepiece")


@functools.cache
def wordpiece() -> Tokenizer:
    """Like BERT's tokenizer: a space before each word except the first, and `##` before the continuation of a word."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["[UNK]", "[SEP]", "play", "##ing", "##s", "a", ".", "日"]
    backend = Backend(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", eos_token="[SEP]")
    return HubTokenizer(tokenizer, "wordpiece", fingerprint="wordpiece")


def pieces(stream: TextStream, tokens: Sequence[int]) -> list[str]:
    """The results of each `push` and of `finish`. Also checks the attributes of the stream."""
    given = []
    for token in tokens:
        given.append(stream.push(token))
        assert stream.text == "".join(given)
    given.append(stream.finish())
    assert stream.text == "".join(given)
    assert stream.finish() == ""
    return given


def cut(text: str, stops: Sequence[str]) -> str:
    """The reference: the text up to the stop text that occurs first."""
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


@pytest.mark.parametrize("tokenizer", [gpt2, ByteTokenizer])
@given(text=TEXTS.filter(lambda text: "\ufffd" not in text))
def test_characters_come_as_soon_as_they_are_whole(tokenizer, text):
    """The reference by Python's incremental decoder: the text after each token that completes a character, and the
    offsets."""
    tokenizer = tokenizer()
    stream, decoder = TextStream(tokenizer), codecs.getincrementaldecoder("utf-8")()
    expected = ""
    for token in tokenizer.encode_literal([text])[0]:
        stream.push(token)
        assert stream.offsets[-1] == len(expected)
        expected += decoder.decode(tokenizer.token_bytes(token))
        unfinished = decoder.getstate()[0]
        assert expected.startswith(stream.text)
        assert unfinished or stream.text == expected
    assert stream.text == text
    assert stream.finish() == ""


@pytest.mark.parametrize("tokenizer", [gpt2, ByteTokenizer])
@given(data=st.data())
def test_any_tokens_give_the_text_of_all_of_them(tokenizer, data):
    """Includes invalid UTF-8, special tokens and IDs outside the vocabulary."""
    tokenizer = tokenizer()
    odd = [tokenizer.encode(text)[i] for text in ("\ufffd", "🙂", "日", "é") for i in (0, -1)]
    token = st.one_of(
        st.integers(0, 255),
        st.integers(0, tokenizer.n_vocab + 5),
        st.sampled_from([tokenizer.eot, *odd]),
    )
    tokens = data.draw(st.lists(token, max_size=20))
    assert "".join(pieces(TextStream(tokenizer), tokens)) == tokenizer.decode(tokens)


@pytest.mark.parametrize("tokenizer", [sentencepiece, wordpiece])
@given(data=st.data())
def test_spaces_that_depend_on_the_context(tokenizer, data):
    tokenizer = tokenizer()
    whole = [i for i in range(tokenizer.n_vocab) if "\ufffd" not in tokenizer.decode([i])]
    tokens = data.draw(st.lists(st.sampled_from(whole), max_size=12))
    assert "".join(pieces(TextStream(tokenizer), tokens)) == tokenizer.decode(tokens)
    before = data.draw(st.lists(st.sampled_from(whole), max_size=12))
    with_context = "".join(pieces(TextStream(tokenizer, context=before), tokens))
    assert tokenizer.decode(before) + with_context == tokenizer.decode([*before, *tokens])


@given(text=TEXTS)
def test_characters_of_one_token_a_byte(text):
    tokenizer = sentencepiece()
    tokens = tokenizer.encode(text)
    given = pieces(TextStream(tokenizer), tokens)
    assert "".join(given) == tokenizer.decode(tokens)
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in given)


def test_a_completion_keeps_the_space_that_begins_it():
    tokenizer = sentencepiece()
    the, a = tokenizer.encode("the a")
    assert pieces(TextStream(tokenizer), [the, a]) == ["the", " a", ""]
    assert pieces(TextStream(tokenizer, context=[a] * 40), [the, a]) == [" the", " a", ""]


def test_a_character_that_the_context_leaves_unfinished():
    first, last = gpt2().encode("🙂")
    given = pieces(TextStream(gpt2(), context=[first]), [last, *gpt2().encode("a")])
    assert "".join(given) == gpt2().decode([last]) + "a"


def test_a_character_in_two_tokens():
    tokens = gpt2().encode("a 🙂日")
    stream = TextStream(gpt2())
    assert pieces(stream, tokens) == ["a", " 🙂", "", "日", ""]
    assert stream.offsets == [0, 1, 3, 3]
    assert [token_text(gpt2(), token) for token in tokens] == ["a", " 🙂", "bytes:\\xe6\\x97", "bytes:\\xa5"]


def test_the_offset_of_a_character_behind_a_space_in_one_token():
    """A token can be a space and the first bytes of a character."""
    token = next(t for t in range(50256) if gpt2().token_bytes(t) == b" \xf0\x9f")
    assert token_text(gpt2(), token) == "bytes: \\xf0\\x9f"
    stream = TextStream(gpt2())
    rest = [t for byte in b"\x99\x82" for t in range(256) if gpt2().token_bytes(t) == bytes([byte])]
    assert pieces(stream, [token, *rest]) == ["", "", " 🙂", ""]
    assert stream.offsets == [0, 1, 1]


def test_bytes_that_never_become_a_character():
    stream = TextStream(ByteTokenizer())
    assert pieces(stream, b"a\xe2\x82") == ["a", "", "", "\ufffd"]
    assert pieces(TextStream(ByteTokenizer()), b"\xe2\x82b\xff") == ["", "", "\ufffdb", "", "\ufffd"]


def test_special_tokens_are_no_text_but_have_names():
    stream = TextStream(gpt2(), ["<|"])
    assert pieces(stream, [64, 50256, 65]) == ["a", "", "b", ""]
    assert stream.offsets == [0, 1, 1]
    assert not stream.stopped
    names = [token_text(t, t.eot) for t in (gpt2(), ByteTokenizer(), sentencepiece())]
    assert names == ["<|endoftext|>", "<|endoftext|>", "</s>"]
    outside = [(t, token) for t in (gpt2(), ByteTokenizer()) for token in (-1, t.n_vocab, 50300)]
    assert [token_text(*of) for of in outside] == [""] * 6


def test_tokens_by_themselves():
    tokenizer = sentencepiece()
    ids = tokenizer.encode("the a日é\ufffd")
    assert [token_text(tokenizer, i) for i in ids] == [
        " the",
        " a",
        "日",
        "bytes:\\xc3",
        "bytes:\\xa9",
        "\ufffd",
    ]
    assert [token_text(wordpiece(), i) for i in wordpiece().encode("playing a")] == [" play", "ing", " a"]


@pytest.mark.parametrize(("tokenizer", "one_byte"), [(gpt2, 256), (sentencepiece, 256 + 28)])
def test_the_bytes_of_every_token(tokenizer, one_byte):
    """They equal the results of `decode`. Each byte is a token, and GPT-2's vocabulary has no equal texts."""
    tokenizer = tokenizer()
    tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.n_vocab)]
    assert sum(len(token) == 1 for token in tokens) == one_byte
    assert {token for token in tokens if len(token) == 1} == {bytes([byte]) for byte in range(256)}
    if tokenizer is gpt2():
        assert len(set(tokens)) == 50257
        for token in range(50256):
            assert tokens[token].decode("utf-8", "replace") == tokenizer.decode([token])


@pytest.mark.parametrize("tokenizer", [gpt2, ByteTokenizer])
@given(data=st.data())
def test_stops_of_any_text_in_any_tokens(tokenizer, data):
    tokenizer = tokenizer()
    letters = st.one_of(st.text("ab\n", max_size=14), TEXTS)
    parts = data.draw(st.lists(letters, min_size=1, max_size=6))
    stops = data.draw(st.lists(st.one_of(st.text("ab\n", min_size=1, max_size=5), TEXTS.filter(bool)), max_size=4))
    text = "".join(parts)
    tokens = [token for part in tokenizer.encode_literal(parts) for token in part]
    stream = TextStream(tokenizer, stops)
    assert "".join(pieces(stream, tokens)) == cut(text, stops)
    assert stream.stopped == any(stop in text for stop in stops)


@given(tokens=st.lists(st.integers(0, 256), max_size=30), stops=st.lists(TEXTS.filter(bool), max_size=3))
def test_stops_in_broken_text(tokens, stops):
    text = ByteTokenizer().decode(tokens)
    stops = [*stops, "\ufffd\ufffd"]
    assert "".join(pieces(TextStream(ByteTokenizer(), stops), tokens)) == cut(text, stops)


def test_only_what_may_become_a_stop_is_held():
    stream = TextStream(ByteTokenizer(), ["\n\nQ:", "END"])
    assert pieces(stream, b"a\n\nb\n\n\nEN.E") == [
        *["a", "", "", "\n\nb"],
        *["", "", "\n", "\n\n", "", "EN.", "", "E"],
    ]
    assert not stream.stopped


def test_nothing_follows_a_stop():
    stream = TextStream(ByteTokenizer(), ["stop"])
    assert pieces(stream, b"a stop b") == ["a", " ", "", "", "", "", "", "", ""]
    assert stream.stopped
    assert stream.text == "a "
    assert stream.offsets == [0, 1, 2, 3, 4, 5]  # offsets below the length of the text belong to its tokens


def test_a_stop_that_begins_earlier_is_waited_for():
    """ "c" is found, but "bcd" would start before it."""
    for text, expected in [("abcd", "a"), ("abcx", "ab"), ("abc", "ab")]:
        stream = TextStream(ByteTokenizer(), ["bcd", "c"])
        assert "".join(pieces(stream, text.encode())) == expected
        assert stream.stopped


def test_a_stop_that_might_go_on_is_not_waited_for():
    stream = TextStream(ByteTokenizer(), ["abc", "ab"])
    assert [stream.push(byte) for byte in b"xab"] == ["x", "", ""]
    assert stream.stopped


def test_a_stop_in_mid_token():
    hello, world = gpt2().encode("hello world")
    stream = TextStream(gpt2(), ["lo w"])
    assert [stream.push(hello), stream.push(world)] == ["hel", ""]
    assert stream.stopped


@given(
    text=st.text("ab", max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    min_tokens=st.integers(0, 12),
)
def test_a_stop_that_ends_within_min_tokens_is_text(text, stops, min_tokens):
    """With one token per character, a stop text counts if its end is after `min_tokens` characters."""
    ends = [
        at for stop in stops for at in range(len(text)) if text.startswith(stop, at) and at + len(stop) > min_tokens
    ]
    stream = TextStream(ByteTokenizer(), stops, min_tokens=min_tokens)
    assert "".join(pieces(stream, text.encode())) == text[: min(ends, default=len(text))]
    assert stream.stopped == bool(ends)


def test_the_time_of_a_token_does_not_grow_with_the_stops():
    """The held text is not searched for each stop text at each token."""
    halves = ["a" * 200 + letter * (1 + i) + "a" * 200 for i in range(40) for letter in "bcdefghijklmnopqrstuvwxyz"]
    stream = TextStream(ByteTokenizer(), [*halves[:999], "a" * 999 + "b"])
    start = time.process_time()
    assert "".join(pieces(stream, b"a" * 1100 + b"b")) == "a" * 101
    assert stream.stopped
    assert time.process_time() - start < 5


def test_an_empty_stop_is_refused():
    with pytest.raises(ValueError, match="at least one character"):
        TextStream(ByteTokenizer(), ["a", ""])
