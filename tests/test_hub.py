"""Names on the Hugging Face hub, with the real library and a server on this machine."""

import pytest
from support.hub_server import TOKEN

from mesh_transformer import hub, liveness
from mesh_transformer.errors import UserError

CONFIG = {"config.json": b"{}", "tokenizer.json": b'{"model": {}}'}
WEIGHTS = {"model.safetensors": b"weights"}
OTHERS = {"README.md": b"#", "pytorch_model.bin": b"old", "onnx/model.onnx": b"other", "consolidated.safetensors": b"x"}


def read(folder, name):
    with open(f"{folder}/{name}", "rb") as file:
        return file.read()


def test_only_the_files_of_the_model_are_downloaded(hub_server):
    commit = hub_server.commit("org/model", {**CONFIG, **WEIGHTS, **OTHERS})
    described = hub.model_folder("hf://org/model", weights=False)
    assert sorted(hub_server.downloads()) == ["config.json", "tokenizer.json"]
    folder = hub.model_folder("hf://org/model")
    assert folder == described
    assert folder.endswith(commit)
    assert sorted(hub_server.downloads()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert read(folder, "model.safetensors") == b"weights"


def test_a_download_is_progress_for_the_watchdog(hub_server, monkeypatch):
    hub_server.commit("org/large", {**CONFIG, "model.safetensors": bytes(30 << 20)})
    recorded = []
    monkeypatch.setattr(liveness, "record_progress", lambda: recorded.append(1))
    hub.model_folder("hf://org/large")
    # the two downloads, their three files, and the parts of the large file
    assert len(recorded) > 6


def test_shards_and_old_files(hub_server):
    shards = {f"model-0000{i}-of-00002.safetensors": b"%d" % i for i in (1, 2)}
    hub_server.commit("org/shards", {**CONFIG, **shards, "model.safetensors.index.json": b"index", **OTHERS})
    hub.model_folder("hf://org/shards")
    assert set(hub_server.downloads()) == {*CONFIG, *shards, "model.safetensors.index.json"}
    hub_server.requests.clear()
    hub_server.commit("org/old", {**CONFIG, "pytorch_model.bin": b"old"})
    assert read(hub.model_folder("hf://org/old"), "pytorch_model.bin") == b"old"


def test_revisions(hub_server):
    commits = {
        branch: hub_server.commit("org/m", {**CONFIG, "model.safetensors": branch.encode()}, branch=branch)
        for branch in ("main", "step3", "refs/pr/1")
    }
    for branch, commit in commits.items():
        for revision in (branch, commit):
            assert read(hub.model_folder(f"hf://org/m@{revision}"), "model.safetensors") == branch.encode()
    assert hub.pinned("hf://org/m") == f"hf://org/m@{commits['main']}"
    assert hub.pinned("hf://org/m@step3") == f"hf://org/m@{commits['step3']}"
    assert hub.pinned("runs/mine") == "runs/mine"


def test_a_process_sees_one_commit(hub_server):
    """A repository may change between the check of a config and the reading of its weights."""
    first = hub_server.commit("org/moves", {**CONFIG, **WEIGHTS})
    hub.model_folder("hf://org/moves", weights=False)
    second = hub_server.commit("org/moves", {**CONFIG, "model.safetensors": b"new"})
    assert hub.model_folder("hf://org/moves").endswith(first)
    hub.forget()
    assert hub.model_folder("hf://org/moves").endswith(second)


def test_a_gguf_file_is_downloaded_alone(hub_server):
    parts = {f"q/m-0000{i}-of-00002.gguf": b"part %d" % i for i in (1, 2)}
    commit = hub_server.commit("org/m", {**CONFIG, **WEIGHTS, **parts, "m.Q4_0.gguf": b"other"})
    path = hub.downloaded_gguf("hf://org/m/q/m-00002-of-00002.gguf")
    assert path.endswith(f"{commit}/q/m-00002-of-00002.gguf")
    assert sorted(hub_server.downloads()) == sorted(parts)
    assert hub.pinned("hf://org/m@main/m.Q4_0.gguf") == f"hf://org/m@{commit}/m.Q4_0.gguf"
    with pytest.raises(UserError, match=r"has no file x.gguf; it has GGUF files, .*hf://org/m/FILE: .*m.Q4_0.gguf"):
        hub.downloaded_gguf("hf://org/m/x.gguf")


@pytest.mark.parametrize(
    ("path", "name", "revision", "file"),
    [
        ("hf://a/b/c.gguf", "a/b", None, "c.gguf"),
        ("hf://a/b@v1/c/d.gguf", "a/b", "v1", "c/d.gguf"),
        ("hf://a/b@refs/pr/1/d.gguf", "a/b", "refs/pr/1", "d.gguf"),
        ("hf://a/b@v1", "a/b", "v1", None),
        ("hf://a/b-GGUF", "a/b-GGUF", None, None),
    ],
)
def test_names_of_gguf_files(path, name, revision, file):
    assert (*hub.parse(path), hub.gguf_file(path)) == (name, revision, file)


@pytest.mark.parametrize(
    "name", ["hf://", "hf://a/b/c", "hf://a/b@", "hf://a b", "hf://a/../b", "hf://a/b@../x", "hf://a--b/c", "hf:///a"]
)
def test_malformed_names(name):
    with pytest.raises(UserError, match=r"expected hf://ORG/NAME or hf://ORG/NAME@REVISION"):
        hub.model_folder(name)


def test_refusals_are_one_line(hub_server, monkeypatch):
    hub_server.commit("org/secret", {**CONFIG, **WEIGHTS}, private=True)
    hub_server.commit("org/gated", {**CONFIG, **WEIGHTS}, gated=True)
    hub_server.commit("org/open", {**CONFIG, **WEIGHTS})
    hub_server.commit("org/empty", CONFIG)
    hub_server.commit("org/gguf", {"model.gguf": b""})
    for name, reason in {
        "org/none": "no such repository on the Hugging Face hub, or a private one.*HF_TOKEN",
        "org/secret": "no such repository",
        "org/gated": "is gated: accept its conditions.*HF_TOKEN",
        "org/open@nothing": "no such branch, tag or commit",
        "org/empty": "has no weights",
        "org/gguf": "has no config.json",
    }.items():
        with pytest.raises(UserError, match=f"hf://{name}.*{reason}") as caught:
            hub.model_folder(f"hf://{name}")
        assert "\n" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name in ("org/secret", "org/gated"):
        assert read(hub.model_folder(f"hf://{name}"), "model.safetensors") == b"weights"


def test_without_network(hub_server, monkeypatch):
    from huggingface_hub import constants

    hub_server.commit("org/model", {**CONFIG, **WEIGHTS})
    hub_server.commit("org/part", {**CONFIG, **WEIGHTS})
    folder = hub.model_folder("hf://org/model")
    hub.model_folder("hf://org/part", weights=False)
    hub.forget()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub_server.requests.clear()
    assert hub.model_folder("hf://org/model") == folder
    assert hub.pinned("hf://org/model") == f"hf://org/model@{folder.rpartition('/')[2]}"
    for name in ("org/part", "org/other"):
        with pytest.raises(UserError) as caught:
            hub.model_folder(f"hf://{name}")
        assert str(caught.value) == (
            f"hf://{name} is not in this machine's cache, and the Hugging Face hub cannot be reached (HF_HUB_OFFLINE "
            "is set)"
        )
    assert not hub_server.requests


def test_an_unreachable_hub(hub_server, monkeypatch):
    """The library does without the hub if its cache has the files."""
    from huggingface_hub import constants

    hub_server.commit("org/model", {**CONFIG, **WEIGHTS})
    folder = hub.model_folder("hf://org/model")
    hub.forget()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert hub.model_folder("hf://org/model") == folder
    with pytest.raises(UserError, match="the Hugging Face hub cannot be reached"):
        hub.model_folder("hf://org/other")
