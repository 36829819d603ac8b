"""The scheduler on an engine that checks all calls. Each token is compared with that of the request alone."""

import dataclasses
import math

import pytest
from support.collector import Collector
from support.fake_engine import Completion, alone

from mesh_transformer.infer.requests import SamplingParams
from mesh_transformer.infer.scheduler import QueueFull

PROMPT = [(7 * i * i + 3) % 101 for i in range(30)]
OTHER = [(5 * i + 60) % 101 for i in range(30)]


def params(max_tokens: int = 4, **others) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **others)


def test_the_oracle_is_what_it_says():
    """The peak is (1*5*7 + 0 + 2*3*7 + 1) % 11 = 1, and the scores decrease by 0.25 for each token below it."""
    first = alone([5, 3], params(1, logprobs=3), vocab=11).tokens[0]
    assert [token for token, _ in first.top] == [1, 0, 10]
    assert first.id == 1
    assert first.logprob == pytest.approx(math.log((1 - math.exp(-1 / 4)) / (1 - math.exp(-11 / 4))))
    assert first.top[1][1] == pytest.approx(first.logprob - 0.25)
    assert alone([5, 3], params(3, seed=1, stop_token_ids=(0,)), vocab=11).finish_reason == "stop"
    assert alone([5, 3], params(1, min_tokens=1, stop_token_ids=(1,)), vocab=11).tokens[0].id == 0


def test_a_long_prompt_does_not_stop_those_that_run():
    c = Collector(slots=2, max_prefill_tokens=10)
    c.submit(0, PROMPT[:5], params(9))
    assert c.step() == [0]
    c.submit(1, OTHER, params(3))
    assert c.calls("insert", "prefill", "generate") == [
        ("insert", 0, None, 0),
        ("prefill", 0, 0, 5),
        ("generate", 1),
    ]
    assert [c.step() for _ in range(3)] == [[0], [0], [1, 0]]
    assert c.calls("insert", "prefill", "generate") == [
        ("insert", 1, None, 0),
        ("prefill", 1, 0, 10),
        ("generate", 1),
        ("prefill", 1, 10, 20),
        ("generate", 1),
        ("prefill", 1, 20, 30),
        ("generate", 1),
    ]
    assert [len(c.got[i].tokens) for i in (0, 1)] == [5, 2]
    c.run()
    assert c.calls("generate") == [("generate", 4)]  # no request waits: one step for all tokens of the longer one


@pytest.mark.parametrize(("max_steps", "calls"), [(8, [8, 8, 2]), (5, [5, 5, 5, 3]), (30, [18])])
def test_steps_at_once_when_nobody_waits(max_steps, calls):
    c = Collector(max_steps=max_steps)
    c.run((PROMPT[:5], params(20)))
    assert c.calls("generate") == [("generate", n) for n in [1, *calls]]


@pytest.mark.parametrize(("token_s", "calls"), [(0.001, [1, 3]), (0.03, [1, 3]), (0.04, [1, 2, 1]), (9.0, [1] * 4)])
def test_steps_while_somebody_waits_for_a_slot(token_s, calls):
    """Until the first request may end, and at most 100 ms by the time of a token; the first call measures it."""
    c = Collector(slots=1, max_steps=8, token_s=token_s)
    c.run((PROMPT[:3], params(5)), (OTHER[:3], params(5)))
    assert c.calls("insert", "generate") == [
        ("insert", 0, None, 0),
        *[("generate", steps) for steps in calls],
        ("insert", 0, None, 0),
        ("generate", 1),
        ("generate", 3),
    ]
    assert c.admitted == [0, 1]


def test_steps_end_with_the_first_request_that_may_end():
    c = Collector(slots=2, max_steps=8)
    c.run((PROMPT[:3], params(20)), (OTHER[:3], params(7)), (OTHER[3:9], params(2)))
    assert [steps for _, steps in c.calls("generate")] == [1, 5, 1, 8, 4]


def test_one_token_at_a_time_while_a_slot_is_free():
    """A prompt that waits for the prefix of another one gets its slot in the next step."""
    c = Collector(slots=3, max_steps=8, max_prefill_tokens=20)
    c.submit(0, PROMPT[:3], params(20))
    c.step()
    c.submit(1, OTHER[:18], params(9))
    c.submit(2, OTHER[:18] + [1], params(9))
    c.calls()
    c.step()
    assert c.calls("generate") == [("generate", 1)]


def test_a_conversation_goes_on_in_its_slot():
    """All but the last generated token are in the cache: 10 + 6 - 1 positions."""
    c = Collector(slots=3)
    c.run((PROMPT[:10], params(6)))
    assert c.scheduler.stats.cached_tokens == 15
    answer = [token.id for token in c.got[0].tokens]
    c.calls()
    c.run((PROMPT[:10] + answer + OTHER[:4], params(2)))
    assert c.calls("insert", "prefill") == [("insert", 0, 0, 15), ("prefill", 0, 15, 20)]
    assert c.scheduler.stats[3:-1] == (10 + 20, 10 + 5, 15, 6 + 2, 20 + 1)


def test_the_last_token_of_a_prompt_is_computed():
    c = Collector(slots=2)
    c.run((PROMPT[:10], params(1)), (PROMPT[:10], params(1)))
    assert c.calls("insert", "prefill") == [
        ("insert", 0, None, 0),
        ("prefill", 0, 0, 8),
        ("prefill", 0, 8, 10),
        ("insert", 0, 0, 9),
        ("prefill", 0, 9, 10),
    ]


def test_prompts_share_a_step():
    """In order of arrival, as many as fit in one prefill. The last chunk of a long prompt leaves room too."""
    c = Collector(slots=4, max_prefill_tokens=20)
    for id, prompt in enumerate([PROMPT[:8], OTHER[:8], PROMPT[10:22], OTHER[10:15]]):
        c.submit(id, prompt, params(9))
    assert c.step() == [0, 1]
    assert c.step() == [2, 3, 0, 1]
    assert c.calls("prefill", "generate") == [
        ("prefill", 0, 0, 8),
        ("prefill", 1, 0, 8),
        ("generate", 1),
        ("prefill", 2, 0, 12),
        ("prefill", 3, 0, 5),
        ("generate", 1),
    ]
    c = Collector(slots=4, max_prefill_tokens=20)
    c.submit(0, PROMPT, params(2))
    c.submit(1, OTHER[:8], params(2))
    c.submit(2, OTHER[20:], params(2))
    assert [c.step() for _ in range(2)] == [[], [0, 1]]
    assert c.calls("prefill") == [("prefill", 0, 0, 20), ("prefill", 0, 20, 30), ("prefill", 1, 0, 8)]


@pytest.mark.parametrize("max_prefill_tokens", [4, 64])
def test_samples_of_one_prompt_compute_it_once(max_prefill_tokens):
    """The other samples start when the first one's prompt is computed, and copy it while the first one runs."""
    c = Collector(slots=4, max_prefill_tokens=max_prefill_tokens)
    c.run(*[(PROMPT[:20], params(3, seed=seed)) for seed in range(3)])
    assert c.calls("insert") == [("insert", 0, None, 0), ("insert", 1, 0, 19), ("insert", 2, 0, 19)]
    assert c.scheduler.stats.prefilled_tokens == 20 + 1 + 1
    assert c.scheduler.stats.reused_tokens == 38
    assert len({tuple(t.id for t in c.got[i].tokens) for i in range(3)}) == 3


def test_a_prefix_is_copied_where_another_slot_loses_less():
    """The slot with the prefix keeps its longer sequence. The least recently used slot gets the copy."""
    c = Collector(slots=2, min_copy=9)
    c.run((OTHER[:12], params(1)), (PROMPT[:20], params(1)))
    c.calls()
    c.run((PROMPT[:9] + [99, 98], params(2)))
    assert c.calls("insert") == [("insert", 0, 1, 9)]
    c.run((PROMPT[:20] + [1], params(1)))
    assert c.calls("insert") == [("insert", 1, 1, 20)]


def test_a_short_prefix_is_not_copied_but_is_kept_in_place():
    c = Collector(slots=2, min_copy=8)
    c.run((OTHER[:12], params(1)), (PROMPT[:20], params(1)))
    c.calls()
    c.run((PROMPT[:7] + [99], params(1)))
    assert c.calls("insert") == [("insert", 0, None, 0)]
    c.run((PROMPT[:3] + [98], params(1)))  # slot 1 is now the least recently used one
    assert c.calls("insert") == [("insert", 1, 1, 3)]


def test_a_prefix_is_reused_while_a_ring_holds_its_window():
    c = Collector(slots=2, context=64, ring=(6, 13))
    c.run((PROMPT[:20], params(5)))  # 24 positions are written: 11 and later ones are held
    c.calls()
    c.run((PROMPT[:15] + [99], params(1)))
    assert c.calls("insert") == [("insert", 1, None, 0)]
    c.run((PROMPT[:16] + [99], params(1)))
    assert c.calls("insert") == [("insert", 0, 0, 16)]


def test_copying_from_a_slot_is_using_it():
    c = Collector(slots=3)
    c.run((PROMPT[:20], params(1)), (OTHER[:12], params(1)), ([50] * 9, params(1)))
    c.calls()
    c.run((OTHER[:10] + [1], params(1)))  # slot 2 is now the least recently used one
    c.run(([3, 4], params(1)))
    assert c.calls("insert") == [("insert", 0, 1, 10), ("insert", 2, None, 0)]


def test_prompt_logprobs_come_in_pieces_and_reuse_nothing():
    c = Collector(slots=2, max_prefill_tokens=4)
    c.run((PROMPT[:10], params(1)))
    c.calls()
    c.submit(1, PROMPT[:10], params(2, prompt_logprobs=2, logprobs=2))
    counts = []
    while not c.scheduler.idle:
        c.step()
        counts.append(len(c.got[1].prompt))
    assert counts == [4, 8, 9]
    assert c.calls("insert") == [("insert", 1, None, 0)]
    c.run()
    assert [len(token.top) for token in c.got[1].prompt] == [2] * 9


@pytest.mark.parametrize("prompt_logprobs", [None, 0])
def test_no_new_tokens(prompt_logprobs):
    c = Collector(slots=1)
    c.run((PROMPT[:10], params(0, prompt_logprobs=prompt_logprobs)))
    assert c.got[0].finish_reason == "length"
    assert not c.got[0].tokens
    assert c.calls("generate") == []
    assert c.scheduler.stats.cached_tokens == 10
    c.run((PROMPT[:12], params(1)))
    assert c.calls("insert") == [("insert", 0, 0, 10)]


def test_the_first_token_may_be_the_last():
    first = alone(PROMPT[:10], params()).tokens[0].id
    c = Collector(slots=1)
    c.run((PROMPT[:10], params(1)), (PROMPT[:10], params(9, stop_token_ids=(first,))))
    assert [c.got[i].finish_reason for i in range(2)] == ["length", "stop"]
    assert c.calls("generate") == []


def test_a_stop_token_in_mid_step():
    free = [token.id for token in alone(PROMPT[:10], params(6)).tokens]
    assert len(set(free)) == 6
    c = Collector(slots=2)
    c.run((PROMPT[:10], params(9)), (PROMPT[:10], params(9, stop_token_ids=(free[4],))))
    assert [token.id for token in c.got[1].tokens] == free[:5]
    assert c.got[1].finish_reason == "stop"
    assert c.scheduler.stats.cached_tokens == (10 + 8) + (10 + 4)


def test_cancelling_one_that_waits():
    c = Collector(slots=1)
    for i in range(3):
        c.submit(i, PROMPT[: 5 + i], params(2))
    c.scheduler.cancel(1)
    c.scheduler.cancel(99)
    assert c.scheduler.stats.waiting == 2
    del c.requests[1]
    c.run()
    assert c.admitted == [0, 2]
    assert 1 not in c.got


def test_cancelling_in_mid_prompt_keeps_what_is_computed():
    c = Collector(slots=1, max_prefill_tokens=4)
    c.submit(0, PROMPT[:20], params())
    assert [c.step(), c.step()] == [[], []]
    c.scheduler.cancel(0)
    assert c.scheduler.idle
    assert c.step() == []
    assert c.scheduler.stats[:5] == (0, 0, 1, 20, 8)
    del c.requests[0]
    c.calls()
    c.run((PROMPT[:12], params()))
    assert c.calls("insert", "prefill") == [("insert", 0, 0, 8), ("prefill", 0, 8, 12)]


def test_cancelling_one_that_runs_frees_its_slot_for_the_next_step():
    c = Collector(slots=1)
    c.submit(0, PROMPT[:5], params(20))
    c.submit(1, OTHER[:5], params(2))
    c.step()
    assert len(c.got[0].tokens) == 2
    c.scheduler.cancel(0)
    assert c.step() == [1]
    assert c.calls("release") == [("release", 0), ("release", 0)]
    assert len(c.got[0].tokens) == 2
    assert c.got[1] == alone(OTHER[:5], params(2))


@pytest.mark.parametrize("max_queue", [0, 2])
def test_the_queue_holds_so_many_beyond_the_free_slots(max_queue):
    c = Collector(slots=2, max_queue=max_queue)
    for i in range(2 + max_queue):
        c.submit(i, PROMPT[:5], params(9))
    with pytest.raises(QueueFull, match=f"{max_queue} requests wait already"):
        c.submit(50, PROMPT[:5], params(9))
    c.step()
    c.step()
    assert c.scheduler.stats[:3] == (2, max_queue, 2)
    with pytest.raises(QueueFull):
        c.submit(50, PROMPT[:5], params(9))
    c.scheduler.cancel(0)
    c.submit(51, PROMPT[:5], params(9))
    del c.requests[0], c.got[0]
    c.run()
    assert c.admitted == [*range(2 + max_queue), 51]


def test_requests_that_cannot_be():
    c = Collector(slots=1, context=20)
    with pytest.raises(ValueError, match="the prompt is empty"):
        c.submit(0, [], params())
    with pytest.raises(ValueError, match=r"16 tokens and max_tokens is 5: the sum is 21, more than .* 20"):
        c.submit(0, PROMPT[:16], params(5))
    c.submit(0, PROMPT[:16], params(4))
    for _ in range(2):  # waiting, then running
        with pytest.raises(ValueError, match="the ID 0 is in use"):
            c.submit(0, PROMPT[:3], params())
        c.step()
    c.run()
    c.submit(0, PROMPT[:3], params())


def test_idle():
    c = Collector()
    assert c.scheduler.idle
    assert c.step() == []
    assert c.engine.calls == []
    c.submit(0, [1], params(2))
    assert not c.scheduler.idle
    assert c.step() == [0]
    assert c.scheduler.idle


def slid(prompt: list[int], sampling: SamplingParams, context: int) -> tuple[list[int], str]:
    """The tokens and the finish reason of a completion that slides: each window alone, with at least half a context of
    text."""
    text, drawn, end, seed = list(prompt), 0, "length", sampling.seed
    while drawn < sampling.max_tokens and end == "length":
        left = sampling.max_tokens - drawn
        window = text[-max(context - left, context - context // 2) :]
        new = min(left, context - len(window))
        made = alone(window, dataclasses.replace(sampling, max_tokens=new, seed=seed))
        seed += 1
        text += [token.id for token in made.tokens]
        drawn, end = drawn + len(made.tokens), made.finish_reason
    return text[len(prompt) :], end


@pytest.mark.parametrize("length", [5, 16, 20, 100])
@pytest.mark.parametrize(
    "sampling", [params(1), params(9), params(70, seed=3), params(90, stop_token_ids=(31,))], ids=str
)
def test_a_completion_that_slides(length, sampling):
    """With other requests that wait for the only slot. `on_admit` is called once."""
    c = Collector(slots=1, context=20)
    prompt = [(3 * i * i + i) % 101 for i in range(length)]
    c.submit(0, prompt, sampling, slide=True)
    c.scheduler.submit(1, PROMPT[:5], params(3))
    while not c.scheduler.idle:
        c.step()
    tokens, end = slid(prompt, sampling, 20)
    assert ([token.id for token in c.got[0].tokens], c.got[0].finish_reason) == (tokens, end)
    assert c.admitted == [0]
    assert c.got[1] == alone(PROMPT[:5], params(3))
    assert not c.engine.in_use


def test_one_that_slides_lets_others_in():
    c = Collector(slots=1, context=20)
    c.submit(0, PROMPT[:5], params(1000), slide=True)
    c.step()
    c.submit(1, PROMPT[:5], params(3))
    while 1 not in c.got or c.got[1].finish_reason is None:
        c.step()
    assert len(c.got[0].tokens) <= 20  # not after its last window


def test_cancelling_one_that_slides():
    c = Collector(slots=2, context=20)
    c.submit(0, PROMPT[:5], params(1000), slide=True)
    while len(c.got.get(0, Completion([], [], None)).tokens) < 15:  # its first context is full, so it waits again
        c.step()
    assert c.scheduler.stats.waiting == 1
    c.scheduler.cancel(0)
    assert c.scheduler.idle
    assert c.step() == []


def test_a_slot_goes_to_the_client_with_the_fewest_running_requests():
    """20 requests of one client on 4 slots, then one of another: it has a slot before the tenth of the first."""
    c = Collector(slots=4)
    for request in range(20):
        c.submit(request, PROMPT[:3], params(6), client="a")
    c.step()
    c.submit(20, OTHER[:3], params(6), client="b")
    while 20 not in c.got:
        c.step()
    assert len(c.admitted) <= 9
    c.run()
    # of one client, in order of arrival
    assert [request for request in c.admitted if request < 20] == list(range(20))


def test_clients_take_turns():
    c = Collector(slots=2)
    clients = ["a"] * 6 + ["b"] * 3 + ["c"]
    for request, client in enumerate(clients):
        c.submit(request, [*PROMPT[:3], request], params(4), client=client)
    c.run()
    assert [clients[request] for request in c.admitted] == ["a", "b", "c", "a", "b", "a", "b", "a", "a", "a"]


def test_a_cancelled_client_is_forgotten():
    c = Collector(slots=1)
    for request, client in enumerate("aab"):
        c.submit(request, PROMPT[: 3 + request], params(4), client=client)
    c.step()
    for request in (2, 1, 1):
        c.scheduler.cancel(request)
    assert not c.scheduler._waiting_of
    c.submit(3, OTHER[:3], params(2), client="b")
    while not c.scheduler.idle:
        c.step()
    assert c.admitted == [0, 3]


def test_the_next_call_is_started_before_the_last_one_is_read():
    c = Collector(slots=2, max_steps=8)
    c.run((PROMPT[:3], params(20)), (OTHER[:3], params(20)))
    assert c.calls("generate", "read") == [
        ("generate", 1),
        ("read", 1),
        ("generate", 8),
        ("generate", 8),
        ("read", 8),
        ("generate", 2),
        ("read", 8),
        ("read", 2),
    ]


@pytest.mark.parametrize(
    ("slots", "token_s"), [(3, 0.001), (2, 0.011)], ids=["a slot is free", "two calls take 110 ms"]
)
def test_one_call_at_a_time(slots, token_s):
    c = Collector(slots=slots, max_steps=8, token_s=token_s)
    c.run((PROMPT[:3], params(20)), (OTHER[:3], params(20)))
    calls = c.calls("generate", "read")
    assert [kind for kind, _ in calls] == ["generate", "read"] * 4


@pytest.mark.parametrize("cancelled", [(0,), (0, 1)])
def test_cancelling_while_a_call_is_not_read(cancelled):
    """The tokens of the call are those of the slot's request before."""
    c = Collector(slots=2, max_steps=8)
    c.submit(0, PROMPT[:3], params(30))
    c.submit(1, OTHER[:3], params(30))
    c.submit(2, OTHER[5:9], params(30))
    c.step()
    c.step()
    assert c.calls("generate", "read")[-2:] == [("generate", 8), ("read", 8)]
    for request in cancelled:
        c.scheduler.cancel(request)
        assert len(c.got.pop(request).tokens) == 10
        del c.requests[request]
    c.run()
    assert c.scheduler.stats.cached_tokens == sum(c.engine.known)


def test_a_stop_token_while_the_next_call_is_not_read():
    tokens = [token.id for token in alone(PROMPT[:10], params(9)).tokens]
    c = Collector(slots=2, max_steps=4)
    c.run(
        (PROMPT[:10], params(30, stop_token_ids=(tokens[4],))),
        (OTHER[:10], params(30)),
        (OTHER[5:9], params(30)),
    )
    assert len(c.got[0].tokens) <= 5
    assert c.scheduler.stats.cached_tokens == sum(c.engine.known)
