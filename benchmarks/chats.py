"""Fourteen chats with a server of a trained model: CPU seconds and peak memory, with and without programs on disk.

    python benchmarks/chats.py --ckpt FOLDER        # a model with a chat template; 4 slots; 1 round

Eight chats of one turn and one of six, greedy, of 32 tokens each. The server starts twice: with an empty cache of
programs, where the report waits until all programs are compiled, and with the programs of the first start. The limit of
memory is 1.3 times weights and cache, and 0.6 GB.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import common

QUESTIONS = [
    "What is the capital of France?", "Name three fruits.", "What is 7 plus 5?", "Write a line about the sea.",
    "Who wrote Hamlet?", "What do bees make?", "Say hello in Spanish.", "Why is the sky blue?",
]  # fmt: skip
TURNS = [
    "My name is Ada.",
    "What is my name?",
    "Name a color.",
    "And another one.",
    "Which was the first?",
    "Thank you.",
]
ANSWER_TOKENS, SLOTS, PORT = 32, 4, 5693


def main() -> None:
    made = common.parser(__doc__, config=None, rounds=1)
    made.add_argument("--ckpt", help="a checkpoint of any format")
    arguments = common.parse(made)
    rows: dict[str, list[dict[str, float]]] = {"empty cache": [], "programs on disk": []}
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as home:
            for name, records in rows.items():
                records.append(serve(arguments.ckpt, home, whole=name == "empty cache"))
                common.say(f"{name}: {json.dumps(records[-1])}")
    common.report({name: common.medians(records) for name, records in rows.items()})


def serve(checkpoint: str, home: str, *, whole: bool) -> dict[str, float]:
    """The figures of one server. `whole`: wait at the end until all programs are compiled."""
    environment = {**os.environ, "HOME": home, "XDG_CACHE_HOME": f"{home}/.cache", "PYTHONPATH": str(common.REPO)}
    command = [sys.executable, "-m", "mesh_transformer", "serve", "--ckpt", checkpoint]
    with open(f"{home}/log", "w", encoding="utf-8") as log:
        server = subprocess.Popen(
            [*command, f"--slots={SLOTS}", f"--port={PORT}"], env=environment, stdout=log, stderr=log, cwd=home
        )
        try:
            while not (state := ask("/health")) or state["status"] != "ok":
                time.sleep(0.05)
            figures = {"ready_cpu_s": cpu_seconds(server.pid), "ready_peak_gb": peak_gb(server.pid)}
            chat([{"role": "user", "content": QUESTIONS[0]}], 1)
            figures["first_token_cpu_s"] = cpu_seconds(server.pid)
            for question in QUESTIONS:
                chat([{"role": "user", "content": question}], ANSWER_TOKENS)
            messages: list[dict[str, str]] = []
            for turn in TURNS:
                messages.append({"role": "user", "content": turn})
                messages.append({"role": "assistant", "content": chat(messages, ANSWER_TOKENS)})
            figures |= {"chats_cpu_s": cpu_seconds(server.pid), "chats_peak_gb": peak_gb(server.pid)}
            while whole and (ask("/health") or {})["compiling"]:
                time.sleep(0.2)
            programs = (ask("/health") or {})["programs"]
            return {
                **figures,
                "end_cpu_s": cpu_seconds(server.pid),
                "end_peak_gb": peak_gb(server.pid),
                "programs": programs,
            }
        finally:
            server.terminate()
            server.wait()


def ask(path: str, body: Any = None) -> Any:
    """The JSON of an answer; None: there is no server yet, or it is not ready."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}{path}", data, headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            return json.loads(response.read())
    except OSError:
        return None


def chat(messages: list[dict[str, str]], tokens: int) -> str:
    """The answer to a chat, greedy."""
    answer = ask("/v1/chat/completions", {"messages": messages, "max_tokens": tokens, "temperature": 0})
    return answer["choices"][0]["message"]["content"]


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def peak_gb(pid: int) -> float:
    """The peak resident set of a process."""
    (kib,) = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(kib) * 1024 / 1e9


if __name__ == "__main__":
    main()
