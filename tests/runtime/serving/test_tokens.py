"""POST /tokenize and /detokenize, with the fields of vLLM, against transformers' tokenizer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chat_templates import chat_folder
from support.served import Served, refusal, serve
from transformers import AutoTokenizer

from mesh_transformer.data.tokens.tokenizer import load_tokenizer
from mesh_transformer.runtime.serving.chat_protocol import DetokenizeResponse, TokenizeResponse

TEXT = "Hé <|im_end|> 日本\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(folder))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with serve(tokenizer=load_tokenizer(str(folder)), vocab=259) as served:
        yield served


@pytest.mark.parametrize("special", [None, True, False])
def test_a_prompt(server: Served, theirs: Any, special: bool | None) -> None:
    wanted = theirs.encode(TEXT, add_special_tokens=special is not False)
    assert wanted.count(2) == 1
    answer = server.post({"model": "tiny", "prompt": TEXT, "add_special_tokens": special}, "/tokenize").json()
    assert answer == {"count": len(wanted), "max_model_len": 64, "tokens": wanted, "token_strs": None}
    TokenizeResponse.model_validate(answer, strict=True)
    counted = server.complete(TEXT, max_tokens=1, add_special_tokens=special)
    assert counted["usage"]["prompt_tokens"] == len(wanted)


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("special", [None, True, False])
def test_messages(server: Served, theirs: Any, prompt: bool, special: bool | None) -> None:
    """The template writes the special tokens; more are added only where the request asks for them."""
    chat = [{"role": "user", "content": TEXT}]
    wanted = theirs.apply_chat_template(chat, add_generation_prompt=prompt, return_dict=False)
    fields = {"add_generation_prompt": prompt, "add_special_tokens": special, "return_token_strs": True}
    answer = server.post({"messages": chat, **fields}, "/tokenize").json()
    wanted = [0] * bool(special) + wanted
    assert (answer["tokens"], answer["count"]) == (wanted, len(wanted))
    assert answer["token_strs"] == theirs.convert_ids_to_tokens(wanted)


@settings(max_examples=25)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_detokenize_is_the_way_back(server: Served, theirs: Any, text: str) -> None:
    tokens = server.post({"prompt": text + "<|im_start|>", "add_special_tokens": False}, "/tokenize").json()["tokens"]
    answer = server.post({"tokens": tokens}, "/detokenize").json()
    DetokenizeResponse.model_validate(answer, strict=True)
    assert answer["prompt"] == text + "<|im_start|>" == theirs.decode(tokens)


def test_nothing(server: Served) -> None:
    assert server.post({"prompt": "", "add_special_tokens": False}, "/tokenize").json()["tokens"] == []
    assert server.post({"tokens": []}, "/detokenize").json() == {"prompt": ""}


def test_the_tokenizer_of_bytes() -> None:
    with serve() as served:
        answer = served.post({"prompt": "aé", "return_token_strs": True}, "/tokenize").json()
        assert (answer["tokens"], answer["token_strs"]) == ([97, 195, 169], ["<0x61>", "<0xC3>", "<0xA9>"])
        assert served.post({"tokens": [97, 256]}, "/detokenize").json() == {"prompt": "a<|endoftext|>"}


def test_tokens_need_no_engine(folder: Path) -> None:
    with serve(tokenizer=load_tokenizer(str(folder)), vocab=259, held=True) as served:
        answer = served.post({"prompt": "a"}, "/tokenize").json()
        assert (answer["count"], answer["max_model_len"]) == (2, None)


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        ("/tokenize", {}, "prompt", "either a prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt", "either a prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt", "string"),
        ("/tokenize", {"messages": []}, "messages", "list of messages"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs", "boolean"),
        ("/detokenize", {}, "tokens", "missing"),
        ("/detokenize", {"tokens": "a"}, "tokens", "list of token IDs"),
        ("/detokenize", {"tokens": [1, None]}, "tokens", "list of token IDs"),
        ("/detokenize", {"tokens": [259]}, "tokens", "no token 259"),
        ("/detokenize", {"tokens": [-1]}, "tokens", "no token -1"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(server: Served, path: str, fields: Any, param: str, words: str) -> None:
    error = refusal(server.post(fields, path), 400)
    assert error["param"] == param
    assert words in error["message"]


def test_another_model_is_not_here(server: Served) -> None:
    for path, fields in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        assert refusal(server.post({"model": "gpt-5", **fields}, path), 404)["code"] == "model_not_found"
