"""Command lines for the shells of hosts: no value is split, expanded or executed. Real shells read them."""

import io
import os
import shlex
import shutil
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest
from support.local_hosts import local_pod

from mesh_transformer.cloud import head as heads
from mesh_transformer.cloud import shell
from mesh_transformer.cloud.environment import ExistingEnvironment
from mesh_transformer.cloud.launch import (
    STATE_FOLDER,
    JoinOptions,
    Provisioned,
    fetch_logs,
    provision,
    stop_ray,
)

REPO = Path(__file__).parents[2]
HOSTILE = [
    "two words", "it's", 'say "x"', "a; touch hacked", "$(touch hacked)", "`touch hacked`", "a\ntouch hacked\n",
    "a & touch hacked",
    "> hacked", "*", "~", "$HOME", "", "-n", "\\", "#",
]  # fmt: skip
RAY = """#!/usr/bin/env bash
printf '%s\\0' "$@" "$PYTHONPATH" "$RAY_AUTH_MODE" "$RAY_AUTH_TOKEN_PATH" "$STRANGE" >"$HOME/asked"
echo Ray runtime started
exec sleep 600
"""


def read_by_bash(line: str, folder: Path) -> list[str]:
    """The words into which a shell splits a line. Its home folder has a special name."""
    command = ["bash", "-c", f"printf '%s\\0' {line}"]
    done = subprocess.run(command, cwd=folder, env={"HOME": "/ho me'"}, capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def test_words_arrive_unchanged(tmp_path: Path) -> None:
    assert read_by_bash(shell.join(*HOSTILE), tmp_path) == HOSTILE
    paths = [shell.below(shell.HomePath(text, prefix=f"{text}="), "bin") for text in HOSTILE]
    assert read_by_bash(shell.join(*paths), tmp_path) == [f"{text}=/ho me'/{text}/bin" for text in HOSTILE]
    assert list(tmp_path.iterdir()) == []


def test_run_takes_a_program_with_its_arguments_or_a_line(tmp_path: Path) -> None:
    assert read_by_bash(shell.line_of(["echo", *HOSTILE]), tmp_path) == ["echo", *HOSTILE]
    line = shell.line_of(["echo one two; echo $((1 + 2)) | cat"])
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout == "one two\n3\n"


@pytest.fixture
def checkout(tmp_path: Path) -> str:
    """A checkout with our scripts alone."""
    (tmp_path / "tree/mesh_transformer").mkdir(parents=True)
    shutil.copytree(REPO / "scripts", tmp_path / "tree/scripts")
    return str(tmp_path / "tree")


def test_a_launch_with_special_characters(tmp_path: Path, checkout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Home folder, environment, variables and arguments of Ray contain shell syntax. No shell executes it."""
    strange = "a 'b' \"c\"; touch hacked; $(touch hacked)\ntouch hacked #"
    pod = local_pod([tmp_path / "ho me; touch hacked"], monkeypatch)
    (home,) = tmp_path.glob("ho me*")
    ray = tmp_path / f"en v {strange}" / "bin" / "ray"
    ray.parent.mkdir(parents=True)
    ray.write_text(RAY)
    ray.chmod(0o755)
    (tmp_path / "token").write_text("secret")
    join = JoinOptions("10.0.0.9:6379", str(tmp_path / "token"), (f"--labels={strange}",), {"STRANGE": strange})
    before = set(tmp_path.iterdir())

    made = provision(pod, ExistingEnvironment(str(ray.parents[1])), join, checkout)
    try:
        asked = (home / "asked").read_text().split("\0")[:-1]
        again = provision(pod, ExistingEnvironment(str(ray.parents[1])), join, checkout)
    finally:
        stop_ray(pod, made)
    assert asked == [
        "start", "--address=10.0.0.9:6379", "--node-ip-address=10.0.0.0", '--resources={"tpu_worker_0": 1}',
        *heads.NODE_OPTIONS, f"--labels={strange}", "--block", f"{home}/{made.code}", "token",
        f"{home}/{STATE_FOLDER}/ray_token", strange,
    ]  # fmt: skip
    assert shlex.split(made.python) == [f"{ray.parent}/python"]
    assert again.pushed == {"code": ()}
    assert (home / STATE_FOLDER / "logs/ray.log").read_text().count("Ray runtime started") == 1
    # it contains the token
    assert mode(home / STATE_FOLDER) == 0o700
    assert set(tmp_path.iterdir()) == before
    assert not list(tmp_path.rglob("hacked"))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_the_user_can_read_the_token_of_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the token one can run code on every host."""
    monkeypatch.setattr(heads, "_script", lambda *_, **__: "ray started")
    monkeypatch.setattr(heads, "_ray", lambda: "ray")
    before = os.umask(0)
    try:
        head = heads.start(str(tmp_path / "head"), "127.0.0.1")
    finally:
        os.umask(before)
    assert (mode(tmp_path / "head"), mode(Path(head.token_file))) == (0o700, 0o600)
    token = heads.read_token(head.token_file)
    assert len(token) == 64
    heads.start(str(tmp_path / "head"), "127.0.0.1")
    assert heads.read_token(head.token_file) == token


def entry(name: str, content: bytes = b"x", **fields: object) -> tuple[tarfile.TarInfo, io.BytesIO]:
    made = tarfile.TarInfo(name)
    made.size = len(content)
    for field, value in fields.items():
        setattr(made, field, value)
    return made, io.BytesIO(content)


@pytest.mark.parametrize(
    "entries",
    [
        [entry("../escaped")],
        [entry("link", b"", type=tarfile.SYMTYPE, linkname="../.."), entry("link/escaped")],
        [entry("hard", b"", type=tarfile.LNKTYPE, linkname="../../prey")],
        [entry("device", b"", type=tarfile.FIFOTYPE)],
    ],
    ids=["path", "link", "hard link", "fifo"],
)
def test_a_hosts_archive_of_logs_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entries) -> None:
    """A compromised host cannot write outside of the folder for its logs."""
    pod = local_pod([tmp_path / "home"], monkeypatch)
    (tmp_path / "prey").write_text("precious")
    scripts = tmp_path / "home" / "code" / "scripts"
    scripts.mkdir(parents=True)
    (tmp_path / "home" / STATE_FOLDER).mkdir()
    with tarfile.open(tmp_path / "evil.tar", "w") as tar:
        for info, content in entries:
            tar.addfile(info, content)
    (scripts / "pod_logs.sh").write_text(f"#!/bin/sh\ncp {tmp_path}/evil.tar $2\n")
    (scripts / "pod_logs.sh").chmod(0o755)
    with pytest.raises(tarfile.FilterError):
        fetch_logs(pod, Provisioned("code", "python", {}, {}), str(tmp_path / "logs"))
    assert not list(tmp_path.rglob("escaped"))
    assert not [path for path in (tmp_path / "logs").rglob("*") if not path.is_dir()]


def test_logs_keep_no_special_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pod = local_pod([tmp_path / "home"], monkeypatch)
    scripts = tmp_path / "home" / "code" / "scripts"
    scripts.mkdir(parents=True)
    (tmp_path / "home" / STATE_FOLDER / "logs").mkdir(parents=True)
    log = tmp_path / "home" / STATE_FOLDER / "logs" / "ray.log"
    log.write_text("a line\n")
    log.chmod(0o4777)
    (scripts / "pod_logs.sh").symlink_to(REPO / "scripts/pod_logs.sh")
    fetch_logs(pod, Provisioned("code", "python", {}, {}), str(tmp_path / "logs"))
    fetched = tmp_path / "logs/w0/logs/ray.log"
    assert fetched.read_text() == "a line\n"
    assert mode(fetched) == 0o755
