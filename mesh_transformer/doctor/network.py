"""The services that commands use, asked over the network: only with --online."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Iterator

from mesh_transformer.doctor.findings import Finding, ok, warning

ANSWER_S = 10.0
# the name of a service, the variable with another address of it, its address
SERVICES = (
    ("the Hugging Face hub", "HF_ENDPOINT", "https://huggingface.co"),
    ("Google Cloud Storage", "STORAGE_EMULATOR_HOST", "https://storage.googleapis.com"),
    ("the Cloud TPU API", "", "https://tpu.googleapis.com"),
)


def network() -> Iterator[Finding]:
    """Whether the services answer, with any HTTP status."""
    for name, variable, default in SERVICES:
        address = os.environ.get(variable) or default
        failure = _failure(address)
        if failure is None:
            yield ok(f"{name} answers")
        else:
            yield warning(f"{name} does not answer: {failure}", f"curl -I {address}; behind a proxy set HTTPS_PROXY")


def _failure(address: str) -> str | None:
    """The reason why a service does not answer; None: it answers."""
    request = urllib.request.Request(address, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=ANSWER_S).close()
    except urllib.error.HTTPError:
        # a refusal is an answer
        return None
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))
    return None
