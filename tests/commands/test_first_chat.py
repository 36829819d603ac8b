"""The chain of docs/first_chat.md with a tenth of its steps: from a folder of texts to a chat."""

import json
import re
import shutil
import signal
from pathlib import Path

from support import loopback
from support.commands import metrics, run_python, start_python
from support.doc_blocks import blocks
from support.processes import wait_for_health

# as for a user: most tests take flags that compile sooner and compute more slowly
OPTIMISED = {"XLA_FLAGS": ""}
COMMAND = "import runpy; runpy.run_module('mesh_transformer', run_name='__main__')"
QUESTIONS = ("What is the moon?", "Name three colors.", "Hello!", "How do I make tea?")


def test_the_chain(repo: Path, tmp_path: Path) -> None:
    page = [block.text.split() for block in blocks(repo, repo / "docs/first_chat.md") if block.kind == "command"]
    # the second chain begins with the questions of its page
    chain = [words[1:] for words in page[: next(i for i, words in enumerate(page) if "questions.jsonl" in str(words))]]
    (tmp_path / "texts").mkdir()
    for name in ("train.txt", "val.txt"):
        shutil.copy(repo / "data/tiny_shakespeare" / name, tmp_path / "texts")
    (tmp_path / "data").symlink_to(repo / "data")
    _, *steps, serve = chain
    assert [words[0] for words in steps] == ["tokenizer", "prepare", "new", "train", "prepare", "new", "train"]
    for words in steps:
        fewer = ["--set", "optimizer.total_steps=90"] if words == ["train", "--config", "mine.json"] else []
        run_python(COMMAND, *words, *fewer, cwd=tmp_path, **OPTIMISED)
    losses = [row["train/loss"] for row in metrics(tmp_path / "runs/mine")]
    assert len(losses) == 90
    assert losses[-1] < losses[0] - 2
    with start_python(COMMAND, *serve, "--port", "0", cwd=tmp_path, **OPTIMISED) as child:
        assert child.stderr is not None
        lines = iter(child.stderr.readline, "")
        url = next(match[1] for line in lines if (match := re.search(r"listening on (http://\S+) ", line)))
        wait_for_health(url)
        ends = []
        for question in QUESTIONS:
            body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 90}
            (choice,) = loopback.post(f"{url}/v1/chat/completions", json=body).json()["choices"]
            assert choice["message"]["role"] == "assistant"
            # the names of special tokens are no part of an answer
            assert "<|" not in choice["message"]["content"]
            ends.append(choice["finish_reason"])
        child.send_signal(signal.SIGTERM)
        child.communicate()
    # the last training of docs/lora.md, by its options
    page = [block.text.split() for block in blocks(repo, repo / "docs/lora.md") if block.kind == "command"]
    (adapters,) = (words[1:] for words in page if "mine_chat.json" in words)
    fewer = ["--set", "optimizer.total_steps=20"]
    run_python(COMMAND, *(word for word in adapters if word != "\\"), *fewer, cwd=tmp_path, **OPTIMISED)
    losses = [row["train/loss"] for row in metrics(tmp_path / "runs/mine_lora") if "train/loss" in row]
    assert losses[-1] < losses[0] - 0.3
    # the end of a message is the first thing that a model learns of chats
    assert ends.count("stop") >= 2, ends
    rows = (repo / "data/instructions.jsonl").read_text().splitlines()
    assert len({json.loads(row)["messages"][0]["content"] for row in rows}) == 150
