"""The words of messages."""

import io
import logging
import tarfile
import unicodedata
from pathlib import Path
from unittest import mock

import pytest

from mesh_transformer import logs
from mesh_transformer.commands import prepare
from mesh_transformer.errors import BadDataError, RunError, UserError, byte_size, plural, shown

# a color, the title of a window, a line that looks like one of the log, and text from right to left
HOSTILE = "\x1b[31mred\x1b]0;title\x07\r\n12:00:00 E error: fake\u202egnp.\x9b2J"
ESCAPED = r"\x1b[31mred\x1b]0;title\x07\r\n12:00:00 E error: fake\u202egnp.\x9b2J"


@pytest.mark.parametrize(
    ("count", "noun", "several", "words"),
    [
        (1, "document", "", "1 document"),
        (0, "document", "", "0 documents"),
        (12345, "document", "", "12,345 documents"),
        (1, "process", "processes", "1 process"),
        (2, "process", "processes", "2 processes"),
    ],
)
def test_a_count(count: int, noun: str, several: str, words: str) -> None:
    assert plural(count, noun, several) == words


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (524_288, "524 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (1_500_000_000, "1.5 GB"),
    ],
)
def test_a_number_of_bytes(count: int, words: str) -> None:
    assert byte_size(count) == words


def test_control_characters_are_escaped() -> None:
    assert shown(HOSTILE) == ESCAPED
    # nothing else is: tabs, accents, other writing systems, emoji with joiners
    text = "a\tb \u00e9 e\u0301 \u65e5\u672c \u05d0 \U0001f469\u200d\U0001f4bb \ud800"
    assert shown(text) == text
    control = {chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) in ("Cc", "Zl", "Zp")}
    assert all(shown(character) != character for character in control - {"\t"})


@pytest.mark.parametrize("kind", [UserError, RunError])
def test_a_message_has_a_line_for_each_argument(kind: type[Exception]) -> None:
    assert str(kind(HOSTILE, f"  {HOSTILE}")) == f"{ESCAPED}\n  {ESCAPED}"
    assert str(kind("")) == ""
    # an error in the message of another one
    assert str(kind(f"a: {kind(HOSTILE)}")) == f"a: {ESCAPED}"


def test_a_place_in_a_file_is_escaped() -> None:
    assert str(BadDataError(HOSTILE, "damaged", HOSTILE)) == f"{ESCAPED}: {ESCAPED}"


def test_arguments_of_a_log_line_are_escaped() -> None:
    stream = io.StringIO()
    with mock.patch("sys.stderr", stream):
        logs.set_up()
        logs.log.info("%s, %d,\n%s; %s", HOSTILE, 1, OSError(HOSTILE), UserError("a", HOSTILE))
        logging.getLogger("library").warning("a\x1bb\nc")
        logs.log.info("%r", "a\nb\x1b")
    lines = [line[len("12:00:00 I ") :] for line in stream.getvalue().splitlines()]
    assert lines[0] == f"{ESCAPED}, 1,"
    assert stream.getvalue().splitlines()[1:3] == [f"{ESCAPED}; a", ESCAPED]
    assert lines[3] == r"a\x1bb"
    # once, not twice
    assert lines[5] == r"'a\nb\x1b'"


def test_names_of_an_archive_are_escaped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As ../shared/cases/hostile/names_escape.tar has them."""
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in (f"{HOSTILE}.exe", f"{HOSTILE}.jsonl", "ok.jsonl"):
            content = b"no JSON" if HOSTILE in name else b'{"text": "' + b"a text " * 99 + b'"}'
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    options = ["--tokenizer", "bytes", "--output", str(tmp_path / "set"), "--seq", "8", "--workers", "1"]
    with pytest.raises(UserError) as raised:
        prepare.main(["--input", str(tmp_path / "a.tar"), *options])
    prepare.main(["--input", str(tmp_path / "a.tar"), *options, "--on-error", "skip"])
    told = str(raised.value) + "".join(capfd.readouterr()) + (tmp_path / "set/manifest.json").read_text()
    assert ESCAPED in str(raised.value)
    control = {character for character in HOSTILE if shown(character) != character} - {"\n"}
    assert control
    assert not control & set(told)
    assert "\n12:00:00 E error: fake" not in told
