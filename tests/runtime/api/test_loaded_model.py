"""`load`, and the calls of a model, against transformers, the sampler and the server."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import hf_models, loopback, peft_folders
from support.chat_templates import chat_folder
from support.commands import write_run
from support.evaluated import HarnessRequest
from support.hf_folders import transformers_logits
from support.waiting import until

import mesh_transformer
from mesh_transformer import Completion, Model
from mesh_transformer.checkpoint.open import Checkpoint
from mesh_transformer.errors import UserError
from mesh_transformer.runtime.convert import to_hf
from mesh_transformer.runtime.sampling.sampler import SampleRequest, sample_prompts
from mesh_transformer.runtime.session.weights import config_of

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_greedy_tokens_are_those_of_transformers(model_folder: Path, model: Model) -> None:
    completion = model.generate("A day", **GREEDY)
    prompt = model.encode("A day")
    logits = transformers_logits(model_folder, np.asarray([prompt + completion.tokens]))[0]
    expected = logits[len(prompt) - 1 : -1]
    assert completion.tokens == expected.argmax(-1).tolist()
    own = log_softmax(expected)[np.arange(12), completion.tokens]
    assert completion.logprobs == pytest.approx(own, abs=1e-4)
    assert (completion.prompt_tokens, completion.finish_reason) == (len(prompt), "length")
    assert str(completion) == completion.text == model.decode(completion.tokens)


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"fsdp": 2, "tp": 2}], ids=str)
def test_a_mesh_gives_the_tokens_of_the_sampler_and_of_the_server(model_folder: Path, model: Model, mesh: Any) -> None:
    mesh = {**mesh, "dp": 8 // int(np.prod(list(mesh.values())))}
    with mesh_transformer.load(model_folder, mesh=mesh, slots=2) as split, split.serve(port=0) as server:
        tokens = split.generate("A day", **GREEDY).tokens
        body = {"prompt": "A day", "return_token_ids": True, **GREEDY}
        served = loopback.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]["token_ids"]
    config = config_of(None, [f"mesh.{axis}={size}" for axis, size in mesh.items()], Checkpoint.open(str(model_folder)))
    ((sample,),) = sample_prompts(config, SampleRequest(temperature=0, max_new_tokens=12), str(model_folder), ["A day"])
    assert tokens == model.generate("A day", **GREEDY).tokens == served
    assert sample.tokens == tokens[: len(sample.tokens)]


def test_a_list_gives_a_list_and_n_gives_n(model: Model) -> None:
    fields: dict[str, Any] = {"seed": 3, "max_tokens": 4, "ignore_eos": True}
    single = model.generate("one", **fields)
    first, second = model.generate(["one", "two"], **fields, n=2)
    assert [len(first), len(second)] == [2, 2]
    assert first[0].tokens == single.tokens != first[1].tokens
    ids = model.encode("one")
    for given in (ids, np.asarray(ids), tuple(ids)):
        assert model.generate(given, **fields).tokens == single.tokens
    for lists in (np.asarray([ids]), [np.asarray(ids)]):
        assert [each.tokens for each in model.generate(lists, **fields)] == [single.tokens]
    assert model.generate([]) == []
    # more than one request of the server may have
    many = model.generate([*["two"] * 130, "one"], **fields)
    assert (len(many), many[-1].tokens) == (131, single.tokens)


def test_max_tokens_are_256_or_what_fits(model: Model) -> None:
    assert model.context == 160
    completion = model.generate("x" * 150, ignore_eos=True, temperature=0)
    assert (len(completion.tokens), completion.prompt_tokens) == (9, 151)


def test_alternatives_and_stops(model: Model) -> None:
    completion = model.generate("A day", **GREEDY, logprobs=3)
    for token, logprob, top in zip(completion.tokens, completion.logprobs, completion.top_logprobs, strict=True):
        assert len(top) == 3
        assert next(iter(top.items())) == (token, logprob)
    stop = completion.text[3:5]
    stopped = model.generate("A day", **GREEDY, stop=stop)
    assert stopped.text == completion.text[: completion.text.index(stop)]
    assert (stopped.finish_reason, stopped.top_logprobs[0]) == ("stop", {})
    # with the tokens of the stop text
    assert stopped.tokens == completion.tokens[: len(stopped.tokens)]
    assert stop in model.decode(stopped.tokens)


def test_a_chat_is_the_server_s(model: Model) -> None:
    answer = model.chat(MESSAGES, temperature=0, max_tokens=8)
    with model.serve(port=0) as server:
        body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 8, "return_token_ids": True}
        choice = loopback.post(f"{server.url}/v1/chat/completions", json=body).json()["choices"][0]
    assert (answer.text, answer.tokens) == (choice["message"]["content"], choice["token_ids"])
    as_text = model.chat("Hello", temperature=0, max_tokens=3)
    assert as_text.tokens == model.chat([{"role": "user", "content": "Hello"}], temperature=0, max_tokens=3).tokens


@pytest.mark.parametrize("given", ["A day", MESSAGES], ids=["prompt", "messages"])
def test_a_stream_joins_to_the_text(model: Model, given: Any) -> None:
    fields = {**GREEDY, "max_tokens": 40}
    pieces = list(model.stream(given, **fields))
    call = model.generate if isinstance(given, str) else model.chat
    assert "".join(pieces) == call(given, **fields).text
    assert len(pieces) > 1


def test_leaving_a_stream_frees_its_slot(model: Model) -> None:
    # both slots are taken, and left in both ways
    for _ in range(3):
        first, second = model.stream("A day", ignore_eos=True), model.stream("A day", ignore_eos=True)
        next(first), next(second)
        first.close()
        for _ in second:
            break
        del second
    assert len(model.generate("A day", **GREEDY).tokens) == 12
    assert not model._loop.busy


def test_scores_are_transformers(model_folder: Path, model: Model) -> None:
    text = "It was a bright cold day."
    score = model.score(text)
    ids = model.encode(text)
    expected = log_softmax(transformers_logits(model_folder, np.asarray([ids]))[0])[np.arange(len(ids) - 1), ids[1:]]
    # the tokenizer writes a start token, so that all tokens of the text are scored
    assert score.tokens == ids[1:] == model.encode(text, add_special_tokens=False)
    assert score.logprobs == pytest.approx(expected, abs=1e-4)
    assert score.total == pytest.approx(expected.sum(), abs=1e-3)
    assert model.score([text, text]) == [score, score]


@pytest.mark.parametrize("context", ["The sky is ", "The sky is", "", "<|endoftext|>The"])
def test_a_completion_is_split_as_by_the_harness(model: Model, context: str) -> None:
    pytest.importorskip("lm_eval")
    from mesh_transformer.runtime.evaluation.adaptor import HarnessLM

    class Recorder:
        tokenizer, context = model._served.tokenizer, model.context
        queries: list[Any]

        def check(self, tokens: Any) -> None:
            pass

        def log_likelihoods(self, queries: Any) -> list[tuple[float, bool]]:
            self.queries = list(queries)
            return [(0.0, False)] * len(self.queries)

    recorder: Any = Recorder()
    HarnessLM(recorder).loglikelihood([HarnessRequest((context, " blue"))])
    (query,) = recorder.queries
    score = model.score(context, " blue")
    assert score.tokens == list(query.continuation)
    whole = model.score(model.decode([*query.context, *query.continuation])).logprobs
    assert score.logprobs == pytest.approx(whole[-len(score.tokens) :], abs=1e-5)


def test_states_are_those_of_transformers(model_folder: Path, model: Model) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(model_folder, dtype="float32", attn_implementation="eager")
    for text in ("A day", "x" * 100):
        with torch.no_grad():
            output = theirs(torch.tensor([model.encode(text)]), output_hidden_states=True)
        states = output.hidden_states[-1][0].numpy()
        np.testing.assert_allclose(model.embed(text, pool=None), states, atol=1e-4)
        np.testing.assert_allclose(model.embed(text), states.mean(0), atol=1e-4)
        np.testing.assert_allclose(model.embed([text], pool="last")[0], states[-1], atol=1e-4)
    assert model.embed("A day").dtype == np.float32


def test_states_of_experts_do_not_see_padding(tmp_path: Path) -> None:
    import torch

    theirs = hf_models.save("mixtral", chat_folder(tmp_path / "mixtral"))
    with mesh_transformer.load(tmp_path / "mixtral", slots=1) as model:
        # 20 tokens, padded to 32
        text = "It was a cold day. "
        with torch.no_grad():
            output = theirs(torch.tensor([model.encode(text)]), output_hidden_states=True)
        np.testing.assert_allclose(model.embed(text, pool=None), output.hidden_states[-1][0].numpy(), atol=1e-4)


def test_save_writes_what_load_reads(model: Model, tmp_path: Path) -> None:
    expected = model.generate("A day", **GREEDY).tokens
    hugging_face = model.save(str(tmp_path / "hf"), dtype="float32")
    native = model.save(str(tmp_path / "native"), format="native")
    for path in (hugging_face, native):
        with mesh_transformer.load(path, slots=1) as copied:
            assert copied.generate("A day", **GREEDY).tokens == expected
    with pytest.raises(UserError, match="exists"):
        model.save(tmp_path / "hf")


def test_a_model_with_adapters_gives_the_tokens_of_the_merged_one(model_folder: Path, tmp_path: Path) -> None:
    peft_folders.write_adapters(model_folder, tmp_path / "adapter")
    to_hf(None, [], str(model_folder), str(tmp_path / "merged"), adapter=str(tmp_path / "adapter"), merge=True)
    ways = {"given": (model_folder, tmp_path / "adapter"), "alone": (tmp_path / "adapter", None)}
    tokens = {}
    for way, (checkpoint, adapter) in {**ways, "merged": (tmp_path / "merged", None)}.items():
        with mesh_transformer.load(checkpoint, adapter=adapter, slots=1, context=64) as loaded:
            tokens[way] = loaded.generate([5, 6, 7], **GREEDY).tokens
    assert tokens["given"] == tokens["alone"] == tokens["merged"]
    assert len(tokens["given"]) == 12


def test_threads_and_a_running_asyncio_loop(model: Model) -> None:
    expected = [model.generate(text, **GREEDY) for text in ("a", "b", "c")]
    results: dict[str, Completion] = {}

    def call(text: str) -> None:
        results[text] = model.generate(text, **GREEDY)

    threads = [threading.Thread(target=call, args=(text,)) for text in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[text].tokens for text in ("a", "b", "c")] == [each.tokens for each in expected]

    async def inside() -> Completion:
        completion: Completion = model.generate("a", **GREEDY)
        return completion

    assert asyncio.run(inside()).tokens == expected[0].tokens


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda m: m.generate("a", temprature=1), TypeError, "no field 'temprature' (did you mean temperature?)"),
        (lambda m: m.generate("a", stream=True), TypeError, "use model.stream"),
        (lambda m: m.chat("a", echo=True), TypeError, "add the prompt to the text"),
        (lambda m: m.generate("a", temperature=-1), UserError, "temperature must be 0 (greedy) or more"),
        (lambda m: m.generate("a", top_p="x"), UserError, "top_p: input should be a valid number; got 'x'"),
        (lambda m: m.generate("a", best_of=3), UserError, "best_of 3 must be n (1)"),
        (lambda m: m.generate("x" * 200), UserError, "the prompt has 201 tokens, more than the context of 160"),
        (lambda m: m.generate(["a", [300]]), UserError, "there is no token 300"),
        (lambda m: m.generate(["a", "b" * 159]), UserError, "fills the context"),
        (lambda m: m.generate(5), UserError, "a prompt is a text, a list of token IDs"),
        (lambda m: m.chat([]), UserError, "messages"),
        (lambda m: m.stream(["a", "b"]), UserError, "a stream has one prompt"),
        (lambda m: m.stream("a", n=2), UserError, "a stream has one completion"),
        (lambda m: m.score(""), UserError, "has no token to score"),
        (lambda m: m.score("a", ""), UserError, "has no token to score"),
        (lambda m: m.score("a" * 200), UserError, "more than the context of 160"),
        (lambda m: m.score(["a"], ["b", "c"]), UserError, "as many completions"),
        (lambda m: m.embed("a", pool="max"), UserError, 'must be "mean", "last" or None'),
        (lambda m: m.embed("a" * 200), UserError, "201 tokens: the context takes 1 to 160"),
        (lambda m: m.embed(5), UserError, "embed takes a text, or a list of texts; got 5"),
        (lambda m: m.encode(["a"]), UserError, "encode takes a text"),
        (lambda m: m.score(["a", "b"], "cd"), UserError, "as many completions"),
        (lambda m: m.save("x", format="gguf"), UserError, 'must be "hf" or "native"'),
        (lambda m: m.serve(port=99999), UserError, "--port 99999: must be 0 (any) to 65535"),
    ],
)
def test_mistakes_of_calls(model: Model, call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as raised:
        call(model)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"slots": 0}, "slots 0: must be 1 to 1024"),
        (
            {"context": 161},
            'context 161: must be 1 to 160, the model\'s; a longer one needs overrides=["model.seq=161"]',
        ),
        ({"mesh": {"tp": 3}}, "mesh.tp 3"),
        ({"mesh": {"pt": 2}}, "mesh.pt"),
        ({"dtype": "float8"}, "compute.dtype"),
        ({"overrides": ["modl.seq=9"]}, "modl"),
        ({"overrides": "model.seq=9"}, "give a list of texts"),
        ({"slots": "4"}, "slots '4': must be a whole number"),
        ({"mesh": "tp=2"}, 'such as {"tp": 2}'),
    ],
)
def test_mistakes_of_load(model_folder: Path, arguments: Any, words: str) -> None:
    with pytest.raises(UserError) as raised:
        mesh_transformer.load(model_folder, **arguments)
    assert words in str(raised.value)


def test_a_model_without_chat_template_and_a_closed_one(model_folder: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    for file in model_folder.iterdir():
        if file.name != "chat_template.jinja":
            (plain / file.name).symlink_to(file)
    model = mesh_transformer.load(plain, slots=1)
    with pytest.raises(UserError, match=r"no chat template: give the text to model\.generate"):
        model.chat("Hello")
    stream = model.stream("A day")
    model.close()
    model.close()
    for call in (
        lambda: model.generate("a"),
        lambda: next(stream),
        lambda: model.serve(port=0),
        lambda: model.embed("a"),
    ):
        with pytest.raises(UserError, match="the model is closed"):
            call()


def test_an_interrupted_call_leaves_the_model_as_it_is(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the engine's thread computes states: the next calls are answered."""
    states, begun, go = model._embedder.states, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        begun.set()
        go.wait(60)
        return states(*arguments)

    monkeypatch.setattr(model._embedder, "states", slow)
    # two are cancelled: one that is computed, and one that waits
    tasks = [asyncio.run_coroutine_threadsafe(model._states([0, 5]), model._background._loop) for _ in range(2)]
    begun.wait(60)
    for task in tasks:
        task.cancel()
    go.set()
    monkeypatch.undo()
    assert model.embed("A day").shape == (84,)
    assert len(model.generate("A day", **GREEDY).tokens) == 12


def test_a_call_that_waits_ends_when_the_model_is_closed(model_folder: Path) -> None:
    model = mesh_transformer.load(model_folder, slots=1)
    stream = model.stream("A day", ignore_eos=True)
    next(stream)
    failures: list[Exception] = []

    def wait() -> None:
        try:
            # the only slot is taken
            model.generate("A day", **GREEDY)
        except UserError as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: len(model._loop._live) == 2 or not thread.is_alive())
    model.close()
    thread.join(60)
    assert [str(failure) for failure in failures] in ([], ["the model is closed: load it again"])
    assert not thread.is_alive()


def test_save_keeps_the_tokenizer_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    run = mesh_transformer.fit("config.json", optimizer={"total_steps": 1}, data={"val_set": {}})
    with run.load(slots=1) as model:
        expected = model.generate("12", **GREEDY).tokens
        paths = [model.save(tmp_path / "hf", dtype="float32"), model.save(tmp_path / "native", format="native")]
    for path in paths:
        with mesh_transformer.load(path, slots=1) as copied:
            assert copied.generate("12", **GREEDY).tokens == expected


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint|there is no"):
        mesh_transformer.load(tmp_path / "none")
