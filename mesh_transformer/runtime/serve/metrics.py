"""What /metrics tells Prometheus."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mesh_transformer.infer.scheduler import Stats

PREFIX = "mesh_transformer_"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics(Collector):
    """The server's own registry: a snapshot at each scrape, histograms of times in seconds, and the process."""

    def __init__(self, snapshot: Callable[[], Stats]):
        self._snapshot = snapshot
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        self.queue_s = self._histogram("queue_seconds", "From a request's arrival to its slot")
        self.first_token_s = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token"
        )
        self.between_tokens_s = self._histogram(
            "time_between_tokens_seconds",
            "From a token to the next of its sequence; tokens of one step share its time",
        )

    def exposition(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The snapshot's numbers."""
        now = self._snapshot()
        used = now.cached_tokens / max(1, now.positions)
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        for kind, name, text, value in (
            (gauge, "requests_running", "Sequences that hold a slot", now.running),
            (gauge, "requests_waiting", "Sequences that wait for a slot", now.waiting),
            (gauge, "slots", "Sequences that can run at once", now.slots),
            (gauge, "cache_used_ratio", "Part of the cache's positions that holds tokens", used),
            (counter, "prompt_tokens", "Prompt tokens of sequences that got a slot", now.prompt_tokens),
            (counter, "prefilled_tokens", "Prompt tokens that were computed", now.prefilled_tokens),
            (
                counter,
                "reused_prompt_tokens",
                "Prompt tokens that were in the cache already",
                now.reused_tokens,
            ),
            (counter, "generated_tokens", "New tokens", now.generated_tokens),
        ):
            yield kind(PREFIX + name, text, value=value)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(PREFIX + name, text, registry=self._registry, buckets=_SECONDS)
