"""Tokenizers: known ids, and a clear way out where there is none."""

import contextlib
import itertools
import json
import shutil
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.gcs_server import GcsServer
from transformers import PreTrainedTokenizerFast

from mesh_transformer.data.corpus.options import SequenceOptions
from mesh_transformer.data.corpus.sequences import prepare
from mesh_transformer.data.records.tfrecords import RecordReader
from mesh_transformer.data.tokens import token_ids
from mesh_transformer.data.tokens.tokenizer import ByteTokenizer, load_tokenizer, save_tokenizer
from mesh_transformer.errors import UserError


@pytest.fixture(scope="module")
def gpt2(texts):
    return load_tokenizer(str(texts / "gpt2_tokenizer"))


@given(st.text())
def test_bytes_round_trip(text):
    text = text.encode("utf-8", "replace").decode()
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.encode_literal([text, ""]) == [ids, []]
    assert tokenizer.decode([*ids, tokenizer.eot, 300]) == text


def test_bytes_vocabulary():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.n_vocab, tokenizer.eot) == (257, 256)
    assert tokenizer.decode([0xC3]) == "\ufffd"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The files of the byte tokenizer, read by transformers and by us."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("bytes")
    save_tokenizer("bytes", str(folder))
    return AutoTokenizer.from_pretrained(folder), load_tokenizer(str(folder))


@given(st.text())
def test_transformers_reads_the_bytes(exported, text):
    text = text.encode("utf-8", "replace").decode()
    theirs, ours = exported
    ids = ByteTokenizer().encode(text)
    assert theirs.encode(text) == ids
    assert theirs.decode([*ids, 256], skip_special_tokens=True) == text
    assert ours.encode(text, add_special_tokens=True) == ids
    assert ours.decode([*ids, 256]) == text


def test_the_files_of_bytes_have_the_same_vocabulary(exported):
    (_, ours), bytes_ = exported, ByteTokenizer()
    assert (ours.n_vocab, ours.eot, ours.end_tokens, ours.bos) == (257, 256, (256,), None)
    for token in range(-1, 258):
        assert ours.token_bytes(token) == bytes_.token_bytes(token)
    assert ours.encode("a<|endoftext|>") == [97, 256]
    assert ours.encode_literal(["a<|endoftext|>"]) == [list(b"a<|endoftext|>")]


def test_gpt2_known_ids(gpt2):
    assert gpt2.encode("hello\n\nhello") == [31373, 198, 198, 31373]
    assert (gpt2.n_vocab, gpt2.eot) == (50257, 50256)
    assert gpt2.encode("a<|endoftext|>") == [64, 50256]
    assert gpt2.encode_literal(["a<|endoftext|>"]) == [[64, 27, 91, 437, 1659, 5239, 91, 29]]
    assert gpt2.encode("a<|endoftext|>") == [64, 50256]


def test_gpt2_decodes_what_a_padded_vocabulary_samples(gpt2):
    assert gpt2.decode([31373, 50256, 50257, 50399, 198]) == "hello\n"


def test_no_warning_on_long_text(gpt2, recwarn, caplog, capfd):
    assert len(gpt2.encode("word " * 5000)) > 4096
    assert not recwarn.list
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def test_lone_surrogates_do_not_crash(gpt2):
    assert gpt2.decode(gpt2.encode("a\ud800b")) == "a\ufffdb"
    assert load_tokenizer("bytes").encode("\ud800") == [63]


@pytest.mark.parametrize("keep", [{"tokenizer.json"}, {"tokenizer.json", "tokenizer_config.json"}])
def test_other_spellings_of_a_folder(texts, tmp_path, gpt2, keep):
    from transformers import AutoTokenizer, GPT2TokenizerFast  # noqa: F401

    GPT2TokenizerFast.from_pretrained(str(texts / "gpt2_tokenizer")).save_pretrained(str(tmp_path))
    for path in tmp_path.iterdir():
        if path.name not in keep:
            path.unlink()
    loaded = load_tokenizer(None, folder=str(tmp_path))
    assert loaded.encode("hello\n\nhello<|endoftext|>") == [31373, 198, 198, 31373, 50256]
    assert (loaded.n_vocab, loaded.eot) == (50257, 50256)


def test_the_fingerprint_tells_tokenizers_apart(texts, gpt2):
    again = load_tokenizer(None, folder=str(texts / "gpt2_tokenizer"))
    assert again.fingerprint == gpt2.fingerprint != load_tokenizer("bytes").fingerprint


@pytest.mark.parametrize(
    ("file", "changed", "same"),
    [
        ("tokenizer.json", json.dumps({"a": 1}), False),
        ("tokenizer_config.json", json.dumps({"add_prefix_space": True}), False),
        ("config.json", json.dumps({"model_type": "gpt2"}), False),
        ("config.json", json.dumps({"hidden_size": 9}), True),
        ("chat_template.jinja", "{{ messages }}", True),
        ("generation_config.json", "{}", True),
    ],
)
def test_the_fingerprint_is_of_the_files_content(tmp_path, monkeypatch, file, changed, same):
    """Only files that decide which ids a text gets."""
    import transformers

    folders = [tmp_path / name for name in ("first", "second")]
    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "from_pretrained", lambda *_, **__: read)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: read)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizer_json()))
    read = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token="<|endoftext|>")
    for folder in folders:
        folder.mkdir()
        shutil.copyfile(path, folder / "tokenizer.json")
        for name in ("config.json", "tokenizer_config.json"):
            (folder / name).write_text("{}")
    (folders[1] / file).write_text(changed)
    first, second = (load_tokenizer(str(folder)).fingerprint for folder in folders)
    assert (first == second) is same


@pytest.mark.parametrize(
    "content", [{}, {"tokenizer.json": "{"}, {"vocab.json": "[]", "merges.txt": ""}, {"vocab.json": "{}"}]
)
def test_folders_without_a_tokenizer(tmp_path, content):
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=r"--set data\.tokenizer=FOLDER"):
        load_tokenizer(str(tmp_path))


def tokenizer_json(**parts):
    vocabulary = {"<|endoftext|>": 0, "a": 1, "b": 2}
    special = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": "<|endoftext|>", **special}],
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        **dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")),
        **parts,
    }


# a start token before each text, whose entry is under another name
UNNAMED = {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
AROUND = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
}


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8="}},
        {"decoder": {"type": "Strip", "content": "a", "start": 9, "stop": 9}},
        {"post_processor": {**AROUND, "special_tokens": {"<s>": UNNAMED}}},
    ],
    ids=["read", "encode", "decode", "special tokens"],
)
def test_a_panic_of_the_library_names_the_file(tmp_path, parts):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizer_json()))
    assert load_tokenizer(str(tmp_path)).encode("ab") == [1, 2]
    path.write_text(json.dumps(tokenizer_json(**parts)))
    with pytest.raises(UserError, match=rf"{path}: the tokenizer cannot be read .*data\.tokenizer="):
        load_tokenizer(str(tmp_path))


def test_ids_that_leave_numbers_out(tmp_path):
    """The last ID counts, not the number of tokens. A number without a token is no text."""
    model = {"type": "BPE", "vocab": {"<|endoftext|>": 0, "a": 1, "b": 70_000}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json(model=model, decoder={"type": "Fuse"})))
    theirs = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    ours = load_tokenizer(str(tmp_path))
    assert ours.n_vocab == 70_001
    assert ours.encode("ab") == theirs.encode("ab") == [1, 70_000]
    assert ours.decode([1, 2, 70_000, 70_001]) == theirs.decode([1, 70_000]) == "ab"
    assert [ours.token_name(token) for token in (1, 2, 70_000)] == ["a", "", "b"]
    assert [ours.token_bytes(token) for token in (1, 2, 70_000)] == [b"a", b"", b"b"]
    (tmp_path / "a.txt").write_text("ab" * 50)
    written = prepare([str(tmp_path / "a.txt")], "out", str(tmp_path), ours, SequenceOptions(seq=9))
    with RecordReader(written.path) as records:
        assert set(records.read().example().tokens.tolist()) == {1, 70_000}


FAR = (1 << 20) + 1
SPECIAL = {"<s>": {"id": "<s>", "ids": [0, FAR], "tokens": ["<s>", "<s>"]}}


@pytest.mark.parametrize(
    ("file", "content", "token"),
    [
        ("tokenizer.json", {"model": {"type": "BPE", "vocab": {"a": 1, "far": FAR}, "merges": []}}, "far"),
        ("tokenizer.json", {"model": {"type": "Unigram", "unk_id": FAR, "vocab": [["a", 0.0], ["b", 0.0]]}}, "unk_id"),
        ("tokenizer.json", {"added_tokens": [{"id": FAR, "content": "far", "special": True}]}, "far"),
        ("tokenizer.json", {"post_processor": {"type": "TemplateProcessing", "special_tokens": SPECIAL}}, "<s>"),
        (
            "tokenizer.json",
            {"post_processor": {"type": "Sequence", "processors": [{"type": "BertProcessing", "sep": ["far", FAR]}]}},
            "far",
        ),
        ("tokenizer_config.json", {"added_tokens_decoder": {str(FAR): {"content": "far"}}}, "far"),
        ("added_tokens.json", {"far": FAR}, "far"),
        ("vocab.json", {"a": 0, "far": FAR}, "far"),
        ("tokenizer.5.0.json", {"model": {"vocab": {"far": 400_000_000}}}, "far"),
        ("tokenizer.model", f"YQ== 0\nZmFy {FAR}\n", "ZmFy"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ids_far_beyond_the_number_of_tokens_are_refused_unread(tmp_path, monkeypatch, file, content, token):
    from transformers import AutoTokenizer

    def read(*_, **__):
        raise AssertionError("the library reads the files")

    for kind in (AutoTokenizer, PreTrainedTokenizerFast):
        monkeypatch.setattr(kind, "from_pretrained", read)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    (tmp_path / file).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(
        UserError, match=rf"{tmp_path / file}: the token '{token}' has the ID \d+; .* at most {1 << 20}:"
    ):
        load_tokenizer(str(tmp_path))


def test_a_vocabulary_from_another_kind_of_file_is_checked_when_it_was_read(tmp_path, monkeypatch):
    monkeypatch.setattr("mesh_transformer.data.tokens.token_ids.check_files", lambda *_: None)
    model = {"type": "BPE", "vocab": {"<|endoftext|>": 0, "a": 1, "b": FAR}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json(model=model)))
    with pytest.raises(UserError, match=rf"the token 'b' has the ID {FAR}; with 3 tokens"):
        load_tokenizer(str(tmp_path))


def test_ids_up_to_four_times_the_number_of_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr("mesh_transformer.data.tokens.token_ids._ALWAYS_ALLOWED", 0)
    path = tmp_path / "tokenizer.json"
    for last in (12, 13):
        model = {"type": "BPE", "vocab": {"<|endoftext|>": 0, "a": 1, "b": last}, "merges": []}
        path.write_text(json.dumps(tokenizer_json(model=model)))
        with contextlib.nullcontext() if last == 12 else pytest.raises(UserError, match="ID 13; with 3 .* at most 12:"):
            token_ids.check_files(str(tmp_path), "folder")
            assert load_tokenizer(str(tmp_path)).encode("ab") == [1, last]


def test_other_threads_go_on_while_a_long_text_is_encoded(gpt2):
    done, ticks = threading.Event(), []

    def tick():
        while not done.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.001)

    other = threading.Thread(target=tick)
    other.start()
    began = time.monotonic()
    gpt2.encode("a" * 1_000_000)
    ended = time.monotonic()
    done.set()
    other.join()
    while_encoding = [began, *(at for at in ticks if began < at < ended), ended]
    assert max(b - a for a, b in itertools.pairwise(while_encoding)) < (ended - began) / 2


def test_an_unreachable_hub_names_the_way_out(monkeypatch, tmp_path):
    import huggingface_hub

    def fail(*_, **__):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    for spec in (None, "gpt2", "some/name"):
        with pytest.raises(UserError, match=r"no connection.*--set data\.tokenizer=FOLDER"):
            load_tokenizer(spec, folder=str(tmp_path))
    with pytest.raises(UserError, match="no such tokenizer folder"):
        load_tokenizer("./nowhere")


def test_names_on_the_hub(hub_server, texts):
    """GPT-2's is the default. Weights are not downloaded."""
    hub_server.commit_folder("gpt2", texts / "gpt2_tokenizer")
    hub_server.commit("org/model", hub_server.repos["gpt2"].files() | {"model.safetensors": b"weights"}, branch="v1")
    for spec in (None, "gpt2", "hf://gpt2", "org/model@v1", "hf://org/model@v1"):
        assert load_tokenizer(spec).encode("hello\n\nhello") == [31373, 198, 198, 31373]
    assert "model.safetensors" not in hub_server.downloads()


def test_nothing_is_run_from_a_folder(tmp_path, texts):
    for name in ("vocab.json", "merges.txt"):
        shutil.copyfile(texts / "gpt2_tokenizer" / name, tmp_path / name)
    marker = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": ["evil.X", "evil.X"]}, "tokenizer_class": "X"}'
    )
    with contextlib.suppress(UserError):
        load_tokenizer(str(tmp_path))
    assert not marker.exists()


def test_a_tokenizer_in_a_bucket(monkeypatch, texts):
    """Beside a run's checkpoints, or named in the config."""
    with GcsServer() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        for name in ("vocab.json", "merges.txt"):
            server.put("models", f"run/{name}", (texts / "gpt2_tokenizer" / name).read_bytes())
        found = [load_tokenizer(None, "gs://models/run"), load_tokenizer("gs://models/run")]
    for tokenizer in found:
        assert tokenizer.encode("hello\n\nhello") == [31373, 198, 198, 31373]
        assert tokenizer.decode([31373]) == "hello"
