"""The official openai client against the server."""

import openai
import pytest
from support.served import KEY, NAME, expected, serve, text_of


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
    assert caught.value.param == "prompt"
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
