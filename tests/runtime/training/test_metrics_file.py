"""Bytes after the last valid record of a metrics file are ignored and removed."""

import json

import pytest

from mesh_transformer.errors import UserError
from mesh_transformer.logs import JsonLines, cut_broken_end, read_json_lines

GOOD = {"step": 7, "train/loss": 2.5, "train/grad_norm": None, "train/steps_redone": 3}
BROKEN = [
    b'{"step": 8, "train/lo',
    b"[" * 200_000,
    b'{"step": 8, "train/loss": "two"}',
    b'{"step": 8, "train/steps_redone": "three"}',
    b'{"step": 8, "train/loss": Infinity}',
    b'{"step": 8, "train/loss": 1e999}',
    b'{"step": 8, "train/steps_redone": 1e30}',
    b'{"step": 8, "train/steps_redone": -1}',
    b'{"step": 8, "train/loss": 1' + b"0" * 400 + b"}",
    b'{"step": 1e30}',
    b'{"step": 1' + b"0" * 30 + b"}",
    b'{"step": true}',
    b'{"step": -1}',
    b'{"train/loss": 2.5}',
    b"null",
    b"\xff\x00",
    b'{"step": 8, "train/lo\n\nmore of it',
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda line: line[:50].decode("ascii", "backslashreplace"))
def test_a_broken_end_is_removed_with_one_warning(tmp_path, caplog, broken):
    path = tmp_path / "metrics.jsonl"
    whole = json.dumps(GOOD).encode() + b"\n"
    path.write_bytes(whole + broken + b"\n")
    assert read_json_lines(str(path)) == [GOOD]
    cut_broken_end(str(path))
    assert path.read_bytes() == whole
    (message,) = caplog.messages
    assert message.startswith(f"{path} ended with a line that is not a record")
    assert len(message) < len(str(path)) + 150
    cut_broken_end(str(path))
    assert len(caplog.messages) == 1


def test_the_first_record_of_a_killed_run_is_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "train/lo')
    cut_broken_end(str(path))
    assert path.read_bytes() == b""


def test_a_file_of_another_program_is_not_changed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"epoch": 1, "loss": 2.5}\n' * 3)
    with pytest.raises(UserError, match=r"metrics\.jsonl has no record of a step"):
        cut_broken_end(str(path))
    assert path.read_text() == '{"epoch": 1, "loss": 2.5}\n' * 3


def test_what_is_whole_stays(tmp_path, caplog):
    """Also after an invalid line in the middle, and without a newline at the end."""
    path = tmp_path / "metrics.jsonl"
    content = b'{"step": 6, "tr\n' + json.dumps(GOOD).encode()
    path.write_bytes(content)
    cut_broken_end(str(path))
    assert path.read_bytes() == content
    sink = JsonLines(str(path))
    sink.write(8, {"train/loss": 2.0})
    sink.close()
    cut_broken_end(str(path))
    assert [record["step"] for record in read_json_lines(str(path))] == [7, 8]
    assert not caplog.messages
