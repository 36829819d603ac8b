"""Archives for hosts: the hash of the content is the name. Equal content gives equal archives."""

import importlib.util
import io
import os
import shutil
import subprocess
import tarfile
from importlib import metadata
from pathlib import Path

import pytest

from mesh_transformer.cloud import archive
from mesh_transformer.cloud.environment import ExistingEnvironment, NewEnvironment, pins
from mesh_transformer.cluster.driver.compute_target import environment_of
from mesh_transformer.errors import UserError


def tree(folder: Path) -> Path:
    for name, text in {
        "train.py": "1", "notes.txt": "no", "mesh_transformer/a.py": "a", "mesh_transformer/__pycache__/a.pyc": "x",
        "mesh_transformer/.hidden": "x", "configs/c.json": "{}", "scripts/s.sh": "s", "runs/big": "x", ".git/x": "x",
        "requirements.txt": "r", "tests/test_x.py": "t",
    }.items():  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "scripts/s.sh").chmod(0o755)
    return folder


def test_content(tmp_path: Path) -> None:
    made = archive.code_archive(str(tree(tmp_path)))
    with tarfile.open(fileobj=io.BytesIO(made.content)) as tar:
        modes = {entry.name: entry.mode for entry in tar}
    assert modes == {
        "configs/c.json": 0o644, "mesh_transformer/a.py": 0o644, "requirements.txt": 0o644, "scripts/s.sh": 0o755,
        "train.py": 0o644,
    }  # fmt: skip


def test_an_installed_package_gives_a_checkout(tmp_path: Path) -> None:
    for name in (
        "mesh_transformer/a.py", "mesh_transformer/shipped/configs/c.json", "mesh_transformer/shipped/scripts/s.sh",
        "mesh_transformer/shipped/requirements.txt", "other/b.py", "six.py",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    with tarfile.open(fileobj=io.BytesIO(archive.code_archive(str(tmp_path)).content)) as tar:
        assert tar.getnames() == ["mesh_transformer/a.py", "configs/c.json", "requirements.txt", "scripts/s.sh"]


def test_hash_depends_on_content_only(tmp_path: Path) -> None:
    one, two = tree(tmp_path / "one"), tree(tmp_path / "two")
    os.utime(two / "train.py", (1, 1))
    (two / "notes.txt").write_text("other")
    first = archive.code_archive(str(one))
    assert archive.code_archive(str(two)) == first
    seen = {first.hash}
    for change in ("mesh_transformer/a.py", "configs/c.json", "new.py"):
        (two / change).write_text("changed")
        seen.add(archive.code_archive(str(two)).hash)
    (two / "train.py").chmod(0o755)
    seen.add(archive.code_archive(str(two)).hash)
    assert len(seen) == 5


def test_invalid_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="give the root of a checkout"):
        archive.code_archive(str(tmp_path))
    with pytest.raises(UserError, match="no folder"):
        archive.FolderArchive(str(tmp_path / "none"))
    monkeypatch.setattr(archive, "MAX_BYTES", 3)
    with pytest.raises(UserError, match="put large data in a bucket"):
        archive.pack(
            dict.fromkeys(["train.py", "scripts/s.sh", "configs/c.json"], str(tree(tmp_path))), archive.MAX_BYTES
        )


@pytest.mark.parametrize("place", ["mesh_transformer/b.py", "data", "notes.py", "configs/more"])
def test_a_link_out_of_the_checkout_is_refused(tmp_path: Path, place: str) -> None:
    """The hosts would get a readable copy of a file that others cannot read here."""
    root, outside = tree(tmp_path / "root"), tmp_path / "outside"
    outside.mkdir()
    (outside / "key").touch(0o600)
    target = outside if place in ("data", "configs/more") else outside / "key"
    (root / place).symlink_to(target)
    with pytest.raises(UserError, match=rf"root/{place} is a link to {target}, and the hosts get only what lies in"):
        archive.code_archive(str(root))
    (root / place).unlink()
    (root / "scripts/s2.sh").symlink_to("s.sh")
    assert archive.code_archive(str(root))


def test_files_that_git_does_not_track_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    root = tree(tmp_path)
    shutil.rmtree(root / ".git")
    archive.code_archive(str(root))
    assert not caplog.messages
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", "-C", str(root), *command], check=True)
    archive.code_archive(str(root))
    assert not caplog.messages
    (root / "data").mkdir()
    for name in ("data/key.pem", "notes.py"):
        (root / name).touch()
    archive.code_archive(str(root))
    assert caplog.messages == ["the code for the hosts has files that git does not track: data/key.pem, notes.py"]


def test_archive_of_a_folder(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        (folder / "a.whl").write_bytes(b"1" * 5000)
        (folder / "b.whl").write_text("2")
    (one / "no").mkdir()
    first = archive.FolderArchive(str(one))
    assert archive.FolderArchive(str(two)).hash == first.hash
    for change, text in (("b.whl", "3"), ("c.whl", "")):
        (two / change).write_text(text)
        assert archive.FolderArchive(str(two)).hash != first.hash
    os.rename(one / "b.whl", one / "d.whl")
    assert archive.FolderArchive(str(one)).hash != first.hash
    packed = io.BytesIO()
    first.write(packed)
    packed.seek(0)
    with tarfile.open(fileobj=packed) as tar:
        assert {entry.name: entry.size for entry in tar} == {"a.whl": 5000, "d.whl": 1}


def test_environment_of_a_slice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment_of("/venv", None) == ExistingEnvironment("/venv")
    for found, extra in ((object(), ("jax[tpu]", "lm-eval")), (None, ("jax[tpu]",))):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, found=found: found)
        made = environment_of(None, str(tmp_path))
        assert isinstance(made, NewEnvironment)
        assert (made.extra, made.wheelhouse) == (extra, str(tmp_path))
        assert "\nray" in made.requirement_lines


def test_hash_of_an_environment_depends_on_all_inputs(tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_text("numpy\n")
    (tmp_path / "wheels").mkdir()
    plain = NewEnvironment(str(tmp_path / "r.txt"))
    assert plain.requirement_lines == "numpy\n\njax[tpu]\n"
    wheels = NewEnvironment(str(tmp_path / "r.txt"), wheelhouse=str(tmp_path / "wheels"))
    names = [
        plain.hash("script"), plain.hash("other script"), wheels.hash("script"),
        NewEnvironment(str(tmp_path / "r.txt"), ()).hash("script"),
        NewEnvironment(str(tmp_path / "r.txt"), python="3.99").hash("script"),
    ]  # fmt: skip
    (tmp_path / "wheels" / "a.whl").write_text("x")
    names.append(NewEnvironment(str(tmp_path / "r.txt"), wheelhouse=str(tmp_path / "wheels")).hash("script"))
    assert len(set(names)) == len(names)
    assert NewEnvironment(str(tmp_path / "r.txt")).hash("script") == names[0]
    with pytest.raises(UserError, match="no requirements file"):
        _ = NewEnvironment(str(tmp_path / "none")).requirement_lines
    with pytest.raises(UserError, match="give its absolute path"):
        ExistingEnvironment("venv")


def test_pins_are_the_versions_of_the_driver() -> None:
    lines = pins().splitlines()
    assert f"jax=={metadata.version('jax')}" in lines
    assert f"ray=={metadata.version('ray')}" in lines
    assert not [line for line in lines if "+" in line or line.startswith("mesh-transformer")]
