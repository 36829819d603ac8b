"""Benchmarks that compare results exit with code 1 if the results differ; predictions of published runs."""

import importlib
import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from mesh_transformer.errors import UserError
from mesh_transformer.ops.attend.causal import Causal

RUNS = {
    "generate": {
        "memory": [{}],
        "ours 2": [{"tokens": [[1, 2, 3], [4, 5, 6]]}] * 2,
        "transformers 2": [{"tokens": [[1, 2, 3], [4, 5, 6]]}, {"tokens": [[1, 2, 3], [4, 5]]}],
    },
    "evaluate": {
        "ours": [{"scores": [-1590.0, -20.0, -1e-6], "epsilon": 2**-23}],
        "hf 8": [
            {"scores": [-1590.0, -20.0, -1e-6], "epsilon": 2**-23},
            {"scores": [-1590.0014, -21.0, -1.2e-6], "epsilon": 2**-23},
        ],
    },
}  # fmt: skip
WORDS = {
    "generate": "transformers 2, round 2, sequence 1, token 2: None, not 6",
    "evaluate": "hf 8, round 2, request 1: -21.0, not -20.0",
}


@pytest.mark.parametrize("name", RUNS)
def test_different_results_are_reported(repo, name):
    program = f"import json, common, {name} as it\nfor runs in json.loads(input()): common.end(it.differences(runs))"

    def end_of(*runs):
        return subprocess.run(
            [sys.executable, "-c", program], cwd=repo / "benchmarks", input=json.dumps(runs), text=True,
            capture_output=True,
        )  # fmt: skip

    same = {of: records[:1] for of, records in RUNS[name].items()}
    done = end_of(same, RUNS[name])
    assert (done.returncode, done.stdout) == (1, "")
    # of three differing scores, only this one exceeds rounding
    assert done.stderr == f"different: {WORDS[name]}\n"
    assert end_of(same).returncode == 0


@pytest.fixture
def published(repo, monkeypatch):
    monkeypatch.syspath_prepend(repo / "benchmarks")
    # common.py extends the path
    monkeypatch.setattr(sys, "path", [*sys.path])
    return importlib.import_module("published")


def test_the_kernel_of_a_published_run(published):
    """MaxText's 16B: 6 sequences, 32 layers, 24 heads of 256, 2,048 positions; half of the pairs and the blocks of 512
    on the diagonal, nine products, at 55% of 197 TFLOP/s."""
    row = published.ROWS["maxtext_16B"]
    config = published.load_config(str(published.CONFIG), row.overrides)
    seconds = published.kernel_seconds(config, published.tpu_target(row.slice), 0.55)
    product = 2 * 6 * 24 * 256 * (2048 * 2048 / 2 * 1.25)
    assert seconds == pytest.approx(32 * 9 * product / (0.55 * 197e12))


@pytest.mark.parametrize("arguments", [["llama"], ["maxtext_16B", "--kernel-share", "1.5"]])
def test_rows_and_shares_are_checked(published, monkeypatch, arguments):
    monkeypatch.setattr(sys, "argv", ["published.py", *arguments])
    with pytest.raises(UserError, match=f"{arguments[-1]}.*expected"):
        published.main()


def test_operations_that_a_kernel_replaces_have_its_name(published):
    """All products of attention, forward and backward."""

    def loss(q, k, v):
        return Causal()(q, k, v, scale=1.0).sum()

    q_BTHK = jnp.ones((1, 64, 2, 8))
    text = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q_BTHK, q_BTHK, q_BTHK).as_text(debug_info=True)
    names = re.findall(r'loc\("([^"]*dot_general)"', text)
    assert {"transpose(" in name for name in names} == {True, False}
    assert [name for name in names if not re.search(rf"\b{published.ATTEND}\b", name)] == []
