"""train_tokenizer.py: transformers reads what it writes, and the loader takes it."""

import gzip
import hashlib
import json

import pytest
import zstandard
from support.corpora import as_csv, as_lines, as_parquet

import train_tokenizer
from mesh_transformer.data.tokens.tokenizer import load_tokenizer
from mesh_transformer.dataset.tokenizer_training import Training, train
from mesh_transformer.errors import RunError, UserError

LINES = [f"The {i}th bottle of beer stands on the wall, and the {i * i}th falls.\n\n" for i in range(400)]
ODD = "na\u00efve \u4f60\u597d \U0001f468\u200d\U0001f469 \0 <|endoftext|> <|user|>\r\n  x"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    (folder / "a.txt").write_text("".join(LINES[:200]) + "<|endoftext|>" + "".join(LINES[200:300]))
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in [*LINES[300:], ""])
    inputs = [f"--input={folder / name}" for name in ("a.txt", "b.jsonl.gz")]
    train_tokenizer.main([*inputs, f"--output={folder / 'made'}", "--vocab=500", "--special=<|user|>"])
    return folder


def test_transformers_reads_the_folder(trained, capsys):
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(trained / "made"), load_tokenizer(str(trained / "made"))
    assert (len(theirs), ours.n_vocab) == (500, 500)
    assert (theirs.eos_token_id, ours.eot) == (0, 0)
    assert theirs.convert_tokens_to_ids(["<|endoftext|>", "<|user|>"]) == [0, 1]
    for text in (LINES[7], ODD, ""):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert theirs.decode(ids) == text
    assert theirs.encode("a<|user|>b")[1] == 1
    assert ours.encode_literal(["<|user|>"])[0] != [1]
    # frequent words are tokens, and so are two line ends
    assert all(len(theirs.encode(text)) == 1 for text in (" bottle", " wall", "\n\n"))


def test_the_merges_are_those_of_the_most_frequent_pairs(tmp_path):
    """The oracle counts pairs in a text whose words are all letters."""
    words = ["abab"] * 9 + ["cab"] * 5 + ["cd"] * 3
    (tmp_path / "a.txt").write_text("\n".join(words))
    train([str(tmp_path / "a.txt")], str(tmp_path / "made"), Training(260))
    made = json.loads((tmp_path / "made" / "tokenizer.json").read_text())["model"]["merges"]
    # ab: 23 times; then abab 9; then c+ab 5
    assert [tuple(pair) for pair in made] == [("a", "b"), ("ab", "ab"), ("c", "ab")]


def test_the_result_depends_on_the_text_alone(trained, tmp_path):
    inputs = [str(trained / name) for name in ("a.txt", "b.jsonl.gz")]
    again = train(inputs, str(tmp_path / "again"), Training(500, ("<|user|>",)))
    # an empty text is no document
    assert (again.vocab, again.documents) == (500, 102)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (trained / "made" / name).read_bytes()


def merges_of(folder):
    return json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]


def of_texts(texts, folder):
    """The merges of a tokenizer that is trained on one file with all texts."""
    folder.mkdir()
    (folder / "all.txt").write_text("<|endoftext|>".join(texts))
    assert train([str(folder / "all.txt")], str(folder / "made"), Training(500)).documents == len(texts)
    return merges_of(folder / "made")


def test_every_kind_of_input_gives_the_tokenizer_of_its_texts(tmp_path, gcs, hub_server):
    """The kinds that prepare_dataset.py takes, with the name of a column."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x/a.csv.zst").write_bytes(zstandard.compress(as_csv(LINES[:100], "body")))
    (tmp_path / "x/b.parquet").write_bytes(as_parquet(LINES[100:200], 30, "body"))
    gcs.put("bucket", "in/c.jsonl", as_lines(LINES[200:300], "body"))
    hub_server.commit("datasets/org/name", {"data/train-0.parquet": as_parquet(LINES[300:], 50, "body")})
    inputs = [f"{tmp_path}/x/*.*", "gs://bucket/in", "hf://datasets/org/name:train"]
    arguments = [*(f"--input={name}" for name in inputs), "--column=body", "--vocab=500"]
    train_tokenizer.main([*arguments, f"--output={tmp_path}/made"])
    assert merges_of(tmp_path / "made") == of_texts(LINES, tmp_path / "reference")


def is_taken(text):
    """Whether a share of 0.3 has a document, by the documented rule."""
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return int.from_bytes(hashlib.blake2b(digest, key=b"share", digest_size=8).digest(), "big") < 0.3 * 2**64


def test_a_share_has_the_documents_that_a_data_set_of_it_has(tmp_path):
    """Two of the documents come in several pieces, and wait in a file."""
    long = [f"{'long words ' * 110_000}{number}" for number in range(20)]
    texts = [*LINES, next(text for text in long if is_taken(text)), next(text for text in long if not is_taken(text))]
    (tmp_path / "a.jsonl").write_bytes(as_lines(texts))
    found = train([f"{tmp_path}/a.jsonl=0.3"], str(tmp_path / "made"), Training(500))
    taken = [text for text in texts if is_taken(text)]
    assert 80 < found.documents == len(taken) < 160
    assert merges_of(tmp_path / "made") == of_texts(taken, tmp_path / "reference")


def test_bad_places_end_the_training_or_are_counted(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(b"not JSON\n".join(as_lines([text]) for text in LINES[:3]))
    command = [f"--input={tmp_path}/a.jsonl", "--vocab=300"]
    with pytest.raises(UserError, match=r"a.jsonl, line at byte \d+: not JSON"):
        train_tokenizer.main([*command, f"--output={tmp_path}/stopped"])
    assert not (tmp_path / "stopped/tokenizer.json").exists()
    train_tokenizer.main([*command, f"--output={tmp_path}/made", "--on-error=skip"])
    assert capsys.readouterr().out.endswith(", from 3 documents; skipped: 2 bad places\n")


def test_a_bucket_that_refuses_ends_the_training_with_one_line(tmp_path, gcs, monkeypatch):
    gcs.put("bucket", "a.jsonl", as_lines(LINES))
    monkeypatch.setattr(gcs, "next_fault", lambda method, path: 400 if "download" in path else None)
    with pytest.raises(RunError, match=r"400 GET .*: correct it, and give the same command again$"):
        train(["gs://bucket/a.jsonl"], str(tmp_path / "made"), Training(300))


def test_a_long_word_is_cut(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 50_000 + "\n" + "a b " * 100)
    train([str(tmp_path / "a.txt")], str(tmp_path / "made"), Training(300))
    assert load_tokenizer(str(tmp_path / "made")).n_vocab > 258


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vocab=256"], "--vocab 256: must be 257 (256 bytes and 1 special token) to 1048576"),
        (["--special= a"], "--special ' a': must be 1 to 100 characters without white space at its ends"),
        (["--special=b", "--special=b"], "--special 'b': is there twice"),
        (["--input=a.txt"], "the input a.txt is given 2 times"),
        (["--input=[af]*.txt"], "a.txt is in two inputs"),
        (["--input=table.csv", "--column=body"], "table.csv: the header has no column 'body', it has 'n', 'text'"),
        (["--input=none.txt"], "no such file or folder: none.txt"),
        (["--output=old"], "old already has a tokenizer: choose another --output"),
        (["--output=file.txt/x"], "file.txt"),
    ],
)
def test_a_mistake_ends_before_the_training(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "file.txt"):
        (tmp_path / name).write_text("text")
    (tmp_path / "table.csv").write_bytes(as_csv(["text"]))
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError) as error:
        train_tokenizer.main(["--input=a.txt", "--output=new", *arguments])
    assert message in str(error.value)
    assert not (tmp_path / "new" / "tokenizer.json").exists()


def test_an_empty_text(tmp_path):
    (tmp_path / "a.txt").write_text("<|endoftext|>")
    with pytest.raises(UserError, match="there is no text to train on"):
        train([str(tmp_path / "a.txt")], str(tmp_path / "made"), Training(300))
    assert not (tmp_path / "made" / "tokenizer.json").exists()


def test_a_tokenizer_of_chats(trained, tmp_path, capsys):
    """transformers writes the same chat, and an answer ends with the token after it in the template."""
    from transformers import AutoTokenizer

    folder = str(tmp_path / "chat")
    train_tokenizer.main(
        [f"--input={trained / 'a.txt'}", f"--output={folder}", "--vocab=400", "--chat-template=chatml"]
    )
    assert "chats: an answer ends with <|im_end|>" in capsys.readouterr().out
    chat = [{"role": "user", "content": "How many?\n"}, {"role": "assistant", "content": "99"}]
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    text = theirs.apply_chat_template(chat, tokenize=False)
    assert text == "<|im_start|>user\nHow many?\n<|im_end|>\n<|im_start|>assistant\n99<|im_end|>\n"
    assert theirs.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True).endswith("assistant\n")
    assert theirs.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert set(ours.end_tokens) == {0, 2}
    assert ours.encode("<|im_end|>") == [2]


def test_a_template_in_a_file(trained, tmp_path):
    path, folder = tmp_path / "mine.jinja", str(tmp_path / "made")
    path.write_text("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}<|system|>")
    train_tokenizer.main(
        [f"--input={trained / 'a.txt'}", f"--output={folder}", "--vocab=400", f"--chat-template={path}",
         "--special=<|user|>", "--special=<|assistant|>"]
    )  # fmt: skip
    made = load_tokenizer(folder)
    assert made.encode("<|user|><|assistant|><|system|>") == [1, 2, 3]
    assert set(made.end_tokens) == {0}


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            "chat_ml",
            "No such file or directory: give chatml, or a file with a template in Jinja (did you mean chatml?)",
        ),
        ("{% for", "--chat-template"),
        ("nothing", "it does not write what the assistant says"),
    ],
)
def test_bad_templates(trained, tmp_path, template, words):
    given = template
    if " " in template or template == "nothing":
        given = str(tmp_path / "bad.jinja")
        (tmp_path / "bad.jinja").write_text(template)
    with pytest.raises(UserError) as raised:
        train_tokenizer.main(
            [f"--input={trained / 'a.txt'}", f"--output={tmp_path / 'made'}", f"--chat-template={given}"]
        )
    assert words in str(raised.value)
    assert not (tmp_path / "made").exists()
