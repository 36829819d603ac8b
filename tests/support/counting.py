"""A task of the harness with data of its own: how well a model foresees texts that count bottles."""

import json
from pathlib import Path

NAME = "counting"
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


def write_task(folder: Path) -> Path:
    """The task's file and its twenty texts; returns what --include-path takes."""
    texts = folder / "counting.jsonl"
    texts.write_text("".join(json.dumps({"text": f"{i} bottles of beer"}) + "\n" for i in range(20)))
    tasks = folder / "tasks"
    tasks.mkdir()
    (tasks / "counting.yaml").write_text(TASK.format(file=texts))
    return tasks
