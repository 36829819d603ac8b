"""A task of lm-evaluation-harness with its own data: the likelihood of texts that count bottles."""

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
    """Write the file of the task and its twenty texts. Returns the folder for --include-path."""
    texts = folder / "counting.jsonl"
    texts.write_text("".join(json.dumps({"text": f"{i} bottles of beer"}) + "\n" for i in range(20)))
    tasks = folder / "tasks"
    tasks.mkdir()
    (tasks / "counting.yaml").write_text(TASK.format(file=texts))
    return tasks
