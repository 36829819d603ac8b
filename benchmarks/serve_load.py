"""Sends mixed requests to a running server for some minutes; checks that it answers each accepted one and leaks no slot
or memory.

    python benchmarks/serve_load.py --url http://127.0.0.1:5000 --minutes 10

Four clients per slot send one request after the other: whole and streamed completions, with echo, log-probabilities,
stops and several samples; /complete; invalid bodies; prompts that are too long. Some clients disconnect before or
during the answer. Some requests have a seed, and their answer must be the same each time. Before them, one client sends
short requests over one connection, and the median times of their answers are figures too. The output is one JSON object
on standard output, with numbers of requests unless the name of a figure says otherwise.
"""

import asyncio
import collections
import random
import re
import statistics
import time
from typing import Any

import httpx
from common import parser, report, say
from prometheus_client.parser import text_string_to_metric_families

COMPLETIONS = "/v1/completions"
CLIENTS_A_SLOT = 4
TOTALS = ("generated_tokens", "reused_prompt_tokens")
# the part of the time before the first measurement of memory
SETTLED = 0.1
# requests over the kept connection, of each kind
KEPT_REQUESTS = 50
ONE_TOKEN = {"prompt": "fox", "max_tokens": 1}
REFERENCE = {"prompt": "the same", "max_tokens": 12, "seed": 7, "temperature": 0.8}
CLASSIC = {"context": "fox", "top_p": 0.9, "temp": 0.7, "length": 9}
BAD_BODIES = [
    b"", b"{", b'{"prompt": 3}', b'{"prompt": "a", "top_p": 7}', b"\x00" * 5000, b'{"prompt": "a", "n": 4096}',
]  # fmt: skip
JSON = {"Content-Type": "application/json"}


class Load:
    """The clients and their counts."""

    def __init__(self, client: httpx.AsyncClient, context: int, seed: int):
        self.counts: collections.Counter[str] = collections.Counter({"refused: full": 0})
        self.unexpected: collections.Counter[str] = collections.Counter()
        self._client, self._context = client, context
        self._random = random.Random(seed)
        self._reference: str | None = None
        # from a streamed request to its first line, seconds
        self.first_s: list[float] = []

    async def send_until(self, deadline: float) -> None:
        """Run one client."""
        kinds = [self._whole] * 5 + [self._stream] * 5 + [self._leave_stream] * 3 + [
            self._leave_whole, self._classic, self._bad_body, self._too_long, self._same_again,
        ]  # fmt: skip
        while time.monotonic() < deadline:
            kind = self._random.choice(kinds)
            try:
                await kind()
            except httpx.HTTPError as error:
                self._note(f"{kind.__name__}: {type(error).__name__} {error}")

    def _body(self, **fields: Any) -> dict[str, Any]:
        draw = self._random
        prompt = "".join(draw.choices("the quick brown fox. ", k=draw.randint(0, self._context // 4)))
        most = draw.randint(1, self._context // 2)
        body = {"prompt": prompt, "max_tokens": most, "temperature": draw.random() * 2}
        some = {
            "n": draw.randint(2, 3), "logprobs": draw.randint(0, 3), "echo": True, "stop": [". ", "th"], "top_p": 0.9,
            "top_k": 20, "seed": draw.randint(0, 9), "ignore_eos": True, "repetition_penalty": 1.2,
        }  # fmt: skip
        return {**body, **{name: value for name, value in some.items() if draw.random() < 0.25}, **fields}

    async def _post(self, body: dict[str, Any], path: str = COMPLETIONS, **options: Any) -> Any:
        """The JSON answer to an accepted request, or None if the queue is full."""
        response = await self._client.post(path, json=body, **options)
        return response.json() if self._has(response, 200, "accepted") else None

    async def _whole(self) -> None:
        body = self._body()
        if answer := await self._post(body):
            ends = [choice["finish_reason"] for choice in answer["choices"]]
            self._answered(len(ends) == body.get("n", 1) and None not in ends)

    async def _stream(self) -> None:
        began = time.perf_counter()
        async with self._client.stream("POST", COMPLETIONS, json=self._body(stream=True)) as response:
            if self._has(response, 200, "accepted"):
                lines = []
                async for line in response.aiter_lines():
                    if not lines:
                        self.first_s.append(time.perf_counter() - began)
                    if line:
                        lines.append(line)
                self._answered(lines[-1] == "data: [DONE]" and '"error"' not in lines[-2])

    async def _leave_stream(self) -> None:
        async with self._client.stream("POST", COMPLETIONS, json=self._body(stream=True)) as response:
            if self._has(response, 200, "accepted"):
                lines = response.aiter_lines()
                for _ in range(self._random.randint(1, 5)):
                    await anext(lines, None)
                self.counts["left in mid-stream"] += 1

    async def _leave_whole(self) -> None:
        try:
            if answer := await self._post(self._body(), timeout=self._random.random() * 0.2):
                self._answered("choices" in answer)
        except httpx.TimeoutException:
            self.counts["left before the answer"] += 1

    async def _classic(self) -> None:
        if answer := await self._post(CLASSIC, "/complete"):
            self._answered("completion" in answer)

    async def _bad_body(self) -> None:
        body = self._random.choice(BAD_BODIES)
        self._has(await self._client.post(COMPLETIONS, content=body, headers=JSON), 400, "refused: wrong")

    async def _too_long(self) -> None:
        body = self._body(max_tokens=self._context + 1)
        self._has(await self._client.post(COMPLETIONS, json=body), 400, "refused: wrong")

    async def _same_again(self) -> None:
        if answer := await self._post(REFERENCE):
            text = answer["choices"][0]["text"]
            self._reference = text if self._reference is None else self._reference
            self._answered(text == self._reference)

    def _has(self, response: httpx.Response, status: int, kind: str) -> bool:
        """Whether an answer has this status; counts it as `kind`. A full queue refuses invalid requests too."""
        if response.status_code == 503 and "retry-after" in response.headers:
            self.counts["refused: full"] += 1
        elif response.status_code != status:
            self._note(f"status {response.status_code}, not {status}")
        else:
            self.counts[kind] += 1
        return response.status_code == status

    def _answered(self, rightly: bool) -> None:
        self.counts["answered"] += 1
        if not rightly:
            self._note("an answer that is incomplete or different")

    def _note(self, text: str) -> None:
        self.counts["unexpected"] += 1
        self.unexpected[text] += 1


async def metrics(client: httpx.AsyncClient) -> dict[str, float]:
    """The server's gauges and counters by name, without their common prefix."""
    families = text_string_to_metric_families((await client.get("/metrics")).text)
    samples = (sample for family in families for sample in family.samples if not sample.labels)
    return {sample.name.removeprefix("mesh_transformer_"): sample.value for sample in samples}


async def run(url: str, minutes: float, seed: int, key: str | None) -> dict[str, Any]:
    """Run the clients and return the figures."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120, limits=limits) as client:
        (model,) = (await client.get("/v1/models")).json()["data"]
        kept = {
            "kept_connection_models_ms": await _median_ms(client, "GET", "/v1/models"),
            "kept_connection_one_token_ms": await _median_ms(client, "POST", COMPLETIONS, json=ONE_TOKEN),
        }
        before = await metrics(client)
        clients = CLIENTS_A_SLOT * int(before["slots"])
        load = Load(client, model["max_model_len"], seed)
        began = time.monotonic()
        sending = [load.send_until(began + minutes * 60) for _ in range(clients)]
        *_, settled = await asyncio.gather(*sending, _measure_after(client, minutes * 60 * SETTLED))
        seconds = time.monotonic() - began
        after = await _at_rest(client)
    gained = {name: after[f"{name}_total"] - before[f"{name}_total"] for name in TOTALS}
    cpu_s = after["process_cpu_seconds_total"] - before["process_cpu_seconds_total"]
    counts = {re.sub(": |[ -]", "_", name): count for name, count in sorted(load.counts.items())}
    figures = {
        "minutes": round(seconds / 60, 2),
        **kept,
        "clients": clients,
        "slots": int(after["slots"]),
        **counts,
        "unanswered": load.counts["accepted"] - load.counts["answered"] - load.counts["left in mid-stream"],
        "unexpected_kinds": dict(load.unexpected.most_common(10)),
        "leaked_slots": int(after["requests_running"]),
        "leaked_waiting": int(after["requests_waiting"]),
        "tokens_per_second": round(gained["generated_tokens"] / seconds, 1),
        "tokens_per_cpu_second": round(gained["generated_tokens"] / cpu_s, 1),
        "first_token_ms_median": round(1000 * statistics.median(load.first_s), 1),
        "first_token_ms_p99": round(1000 * statistics.quantiles(load.first_s, n=100)[98], 1),
        "reused_prompt_tokens": int(gained["reused_prompt_tokens"]),
    }
    for when, found in {"settled": settled, "end": after}.items():
        figures[f"server_rss_mib_{when}"] = round(found["process_resident_memory_bytes"] / 2**20, 1)
        figures[f"server_open_files_{when}"] = int(found["process_open_fds"])
    return figures


async def _median_ms(client: httpx.AsyncClient, method: str, path: str, **options: Any) -> float:
    """The median time of an answer in milliseconds. The client keeps its connection from one request to the next."""
    times = []
    for _ in range(KEPT_REQUESTS):
        began = time.perf_counter()
        (await client.request(method, path, **options)).raise_for_status()
        times.append(time.perf_counter() - began)
    return round(1000 * statistics.median(times), 2)


async def _measure_after(client: httpx.AsyncClient, seconds: float) -> dict[str, float]:
    await asyncio.sleep(seconds)
    return await metrics(client)


async def _at_rest(client: httpx.AsyncClient) -> dict[str, float]:
    """The metrics when no request runs or waits, or after ten seconds."""
    deadline = time.monotonic() + 10
    while True:
        now = await metrics(client)
        if not now["requests_running"] + now["requests_waiting"] or time.monotonic() > deadline:
            return now
        await asyncio.sleep(0.1)


def main() -> None:
    made = parser(__doc__, config=None, rounds=None)
    made.add_argument("--url", default="http://127.0.0.1:5000")
    made.add_argument("--minutes", type=float, default=10.0)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--key", help="an API key")
    arguments = made.parse_args()
    say(f"{arguments.minutes:g} minutes of mixed requests to {arguments.url}")
    figures = asyncio.run(run(arguments.url, arguments.minutes, arguments.seed, arguments.key))
    report(figures)


if __name__ == "__main__":
    main()
