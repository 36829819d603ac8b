"""The engine against the original program, against a reference in numpy, and with different requests in the other
slots."""

import functools
from typing import Any

import golden
import jax
import numpy as np
import pytest
from support import sampling_reference as reference
from support.builders import TINY, program
from support.engines import CASES, GREEDY, SAMPLED, SLOTS, Completion, complete, engine_of, prompt_of

from mesh_transformer.infer.engine import SlotEngine
from mesh_transformer.infer.program_table import Prefill, Program
from mesh_transformer.infer.requests import (
    EmittedToken,
    PrefillResult,
    PromptChunk,
    SamplingParams,
)


@functools.cache
def tiny(*overrides: str) -> tuple[Any, Any, SlotEngine]:
    run = program(TINY, "mesh.tp=1", "model.seq=64", *overrides)
    params = run.init(jax.random.key(3)).params
    return run, params, engine_of(run, params)


@pytest.mark.parametrize("mesh", [["mesh.tp=1"], ["mesh.tp=8"], ["mesh.fsdp=2", "mesh.tp=2"]], ids="-".join)
def test_greedy_equals_the_original_on_any_mesh(original, mesh):
    raw = golden.config(original / "configs/tiny_mp8.json")
    run = program(raw, *mesh, devices=1 if mesh == ["mesh.tp=1"] else 8)
    params = golden.read_params(original / "mp8/ckpt_full/step_5", run.config.model)
    params = jax.device_put(params, run.state_shardings.params)
    expected = np.load(original / "mp8/f32/eval.npz")
    _check_golden(engine_of(run, params, len(expected["gen/ctx"])), expected, "gen/greedy_top_p0/", 16)


@pytest.mark.parametrize("variant", ["rotary_layernorm", "rotary_rmsnorm-bias", "t5_layernorm"])
def test_greedy_of_the_variants_equals_the_original(original, variant):
    run = program(golden.config(original / f"configs/variant_{variant}.json"), "mesh.tp=1")
    params = golden.read_variant(original / "variants" / variant, run.config.model)
    expected = np.load(original / "variants" / variant / "eval_f32.npz")
    _check_golden(engine_of(run, params, len(expected["gen/ctx"])), expected, "gen/", 8)


def _check_golden(engine: SlotEngine, expected: Any, prefix: str, new: int) -> None:
    contexts, lengths = expected["gen/ctx"], expected["gen/ctx_length"]
    prompts = [row[len(row) - n :].tolist() for row, n in zip(contexts, lengths, strict=True)]  # padded on the left
    sampling = SamplingParams(max_tokens=new, temperature=0)
    made = complete(engine, [(prompt, sampling) for prompt in prompts])
    tokens, logits = expected[f"{prefix}tokens"], expected[f"{prefix}logits"]
    logprobs = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), tokens[..., None].astype(int), -1)
    for row, completion in enumerate(made):
        assert completion.ids == tokens[row].tolist()
        found = [token.logprob for token in completion.tokens]
        np.testing.assert_allclose(found, logprobs[row, :, 0], rtol=0, atol=2e-5)  # float32, two programs
        assert completion.finish_reason == "length"


@functools.cache
def by_definition(name: str) -> tuple[list[int], list[float], str]:
    run, params, _ = tiny()
    return reference.complete(run, params, prompt_of(1, 21), CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_each_option_equals_its_definition_whatever_else_is_in_the_batch(name: str) -> None:
    """The requests in the other slots use all options, with other prompts."""
    _, _, engine = tiny()
    tokens, logprobs, finish = by_definition(name)
    others = [(prompt_of(seed, 9 + seed), CASES[other]) for seed, other in enumerate(["all filters", "2-grams"])]
    for requests in ([(prompt_of(1, 21), CASES[name])], [*others, (prompt_of(1, 21), CASES[name])]):
        made = complete(engine, requests)[-1]
        assert made.ids == tokens
        np.testing.assert_allclose([t.logprob for t in made.tokens], logprobs, rtol=0, atol=2e-5)
        assert made.finish_reason == finish


def test_the_options_matter() -> None:
    """Without this, the test above could not fail."""
    plain = SamplingParams(max_tokens=24, temperature=0)
    run, params, _ = tiny()
    greedy = reference.complete(run, params, prompt_of(1, 21), plain)[0]
    for name in (
        "repetition",
        "presence",
        "frequency",
        "bias",
        "allowed tokens",
        "bad words",
        "1-grams",
        "2-grams",
        "3-grams",
    ):
        assert by_definition(name)[0] != greedy[: len(by_definition(name)[0])], name
    assert by_definition("stop token")[2] == by_definition("min_tokens")[2] == "stop"
    for name in ("no float32 temperature", "least temperature", "no nucleus"):
        assert by_definition(name)[0] == greedy[:12], name
    assert by_definition("hottest")[0] != greedy[:12]
    assert len(by_definition("min_tokens")[0]) == 10
    assert 1 < len(by_definition("stop token")[0]) < 24


def test_a_prompt_in_pieces_gives_the_same_tokens() -> None:
    run, params, whole = tiny()
    chunks = engine_of(run, params, slots=2, max_prefill_tokens=32)
    prompt = prompt_of(7, 50)
    (expected,) = complete(whole, [(prompt, GREEDY)])
    (found,) = complete(chunks, [(prompt, GREEDY)])
    assert found.ids == expected.ids


def test_steps_of_a_call_do_not_matter() -> None:
    _, _, engine = tiny()
    requests = [(prompt_of(i, 8 + i), SamplingParams(max_tokens=5 + 3 * i, seed=i)) for i in range(SLOTS)]
    expected = [completion.ids for completion in complete(engine, requests, steps=1)]
    assert [completion.ids for completion in complete(engine, requests, steps=16)] == expected
    assert [len(ids) for ids in expected] == [5, 8, 11, 14]


def test_a_reused_prefix_gives_the_same_tokens() -> None:
    """The prefix comes from another slot, or from the slot itself. Half of the source's completion is reused too."""
    _, _, engine = tiny()
    first, tail = prompt_of(3, 20), prompt_of(4, 6)
    (done,) = complete(engine, [(first, GREEDY)])
    prompt = first + done.ids[:5] + tail
    (expected,) = complete(engine, [(prompt, SAMPLED)])
    for source, slot in ((0, 2), (0, 0)):
        complete(engine, [(first, GREEDY)])  # slot 0 has its prefix again
        engine.insert(slot, prompt, SAMPLED, source=source, reused=25)
        made = Completion()
        made.add(engine.prefill([PromptChunk(slot, 25, len(prompt))])[0].first)
        for one in engine.generate(16)():
            made.add(one)
        engine.release(slot)
        assert made.ids == expected.ids


def test_a_released_slot_keeps_its_cache_while_others_run() -> None:
    _, _, engine = tiny()
    first = prompt_of(3, 20)
    (expected,) = complete(engine, [(first + [9], GREEDY)])
    engine.insert(1, first, GREEDY, source=None, reused=0)
    engine.prefill([PromptChunk(1, 0, 20)])
    engine.release(1)  # in the middle of its completion
    complete(engine, [(prompt_of(5, 40), SAMPLED)])
    engine.insert(1, first + [9], GREEDY, source=1, reused=20)
    made = Completion()
    made.add(engine.prefill([PromptChunk(1, 20, 21)])[0].first)
    for one in engine.generate(16)():
        made.add(one)
    engine.release(1)
    assert made.ids == expected.ids


def test_logprobs_of_prompt_and_completion_with_alternatives() -> None:
    run, params, _ = tiny()
    engine = engine_of(run, params, slots=2, max_prefill_tokens=32)
    prompt = prompt_of(6, 40)
    sampling = SamplingParams(max_tokens=4, temperature=0, logprobs=1, prompt_logprobs=3)
    (made,) = complete(engine, [(prompt, sampling)])
    tokens = np.asarray([prompt + made.ids], np.int32)
    logits, _ = run.model.apply(params, tokens)
    logprobs = np.asarray(jax.nn.log_softmax(logits))[0]
    # the largest of the request's two numbers is computed, each list has its own
    assert [len(token.top) for token in made.tokens] == [1] * 4
    ranks = [int((row >= row[token.id]).sum()) for row, token in zip(logprobs, made.prompt, strict=False)]
    assert [token.rank for token in made.prompt] == ranks
    found = made.prompt + made.tokens
    assert [token.id for token in found] == tokens[0, 1:].tolist()
    for at, token in enumerate(found):
        order = np.argsort(-logprobs[at], kind="stable")[: 3 if at < len(made.prompt) else 1]
        assert [id for id, _ in token.top] == order.tolist()
        np.testing.assert_allclose([value for _, value in token.top], logprobs[at][order], rtol=0, atol=2e-5)
        np.testing.assert_allclose(token.logprob, logprobs[at][token.id], rtol=0, atol=2e-5)


def test_a_call_is_read_after_another_request_got_the_slot() -> None:
    """Two calls are started before the first one is read, one request is cancelled between, the next one takes its
    slot."""
    _, _, engine = tiny()
    prompts = [prompt_of(seed, 20) for seed in range(3)]
    sampling = SamplingParams(max_tokens=12, temperature=1, seed=5)
    expected = [complete(engine, [(prompt, sampling)])[0].ids for prompt in prompts]
    made = [Completion() for _ in prompts]

    def start(request: int, slot: int) -> None:
        engine.insert(slot, prompts[request], sampling, source=None, reused=0)
        made[request].add(engine.prefill([PromptChunk(slot, 0, 20)])[0].first)

    def read(tokens: list[EmittedToken], *request_of: int) -> None:
        for one in tokens:
            made[request_of[one.slot]].add(one)

    start(0, slot=0)
    start(1, slot=1)
    calls = [engine.generate(3), engine.generate(3)]
    read(calls[0](), 0, 1)
    engine.release(0)
    start(2, slot=0)
    tokens = calls[1]()
    assert {one.slot for one in tokens} == {1}
    read(tokens, 2, 1)
    while tokens := engine.generate(4)():
        read(tokens, 2, 1)
    engine.release(0)
    engine.release(1)
    assert [one.ids for one in made] == [expected[0][:4], expected[1], expected[2]]


def test_a_prompt_alone() -> None:
    _, _, engine = tiny()
    sampling = SamplingParams(max_tokens=0, prompt_logprobs=0)
    engine.insert(0, [1, 2, 3], sampling, source=None, reused=0)
    (found,) = engine.prefill([PromptChunk(0, 0, 3)])
    assert found == PrefillResult(None, found.prompt)
    assert [token.id for token in found.prompt] == [2, 3]
    assert engine.generate(4)() == []
    engine.release(0)


def test_a_completion_may_fill_the_context() -> None:
    run, params, engine = tiny()
    prompt = prompt_of(8, run.config.model.seq - 10)
    (made,) = complete(engine, [(prompt, SamplingParams(max_tokens=10, temperature=0))])
    expected, _, _ = reference.complete(run, params, prompt, SamplingParams(max_tokens=10, temperature=0))
    assert made.ids == expected


@pytest.mark.parametrize("overrides", [("model.pe=fixed", "model.norm=scalenorm-bias"), ("model.pe=t5",)])
def test_other_models_equal_their_definition(overrides: tuple[str, ...]) -> None:
    run, params, engine = tiny(*overrides)
    (made,) = complete(engine, [(prompt_of(2, 11), GREEDY)])
    assert made.ids == reference.complete(run, params, prompt_of(2, 11), GREEDY)[0]


def test_prompts_of_one_size_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do if they fill more than half of a program's rows."""
    _, _, engine = tiny()
    calls = []
    call = engine._call

    def recorded(program: Program, *arguments: Any) -> Any:
        if isinstance(program, Prefill):
            calls.append((arguments[0].count_B.tolist(), program.length))
        return call(program, *arguments)

    monkeypatch.setattr(engine, "_call", recorded)
    prompts = [prompt_of(seed, 20 + seed) for seed in range(3)]
    together = complete(engine, [(prompt, GREEDY) for prompt in prompts])
    assert calls == [([20, 21, 22, 0], 64)]
    calls.clear()
    alone = [complete(engine, [(prompt, GREEDY)])[0] for prompt in prompts]
    assert calls == [([20], 64), ([21], 64), ([22], 64)]
    assert [made.ids for made in together] == [made.ids for made in alone]
