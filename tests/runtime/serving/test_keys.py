"""The file with the API keys: its form, and its changes while the server runs."""

import os
from pathlib import Path

import pytest

from mesh_transformer.runtime.serving import keys
from mesh_transformer.runtime.serving.keys import ApiKeys


def accepted(api_keys: ApiKeys, *candidates: bytes) -> list[bytes]:
    return [key for key in candidates if api_keys.accepts(key)]


def test_keys_are_read_one_a_line(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(b"first-key\r\n\n  second-key\n")
    api_keys = ApiKeys.of_file(str(tmp_path / "keys"))
    assert api_keys.required
    assert accepted(api_keys, b"first-key", b"second-key", b"", b"first-key ", b"third") == [
        b"first-key",
        b"second-key",
    ]
    assert not ApiKeys().required


def test_a_changed_file_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    now = 100.0
    monkeypatch.setattr(keys.time, "monotonic", lambda: now)
    path = tmp_path / "keys"
    path.write_text("first\n")
    path.chmod(0o600)
    api_keys = ApiKeys.of_file(str(path))

    def write(text: str, time: int) -> None:
        path.write_text(text)
        os.utime(path, (time, time))

    write("other\n", 1)
    now += 0.9
    # at most one look a second
    assert accepted(api_keys, b"first", b"other") == [b"first"]
    now += 0.2
    assert accepted(api_keys, b"first", b"other") == [b"other"]
    # of the same size, at another time; and of another size at the same time
    for text, time in [("third\n", 2), ("the fourth".replace(" ", "-") + "\n", 2)]:
        write(text, time)
        now += 1.1
        assert accepted(api_keys, b"first", b"other", text.strip().encode()) == [text.strip().encode()]
    assert caplog.messages == [f"--api-key-file {path} has changed: 1 key holds now"] * 3
    caplog.clear()
    # a file that cannot be read: the former keys hold, and one line says so for each change
    for change in (lambda: write("", 3), lambda: write("a key\n", 4), path.unlink):
        change()
        for _ in range(3):
            now += 1.1
            assert accepted(api_keys, b"first", b"the-fourth", b"a key", b"") == [b"the-fourth"]
    assert [message.endswith(": the former keys hold") for message in caplog.messages] == [True] * 3
    path.touch(0o600)
    write("first\n", 5)
    now += 1.1
    assert accepted(api_keys, b"first", b"the-fourth") == [b"first"]
