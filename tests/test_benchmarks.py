"""Benchmarks that compare results exit with code 1 if the results differ."""

import json
import subprocess
import sys

import pytest

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
