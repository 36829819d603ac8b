"""A short form of benchmarks/serve_load.py: a server process loses no request, and its memory does not grow."""

import json
import signal
import subprocess
import sys

import pytest
from support.commands import REPO, finish
from support.processes import process, wait_for_health

MINUTES = 0.75


@pytest.mark.nightly
def test_mixed_requests_lose_nothing(tmp_path):
    options = ["--slots", "4", "--max-queue", "12", "--set", "model.seq=96"]
    with process(tmp_path, *options, FAKE_DELAY="0.001") as (child, url):
        wait_for_health(url)
        command = [sys.executable, "benchmarks/serve_load.py", "--url", url, "--minutes", str(MINUTES)]
        load = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=180, check=True)
        child.send_signal(signal.SIGTERM)
        _, errors = finish(child, 0)
    figures = json.loads(load.stdout)
    assert figures.get("unexpected", 0) == 0, figures
    assert figures["unanswered"] == figures["leaked_slots"] == figures["leaked_waiting"] == 0, figures
    for kind in ("answered", "refused_full", "refused_wrong", "left_in_mid_stream", "left_before_the_answer"):
        assert figures[kind] > 10, figures
    assert min(figures["kept_connection_models_ms"], figures["kept_connection_one_token_ms"]) > 0, figures
    assert figures["reused_prompt_tokens"] > 0
    assert figures["server_rss_mib_end"] < figures["server_rss_mib_settled"] + 8, figures
    assert figures["server_open_files_end"] <= figures["server_open_files_settled"], figures
    assert "Traceback" not in errors
