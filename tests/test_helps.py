"""--help describes every option of every command."""

import re
import runpy
import sys
from pathlib import Path

import pytest

ENTRY_POINTS = (
    "create_finetune_tfrecords", "device_sample", "device_serve", "device_train", "eval_harness", "from_hf_weights",
    "prepare_dataset", "resharding_example", "slim_model", "to_hf_weights", "tpu_utils", "tpu_utils create",
    "tpu_utils run", "train", "train_tokenizer",
)  # fmt: skip
DRIVER = (
    "--wheelhouse DIR install the hosts' packages from the wheels in DIR, without internet",
    "--preemptible cheaper capacity that the cloud may preempt at any time",
    "--price P price of a chip-hour; the driver prints the cost of the run",
    "--user USER login name on the hosts (default: your login name on this machine)",
    "--slices N number of slices of this type; with --tpu they are the nodes of one queued resource (default: 1)",
)
TEXTS = {
    "train": (
        *DRIVER,
        "--fresh-opt with --tune-model-path: start with fresh optimizer state instead of loading it",
        "--ignore-keys KEY,... ignore these keys of the config file",
    ),
    "eval_harness": DRIVER,
    "device_train": (
        "start with fresh optimizer state instead of loading it",
        "--plan-mesh [SLICE] do not train: print which host and device holds what",
    ),
    "tpu_utils create": (
        "--user USER login name on the hosts (default: your login name on this machine)",
        "--slices N with --queued: number of slices of this type, as --node-count of gcloud (default: 1)",
    ),
}


MISTAKES = (
    "device_sample --bogus",
    "tpu_utils create --bogus",
    "create_finetune_tfrecords",
    "from_hf_weights --bogus",
    "train --bogus",
)


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_one_line_that_names_the_help(
    command: str, repo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *arguments = command.split()
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(repo / f"{name}.py"))["main"]()
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    action = " create" * ("create" in arguments)
    assert re.fullmatch(rf"error: .+; see {name}\.py{action} --help\n", shown)


@pytest.mark.parametrize("command", ENTRY_POINTS)
def test_every_option_is_explained(
    command: str, repo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *action = command.split()
    monkeypatch.setattr(sys, "argv", [name, *action, "--help"])
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(repo / f"{name}.py"))["main"]()
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    # an option is indented by two spaces; its text follows on the same line, or on the next one at column 24
    bare = re.findall(r"^  (-(?:(?!  ).)*)\n(?! {24})", shown, re.MULTILINE)
    assert bare == []
    text = " ".join(shown.split())
    for part in TEXTS.get(command, ()):
        assert part in text
