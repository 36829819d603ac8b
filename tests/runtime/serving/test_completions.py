"""POST /v1/completions against completions of the fake engine, computed without the server."""

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from support.fake_engine import alone
from support.served import NAME, expected, serve, text_of

from mesh_transformer.data.tokens.tokenizer import load_tokenizer
from mesh_transformer.infer.requests import OPTIONS, SamplingParams
from mesh_transformer.runtime.serving.protocol import CompletionResponse


@pytest.fixture(scope="module")
def server():
    with serve() as served:
        yield served


def events(served, **fields) -> list[dict]:
    """The events of a stream; the last must be [DONE]."""
    with served.client.stream("POST", "/v1/completions", json={**fields, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    for chunk in chunks:
        CompletionResponse.model_validate(chunk, strict=True)
    return chunks


def test_a_text_is_completed(server):
    answer = server.complete("hello", seed=3)
    CompletionResponse.model_validate(answer, strict=True)
    assert answer["choices"] == [
        {"index": 0, "text": text_of(expected(b"hello", seed=3)), "logprobs": None, "finish_reason": "length"}
    ]
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 16, "total_tokens": 21}
    assert (answer["object"], answer["model"]) == ("text_completion", NAME)
    assert answer["id"].startswith("cmpl-")


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ("ab", [b"ab"]),
        (["ab", "c"], [b"ab", b"c"]),
        ([97, 98], [b"ab"]),
        ([[97, 98], [99]], [b"ab", b"c"]),
        ("", [[256]]),
        (["", "ü"], [[256], "ü".encode()]),
    ],
)
def test_every_form_of_prompt_with_two_samples_each(server, prompt, parts):
    answer = server.complete(prompt, n=2, seed=5, max_tokens=4)
    texts = [text_of(expected(part, seed=5 + i, max_tokens=4)) for part in parts for i in range(2)]
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, parts))


@contextmanager
def asked_of_the_engine(server) -> Iterator[list[SamplingParams]]:
    """The parameters of the sequences that the engine gets, in order."""
    seen, insert = [], server.engine.insert

    def recording(slot, prompt, params, **how):
        seen.append(params)
        insert(slot, prompt, params, **how)

    server.engine.insert = recording
    try:
        yield seen
    finally:
        server.engine.insert = insert


@pytest.mark.parametrize("fields", [{}, {"prompt": None}])
def test_without_a_prompt_a_new_text_begins(server, fields):
    asked = {"seed": 5, "max_tokens": 4, **fields}
    answer = server.post(asked).json()
    assert answer["choices"][0]["text"] == text_of(expected([256], seed=5, max_tokens=4))
    assert answer["usage"]["prompt_tokens"] == 1


@pytest.mark.parametrize("max_tokens", [7, 7.0, "7"])
def test_a_whole_number_of_tokens_in_every_spelling(server, max_tokens):
    answer = server.complete("a", seed=1, max_tokens=max_tokens, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 7


def test_the_path_may_name_the_model(server):
    """The route of clients from 2021: `engine=` in openai 0.28."""
    answer = server.post({"prompt": "a", "seed": 1}, f"/v1/engines/{NAME}/completions").json()
    assert answer["choices"] == server.complete("a", seed=1)["choices"]


def test_a_seed_is_that_of_the_first_sample_of_each_prompt(server):
    """The seeds of the other samples follow, and the seed after the largest one is 0."""
    with asked_of_the_engine(server) as seen:
        server.complete(["a", "b"], n=3, seed=2**32 - 2, max_tokens=2)
        server.complete("a", n=2, seed=-1, max_tokens=2)
    assert [params.seed for params in seen] == [2**32 - 2, 2**32 - 1, 0] * 2 + [2**32 - 1, 0]


def test_without_a_seed_every_choice_has_its_own(server):
    with asked_of_the_engine(server) as seen:
        for _ in range(2):
            server.complete(["hello"] * 4, n=4, max_tokens=1)
    # the probability that two of 32 seeds are equal is 1 in 10 million
    assert len({params.seed for params in seen}) == 32


def test_the_same_seed_gives_the_same_text_whatever_else_runs(server):
    prompts = [f"prompt {i % 7} {'x' * (i % 11)}" for i in range(40)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda p: server.complete(p, seed=len(p), max_tokens=9), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        wanted = text_of(expected(prompt.encode(), seed=len(prompt), max_tokens=9))
        assert answer["choices"][0]["text"] == wanted


def test_a_stream_is_the_same_text_in_pieces(server):
    whole = server.complete(["abc", "d"], n=2, seed=1, max_tokens=30)
    chunks = events(server, prompt=["abc", "d"], n=2, seed=1, max_tokens=30, stream_options={"include_usage": True})
    assert len(chunks) > 6
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for choice in whole["choices"]:
        mine = [c for chunk in chunks[:-1] for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in mine) == choice["text"]
        assert [piece["finish_reason"] for piece in mine] == [None] * (len(mine) - 1) + ["length"]


def test_a_stream_can_have_its_usage_so_far_in_each_event(server):
    usage = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(server, prompt="abc", seed=1, max_tokens=30, stream_options=usage)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[-1] == 30
    for chunk in chunks:
        assert chunk["usage"]["prompt_tokens"] == 3
        assert chunk["usage"]["total_tokens"] == 3 + chunk["usage"]["completion_tokens"]
    alone = events(server, prompt="a", stream_options={"continuous_usage_stats": True})
    assert all("usage" not in chunk for chunk in alone)


def test_a_stream_without_usage_has_none(server):
    assert all("usage" not in chunk for chunk in events(server, prompt="a"))


def ascii_seed(prompt: bytes, length: int = 30) -> tuple[int, str]:
    """A seed whose completion is a long text without an end-of-text token, and this completion."""
    for seed in range(256):
        tokens = [token.id for token in expected(prompt, seed=seed, max_tokens=length).tokens]
        if sum(32 <= t < 127 for t in tokens) >= length / 4 and 256 not in tokens and tokens[0] < 128:
            return seed, text_of(expected(prompt, seed=seed, max_tokens=length))
    raise AssertionError("no such seed")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_that_straddles_tokens_ends_the_text_before_it(server, stream):
    seed, text = ascii_seed(b"stop")
    start = next(i for i in range(6, len(text)) if text[i : i + 3].isascii() and text[i : i + 3].isprintable())
    stop = text[start : start + 3]
    fields = {"prompt": "stop", "seed": seed, "max_tokens": 30, "stop": ["never there", stop]}
    if stream:
        chunks = events(server, **fields)
        got = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        finish = chunks[-1]["choices"][0]["finish_reason"]
    else:
        choice = server.complete(**fields)["choices"][0]
        got, finish = choice["text"], choice["finish_reason"]
    assert (got, finish) == (text[: text.index(stop)], "stop")


def test_a_thousand_stop_strings(server):
    seed, text = ascii_seed(b"stop")
    stops = [f"no stop {i}" for i in range(999)]
    choice = server.complete("stop", seed=seed, max_tokens=30, stop=[*stops, text[6:8]])["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(text[6:8])], "stop")


def test_a_stop_string_in_the_prompt_stops_nothing(server):
    seed, text = ascii_seed(b"abc", 8)
    fields = {"prompt": "abc", "seed": seed, "max_tokens": 8, "stop": ["b", "c" + text[0]]}
    cut = text.index("b") if "b" in text else len(text)
    assert server.complete(**fields, echo=True)["choices"][0]["text"] == "abc" + text[:cut]
    assert server.complete(**fields)["choices"][0]["text"] == text[:cut]


def test_a_stop_string_at_the_very_end_is_a_stop(server):
    seed, text = ascii_seed(b"stop")
    tokens = [token.id for token in expected(b"stop", seed=seed, max_tokens=30).tokens]
    end = next(i for i in range(6, 30) if tokens[i] < 128 and tokens[i] not in tokens[:i])
    before = bytes(tokens[:end]).decode("utf-8", "replace")
    assert text.startswith(before)
    choice = server.complete("stop", seed=seed, max_tokens=end + 1, stop=chr(tokens[end]))["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (before, "stop")


def test_a_stop_string_within_min_tokens_is_text(server):
    seed, text = ascii_seed(b"stop")
    fields = {"prompt": "stop", "seed": seed, "max_tokens": 30, "stop": text[0], "ignore_eos": True}
    again = text.find(text[0], 5)
    wanted = (text[:again], "stop") if again > 0 else (text, "length")
    choice = server.complete(**fields, min_tokens=4)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == wanted
    assert server.complete(**fields)["choices"][0]["text"] == ""


def test_a_stop_token_ends_the_text_and_is_not_part_of_it(server):
    tokens = [token.id for token in expected(b"abc", seed=2, max_tokens=12).tokens]
    index = next(i for i in range(4, 12) if tokens[i] not in tokens[:i])
    answer = server.complete("abc", seed=2, max_tokens=12, stop_token_ids=[tokens[index]])
    choice = answer["choices"][0]
    wanted = expected(b"abc", seed=2, max_tokens=12, stop_token_ids=(256, tokens[index]))
    wanted.tokens.pop()
    assert (choice["text"], choice["finish_reason"]) == (text_of(wanted), "stop")
    assert answer["usage"]["completion_tokens"] == index + 1


def test_the_offset_of_a_stop_token_is_the_texts_end(server):
    seed, text = ascii_seed(b"abc", 12)
    tokens = [token.id for token in expected(b"abc", seed=seed, max_tokens=12).tokens]
    stop = next(i for i in range(4, 12) if tokens[i] not in tokens[:i] and tokens[i - 1] < 128)
    fields = {"seed": seed, "max_tokens": 12, "stop_token_ids": [tokens[stop]], "logprobs": 0}
    for before in ("", "abc"):
        choice = server.complete("abc", **fields, echo=bool(before))["choices"][0]
        assert choice["text"].startswith(before)
        assert text.startswith(choice["text"].removeprefix(before))
        assert choice["logprobs"]["text_offset"][-1] == len(choice["text"]) > len(before)


def test_the_end_of_text_ends_a_completion_unless_it_is_ignored(server):
    def ends(seed: int) -> int | None:
        ids = [t.id for t in expected(b"end", seed=seed, max_tokens=20).tokens]
        return len(ids) if ids[-1] == 256 and len(ids) < 15 else None

    seed = next(seed for seed in range(257) if ends(seed))
    stopped = server.complete("end", seed=seed, max_tokens=20)
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens"] == ends(seed)
    going_on = server.complete("end", seed=seed, max_tokens=20, ignore_eos=True)
    wanted = expected(b"end", seed=seed, max_tokens=20, stop_token_ids=())
    assert going_on["choices"][0] == {
        "index": 0, "text": text_of(wanted), "logprobs": None, "finish_reason": "length",
    }  # fmt: skip
    later = server.complete("end", seed=seed, max_tokens=20, min_tokens=15)
    wanted = expected(b"end", seed=seed, max_tokens=20, min_tokens=15)
    assert later["usage"]["completion_tokens"] == len(wanted.tokens) >= 15


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_the_tokens(server, stream):
    fields = {"prompt": "ab", "seed": 1, "max_tokens": 30, "logprobs": 3}
    wanted = expected(b"ab", seed=1, max_tokens=30, logprobs=3)
    text = text_of(wanted)
    if stream:
        parts = [chunk["choices"][0]["logprobs"] for chunk in events(server, **fields)]
        shown = {name: [x for part in parts for x in part[name]] for name in parts[0]}
    else:
        shown = server.complete(**fields)["choices"][0]["logprobs"]
    assert shown["token_logprobs"] == [token.logprob for token in wanted.tokens]
    for name, top, token in zip(shown["tokens"], shown["top_logprobs"], wanted.tokens, strict=True):
        assert top[name] == token.logprob
        assert sorted(top.values()) == sorted({lp for _, lp in token.top} | {token.logprob})
        assert len(top) == len({id for id, _ in token.top} | {token.id})
    assert len(shown["text_offset"]) == 30
    ids = [token.id for token in wanted.tokens]
    places = {shown["text_offset"][i]: ids[i] for i in range(1, 30) if ids[i - 1] < 128 and ids[i] < 128}
    assert len(places) > 3
    assert all(text[offset] == chr(id) for offset, id in places.items())


def test_logprobs_zero_reports_the_tokens_own(server):
    shown = server.complete("ab", seed=1, max_tokens=3, logprobs=0)["choices"][0]["logprobs"]
    assert [list(top) for top in shown["top_logprobs"]] == [[text] for text in shown["tokens"]]


def test_echo_with_logprobs_reports_the_prompt_too(server):
    choice = server.complete("abcdefghij" * 2, max_tokens=0, echo=True, logprobs=1)["choices"][0]
    wanted = expected(b"abcdefghij" * 2, max_tokens=0, logprobs=1, prompt_logprobs=True)
    assert (choice["text"], choice["finish_reason"]) == ("abcdefghij" * 2, "length")
    shown = choice["logprobs"]
    assert shown["tokens"] == list("abcdefghij" * 2)
    assert shown["text_offset"] == list(range(20))
    assert shown["token_logprobs"] == [None, *(token.logprob for token in wanted.prompt)]
    assert shown["top_logprobs"][0] is None
    for top, token in zip(shown["top_logprobs"][1:], wanted.prompt, strict=True):
        assert max(top.values()) == token.top[0][1]
        assert math.isfinite(max(top.values()))


def test_echo_goes_on_with_the_completion(server):
    seed, text = ascii_seed(b"abc", 6)
    choice = server.complete("abc", seed=seed, max_tokens=6, echo=True, logprobs=1)["choices"][0]
    assert choice["text"] == "abc" + text
    assert choice["logprobs"]["text_offset"][:4] == [0, 1, 2, 3]
    assert len(choice["logprobs"]["tokens"]) == 9
    plain = server.complete([97, 98, 99], seed=seed, max_tokens=6, echo=True)["choices"][0]
    assert (plain["text"], plain["logprobs"]) == ("abc" + text, None)
    streamed = events(server, prompt="abc", seed=seed, max_tokens=6, echo=True, logprobs=1)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == choice["text"]


def test_offsets_count_characters_and_pieces_of_one_share_its_own(server):
    prompt = "aé€😀b"
    shown = server.complete(prompt, max_tokens=0, echo=True, logprobs=0)["choices"][0]["logprobs"]
    assert shown["text_offset"] == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4]
    assert shown["tokens"][:3] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert shown["tokens"][-1] == "b"


def test_text_that_utf8_cannot_write_is_echoed_as_json(server):
    body = b'{"prompt": "a\\ud800", "max_tokens": 1, "echo": true}'
    response = server.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 200
    assert json.loads(response.text)["choices"][0]["text"].startswith("a\ud800")


def test_ignored_and_null_fields(server):
    answer = server.complete("a", seed=1, user="me", frobnicate=[1], temperature=None, stop=None, best_of=1, suffix="")
    assert answer["choices"][0]["text"] == text_of(expected(b"a", seed=1))


def test_sampling_fields_reach_the_engine(server):
    fields = {
        "temperature": 0.5, "top_p": 0, "top_k": 7, "min_p": 0.01, "repetition_penalty": 1.1, "presence_penalty": 0.2,
        "frequency_penalty": -0.3, "no_repeat_ngram_size": 3, "min_tokens": 2,
    }  # fmt: skip
    assert fields.keys() >= OPTIONS.keys()
    with asked_of_the_engine(server) as seen:
        server.complete(
            "a",
            **fields,
            logit_bias={"7": -100, "8": 2.5},
            seed=-1,
            stop_token_ids=[9],
        )
        server.complete("a", top_k=-1)
    assert {name: getattr(seen[0], name) for name in fields} == fields
    assert dict(seen[0].logit_bias) == {7: -100, 8: 2.5}
    assert set(seen[0].stop_token_ids) == {9, 256}
    assert (seen[0].seed, seen[1].top_k) == (2**32 - 1, 0)


def test_models(server):
    models = server.client.get("/v1/models").json()
    assert models["object"] == "list"
    (model,) = models["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == (NAME, "model", 64)
    assert server.client.get(f"/v1/models/{NAME}").json() == model
    assert server.complete("a", model=NAME)["model"] == NAME


def test_a_sequence_that_came_to_its_stop_is_computed_no_further():
    with serve(delay=0.02, slots=1) as slow:
        text = text_of(expected(b"a", seed=0, max_tokens=60))
        chunks = events(slow, prompt="a", seed=0, max_tokens=60, ignore_eos=True, stop=[text[1]])
        assert [c["choices"][0]["finish_reason"] for c in chunks].count("stop") == 1
        slow.complete("b", max_tokens=1)
        assert slow.metric("generated_tokens_total") < 30


def test_a_space_that_begins_a_completion_is_kept(tmp_path):
    """The tokenizer drops the space before the first word of a text. A completion is not at the start of a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = ["<unk>", "</s>", *(f"▁w{i}" for i in range(30)), *(f"v{i}" for i in range(5))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"})
    )
    tokenizer = load_tokenizer(str(tmp_path))
    with serve(tokenizer=tokenizer, vocab=len(words)) as spaced:
        prompt = tokenizer.encode("w1 w2")
        asked = (SamplingParams(max_tokens=9, seed=seed) for seed in range(len(words)))
        drawn = ((params.seed, [t.id for t in alone(prompt, params, len(words)).tokens]) for params in asked)
        seed, tokens = next((seed, ids) for seed, ids in drawn if 2 <= ids[0] < 32)  # a word with its space
        whole = tokenizer.decode([*prompt, *tokens])
        fields = {"seed": seed, "max_tokens": 9, "ignore_eos": True}
        assert whole.startswith("w1 w2 ")
        assert spaced.complete("w1 w2", **fields, echo=True)["choices"][0]["text"] == whole
        streamed = "".join(c["choices"][0]["text"] for c in events(spaced, prompt=prompt, **fields))
        assert streamed == whole.removeprefix("w1 w2")
