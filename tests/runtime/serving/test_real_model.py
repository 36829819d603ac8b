"""device_serve.py with a trained model."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import loopback
from support.commands import finish, run, write_run
from support.processes import process, wait_for_health


def test_a_trained_model_gives_the_text_that_device_sample_gives(tmp_path):
    write_run(tmp_path, optimizer={"total_steps": 8}, data={"val_set": {}})
    run("device_train.py", "--config", "config.json", cwd=tmp_path)
    output, _ = run(
        "device_sample.py", "--config", "config.json", "--json", "--prompt", "99 bottles", "--max-new-tokens", "12",
        "--temperature", "0", cwd=tmp_path,
    )  # fmt: skip
    sample = json.loads(output)
    with process(tmp_path, "--slots", "2", program="device_serve.py") as (
        child,
        _,
    ):  # still reading or compiling
        child.send_signal(signal.SIGTERM)
        finish(child, 0)
    program, modules = "tests/support/module_listing_serve.py", tmp_path / "modules"
    with process(tmp_path, "--slots", "2", program=program, fresh=True, MODULES=str(modules)) as (child, url):
        wait_for_health(url)
        greedy = {"max_tokens": 12, "temperature": 0, "logprobs": 0}

        def complete(prompt: str) -> dict:
            return loopback.post(f"{url}/v1/completions", json={"prompt": prompt, **greedy}, timeout=60).json()

        with ThreadPoolExecutor(6) as pool:  # with other requests in the batch and in the queue
            answers = list(pool.map(complete, ["12 bottles of", "99 bottles", "1", "99 bottles"] * 3))
        for answer in answers[1::2]:
            (choice,) = answer["choices"]
            assert choice["text"] == sample["completion"]
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(sample["logprobs"], abs=1e-3)
        body = {"prompt": "99 bottles" + sample["completion"], "max_tokens": 0, "echo": True, "logprobs": 1}
        scored = loopback.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["logprobs"]
        assert scored["token_logprobs"][-12:] == pytest.approx(sample["logprobs"], abs=1e-3)
        child.send_signal(signal.SIGTERM)
        _, errors = finish(child, 0)
        assert "Traceback" not in errors
    imported = modules.read_text(encoding="utf-8").split("\n")
    assert "mesh_transformer.infer.engine" in imported
    # of a native run
    others = (
        "mesh_transformer.train",
        "mesh_transformer.checkpoint.hf.source",
        "mesh_transformer.checkpoint.classic.source",
    )
    assert [name for name in imported if name.startswith(others)] == []
