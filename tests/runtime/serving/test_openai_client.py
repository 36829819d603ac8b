"""The official openai client against the server."""

import openai
import pytest
from support.chat_templates import chat_folder
from support.fake_engine import alone
from support.served import KEY, NAME, expected, serve, text_of

from mesh_transformer.data.tokens.tokenizer import load_tokenizer
from mesh_transformer.infer.requests import SamplingParams


@pytest.fixture(scope="module")
def server():
    with serve(keys=[KEY], slots=2, max_queue=2) as served:
        yield served


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def test_a_completion(client):
    answer = client.completions.create(
        model=NAME,
        prompt="hello",
        max_tokens=7,
        seed=4,
        logprobs=2,
        user="me",
        extra_body={"ignore_eos": True},
    )
    wanted = expected(b"hello", max_tokens=7, seed=4, stop_token_ids=())
    assert answer.choices[0].text == text_of(wanted)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs.token_logprobs == [token.logprob for token in wanted.tokens]
    assert answer.usage.total_tokens == 12


def test_a_stream_with_usage(client):
    stream = client.completions.create(
        model=NAME, prompt="hello", max_tokens=20, seed=4, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.text for chunk in chunks for c in chunk.choices) == text_of(
        expected(b"hello", max_tokens=20, seed=4)
    )
    assert chunks[-1].usage.prompt_tokens == 5


def test_models(client):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "mesh-transformer"


def test_errors_are_the_clients_own_kinds(client, server):
    with pytest.raises(openai.BadRequestError, match="more than the context of 64") as caught:
        client.completions.create(model=NAME, prompt="hello", max_tokens=60)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-5", prompt="hello")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError, match="at most 4"):
        client.completions.create(model=NAME, prompt="hello", n=5)


def test_a_stream_that_is_closed_frees_its_slot(client, server):
    server.engine.delay = 0.02
    try:
        with client.completions.create(
            model=NAME, prompt="a", max_tokens=60, stream=True, extra_body={"ignore_eos": True}
        ) as stream:
            next(iter(stream))
            assert server.engine.in_use
        answer = client.completions.create(model=NAME, prompt=["a", "b"], max_tokens=2)
        assert len(answer.choices) == 2
        assert not server.engine.in_use
    finally:
        server.engine.delay = 0.0


CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
TEXT = "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(str(chat_folder(tmp_path_factory.mktemp("chat"))))


@pytest.fixture(scope="module")
def chats(tokenizer):
    with (
        serve(keys=[KEY], tokenizer=tokenizer, vocab=259, context=192) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0) as made,
    ):
        yield made.chat.completions


@pytest.fixture(scope="module")
def message(tokenizer):
    """The text after CHAT with the seed 4."""
    params = SamplingParams(max_tokens=20, seed=4, stop_token_ids=(0, 2), logprobs=2)
    return tokenizer.decode(token.id for token in alone(tokenizer.encode(TEXT), params, 259).tokens)


def test_a_chat(chats, message):
    answer = chats.create(
        model=NAME, messages=CHAT, max_completion_tokens=20, seed=4, logprobs=True, top_logprobs=2, n=2, user="me",
        tools=openai.omit, response_format={"type": "text"}, extra_body={"top_k": -1},
    )  # fmt: skip
    first, second = answer.choices
    assert (first.message.role, first.message.content, first.finish_reason) == ("assistant", message, "length")
    assert second.message.content != message
    assert first.message.tool_calls is None
    assert len(first.logprobs.content) == 20
    assert [len(token.top_logprobs) for token in first.logprobs.content] == [2] * 20
    assert bytes(b for token in first.logprobs.content for b in token.bytes).decode("utf-8", "replace") == message
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(tokens_of_chat()), 40)


def tokens_of_chat():
    """One token for each special name and each other byte."""
    return TEXT.replace("<|im_start|>", "s").replace("<|im_end|>", "e").encode()


def test_a_chat_in_pieces(chats, message):
    found = list(
        chats.create(
            model=NAME, messages=CHAT, max_tokens=20, seed=4, stream=True, stream_options={"include_usage": True}
        )
    )
    assert found[0].choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for event in found for choice in event.choices) == message
    assert [event.choices[0].finish_reason for event in found[:-1]] == [None] * (len(found) - 2) + ["length"]
    assert found[-1].usage.completion_tokens == 20


def test_the_clients_own_stream_of_a_chat(chats, message):
    """It joins the events to a message, and refuses one that a limit cut off."""
    stop = next(character for character in message[3:] if character.isascii())
    with chats.stream(model=NAME, messages=CHAT, max_tokens=20, seed=4, stop=stop) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == message[: message.index(stop)]


def test_the_errors_of_a_chat_are_the_clients_own_kinds(chats, client):
    with pytest.raises(openai.BadRequestError, match="does not use tools") as caught:
        chats.create(model=NAME, messages=CHAT, tools=[{"type": "function", "function": {"name": "f"}}])
    assert caught.value.param == "tools"
    with pytest.raises(openai.BadRequestError, match="plain text"):
        chats.create(model=NAME, messages=CHAT, response_format={"type": "json_object"})
    with pytest.raises(openai.BadRequestError, match=r"no chat template.*POST /v1/completions"):
        client.chat.completions.create(model=NAME, messages=CHAT)
