"""Every mutated input is read or refused, in bounded time and memory: a few in each run, many with `-m fuzz`."""

import secrets
import sys
from pathlib import Path

import pytest

from fuzz import (
    adapters,
    configs,
    corpora,
    data_sets,
    gguf_models,
    harness,
    http_requests,
    instructions,
    manifests,
    templates,
    tokenizer_files,
    weights,
)

FUZZERS: dict[str, harness.Fuzzer] = {
    "configs": configs.fuzzer,
    "weights": weights.fuzzer,
    "gguf": gguf_models.fuzzer,
    "adapters": adapters.fuzzer,
    "tokenizers": tokenizer_files.fuzzer,
    "templates": templates.fuzzer,
    "manifests": manifests.fuzzer,
    "corpora": corpora.fuzzer,
    "requests": http_requests.fuzzer,
    "offsets": data_sets.offsets,
    "indexes": data_sets.indexes,
    "data manifests": data_sets.data_manifests,
    "mixtures": data_sets.mixtures,
    "instructions": instructions.fuzzer,
}
FEW = 60


@pytest.mark.parametrize("name", FUZZERS)
def test_a_few_inputs(name: str, tmp_path: Path) -> None:
    report = harness.run_here(name, FUZZERS[name], tmp_path, 0, FEW)
    assert not report.bad, report.faults()
    assert report.kinds.total() == FEW
    # the mutations leave some inputs valid, and make others invalid
    assert len(report.kinds) > 1


@pytest.mark.nightly
def test_ten_thousand_configs(tmp_path: Path) -> None:
    report = harness.run_here("configs", configs.fuzzer, tmp_path, 0, 10_000)
    assert not report.bad, report.faults()


@pytest.mark.fuzz
@pytest.mark.parametrize("name", FUZZERS)
def test_many_inputs(name: str, request: pytest.FixtureRequest) -> None:
    count, seed = request.config.getoption("--fuzz-count"), request.config.getoption("--fuzz-seed")
    report = harness.run_apart(name, FUZZERS[name], secrets.randbelow(1 << 31) if seed is None else seed, count)
    sys.stdout.write(f"\n{report}\n")
    assert not report.bad, report.faults()
