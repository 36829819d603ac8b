"""eval_harness.py on two workers: tables and report as those of one process."""

from __future__ import annotations

import json

import pytest
from commands import run, write_run

pytest.importorskip("lm_eval")
pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

TASK = """
task: counting
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: byte_perplexity}}, {{metric: bits_per_byte}}]
"""


def test_the_same_numbers_on_two_workers(tmp_path, worker_environment):
    write_run(tmp_path, optimizer={"total_steps": 2}, data={"val_set": {}})
    file = tmp_path / "counting.jsonl"
    file.write_text("".join(json.dumps({"text": f"{i} bottles of beer"}) + "\n" for i in range(20)))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/counting.yaml").write_text(TASK.format(file=file))
    run("device_train.py", "--config", "config.json", cwd=tmp_path)

    def evaluated(name, *more, **environment):
        command = [
            "--config",
            "config.json",
            "--tasks",
            "counting",
            "--include-path",
            "tasks",
            "--output",
            name,
        ]
        output, _ = run("eval_harness.py", *command, *more, cwd=tmp_path, **environment)
        assert "counting" in output
        return json.loads((tmp_path / name).read_text())

    environment = {**worker_environment, "TMPDIR": str(tmp_path), "HF_HOME": str(tmp_path / "hf")}
    alone = evaluated("alone.json", **environment)
    together = evaluated("together.json", "--processes", "2", **environment)
    assert together["evaluation"]["step"] == 2
    a, b = (report["results"]["counting"]["byte_perplexity,none"] for report in (alone, together))
    assert b == pytest.approx(a, rel=1e-5)
