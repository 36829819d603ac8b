"""schemathesis with the server's OpenAPI description: no response is a 500, and each has the described form."""

import subprocess
import sys

import pytest
from support.chat_templates import chat_folder
from support.served import serve

from mesh_transformer.data.tokens.tokenizer import load_tokenizer

pytest.importorskip("schemathesis")
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.mark.nightly
def test_no_request_makes_the_server_fail(tmp_path):
    tokenizer = load_tokenizer(str(chat_folder(tmp_path / "chat")))
    with serve(tokenizer=tokenizer, vocab=tokenizer.n_vocab, slots=8, max_queue=256) as server:
        command = [
            sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run",
            f"{server.url}/openapi.json", "--checks", CHECKS, "--max-examples", "25", "--workers", "2", "--seed", "1",
            "--phases", "examples,coverage,fuzzing",
        ]  # fmt: skip
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        assert server.complete("a")["choices"]
        paths = server.client.get("/openapi.json").json()["paths"]
        assert {"/v1/chat/completions", "/tokenize", "/detokenize"} < paths.keys()
        assert not server.engine.in_use
