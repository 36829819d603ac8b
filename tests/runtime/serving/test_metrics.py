"""GET /metrics: counters, gauges and times."""

import time

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.served import serve


@pytest.fixture(scope="module")
def server():
    with serve() as served:
        yield served


def test_metrics_count_tokens(server):
    before = {name: server.metric(name) for name in ("prompt_tokens_total", "generated_tokens_total")}
    first, between = (server.metric(f"time_{name}_seconds_count") for name in ("to_first_token", "between_tokens"))
    server.complete("metrics", seed=3, max_tokens=11, ignore_eos=True)
    assert server.metric("prompt_tokens_total") == before["prompt_tokens_total"] + 7
    assert server.metric("generated_tokens_total") == before["generated_tokens_total"] + 11
    assert server.metric("time_to_first_token_seconds_count") == first + 1
    assert server.metric("time_between_tokens_seconds_count") - between == 9  # the first output held two tokens
    assert server.metric("requests_running") == server.metric("requests_waiting") == 0
    reused = server.metric("reused_prompt_tokens_total")
    server.complete("what metrics count", max_tokens=1)
    server.complete("what metrics count is reused", max_tokens=1)
    assert server.metric("reused_prompt_tokens_total") == reused + len("what metrics count")
    assert 0 < server.metric("cache_used_ratio") <= 1
    assert server.metric("slots") == 4


def test_metrics_are_in_prometheus_form(server):
    server.complete("a", max_tokens=3)
    families = {
        family.name.removeprefix("mesh_transformer_"): family
        for family in text_string_to_metric_families(server.client.get("/metrics").text)
    }
    kinds = {name: family.type for name, family in families.items()}
    for name in ("requests_running", "requests_waiting", "slots", "cache_used_ratio"):
        assert kinds[name] == "gauge"
    for name in ("prompt", "prefilled", "reused_prompt", "generated"):
        assert kinds[f"{name}_tokens"] == "counter"
    for name in ("queue", "time_to_first_token", "time_between_tokens"):
        family = families[f"{name}_seconds"]
        assert family.type == "histogram"
        assert [s.labels["le"] for s in family.samples if s.name.endswith("_bucket")][-1] == "+Inf"
    assert all(family.documentation for family in families.values())


def test_times_between_tokens_add_up_to_the_request():
    with serve(delay=0.005) as slow:
        began = time.monotonic()
        slow.complete("a", seed=3, max_tokens=60, ignore_eos=True)
        seconds = time.monotonic() - began
        times = [slow.metric(f"{name}_seconds_sum") for name in ("time_to_first_token", "time_between_tokens")]
        assert 60 * 0.005 <= sum(times) <= seconds
        assert slow.metric("queue_seconds_sum") < times[0] < times[1]
