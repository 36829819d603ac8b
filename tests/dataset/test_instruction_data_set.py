"""A data set of instruction data: its records have each example whole, with the mask of its answers."""

import csv
import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from support.chat_templates import chat_folder
from support.corpora import as_tar
from support.data_sets import hashes

from mesh_transformer.data.chat.instructions import InstructionEncoder, example_of, learns
from mesh_transformer.data.records.tfrecords import RecordReader
from mesh_transformer.data.tokens.tokenizer import load_tokenizer
from mesh_transformer.dataset import example_fragment
from mesh_transformer.dataset.job import prepare
from mesh_transformer.dataset.options import PrepareOptions
from mesh_transformer.dataset.tasks import InProcess
from mesh_transformer.errors import UserError
from mesh_transformer.sequences import Sequences, document_numbers, learned_tokens

SEQ = 128


def text(draw: random.Random, most: int) -> str:
    return "".join(draw.choices("abc é日\U0001f600\n", k=draw.randint(0, most)))


def chat(draw: random.Random, turns: int) -> list[dict[str, str]]:
    roles = ["user", "assistant"] * turns
    return [{"role": role, "content": text(draw, 20)} for role in roles]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tokens of bytes, with the template ChatML."""
    return str(chat_folder(tmp_path_factory.mktemp("tokenizer") / "chat"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A folder with all kinds of files, and the examples in input order."""
    draw = random.Random(0)
    folder = tmp_path_factory.mktemp("corpus")
    lines: list[dict[str, Any]] = [{"id": n, "messages": chat(draw, draw.randint(1, 3))} for n in range(40)]
    lines += [{"instruction": text(draw, 30), "input": None, "output": text(draw, 9), "n": n} for n in range(20)]
    lines[7] = {"messages": chat(draw, 1)[:1]}
    lines[9] = {"messages": [*chat(draw, 9), {"role": "assistant", "content": "x" * 200}]}
    (folder / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pairs = [{"prompt": text(draw, 30), "completion": text(draw, 30), "n": str(n)} for n in range(30)]
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, ["n", "prompt", "completion"])
    writer.writeheader()
    writer.writerows(pairs[:10])
    (folder / "b.csv").write_text(table.getvalue(), newline="")
    rows = [{"messages": chat(draw, 2), "tools": [], "n": n} for n in range(12)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "c.parquet", row_group_size=5)
    packed = "".join(json.dumps(pair) + "\n" for pair in pairs[10:20]).encode()
    (folder / "d.jsonl.zst").write_bytes(zstandard.compress(packed))
    inside = "".join(json.dumps(pair) + "\n" for pair in pairs[20:]).encode()
    (folder / "e.tar").write_bytes(as_tar({"x/f.jsonl": inside}))
    return folder, [*lines, *pairs[:10], *rows, *pairs[10:]]


def made(folder: Path | str, output: Path, tokenizer: str = "bytes", **options: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {"seq": SEQ, "part_mb": 0.006, "shard_tokens": 2000, "instructions": True}
    return prepare([str(folder)], tokenizer, str(output), PrepareOptions(**{**sizes, **options}), InProcess())


def documents_of(folder: Path, side: str) -> list[tuple[bytes, bytes]]:
    """The tokens and the mask of each document, sorted. The loader's arrays say the same of a record."""
    found = []
    for name in (folder / f"{side}.index").read_text().split():
        with RecordReader(str(folder / name)) as reader:
            while record := reader.read():
                example = record.example()
                assert len(example.tokens) == SEQ + 1
                numbers, learned = document_numbers(example), learned_tokens(example)
                batch = Sequences.of([example], documents=True, learned=True)
                assert np.array_equal(batch.documents[0], numbers)
                assert np.array_equal(batch.learned[0], learned)
                assert not learned[numbers == 0].any()
                for number in range(1, numbers.max() + 1):
                    mine = numbers == number
                    found.append((example.tokens[mine].tobytes(), learned[mine].tobytes()))
    return sorted(found)


@pytest.mark.parametrize("long", ["cut", "drop"])
def test_records_have_each_example_with_its_mask(corpus: Any, tokenizer: str, tmp_path: Path, long: str) -> None:
    """Each example is one document of one record, with the tokens and the mask of the encoder alone."""
    folder, examples = corpus
    content = made(folder, tmp_path / "set", tokenizer, val=0.2, long=long)
    with InstructionEncoder(load_tokenizer(tokenizer)) as encoder:
        encoded = [encoder.encode(example_of(example)) for example in examples]
    too_long = [one for one in encoded if len(one.ids) > SEQ + 1]
    assert too_long
    kept = [one for one in encoded if learns(one) and (long == "cut" or len(one.ids) <= SEQ + 1)]
    wanted = sorted((one.ids[: SEQ + 1].tobytes(), one.learned[: SEQ + 1].tobytes()) for one in kept)
    train, val = documents_of(tmp_path / "set", "train"), documents_of(tmp_path / "set", "val")
    assert sorted(train + val) == wanted
    assert len(val) > 5
    assert content["cut"] == (len(too_long) if long == "cut" else 0)
    assert content["dropped"] == {"no answer": 1} | ({"too long": len(too_long)} if long == "drop" else {})
    assert content["train"]["learned"] == sum(sum(mask) for _, mask in train)
    assert content["train"]["documents"] == len(train)
    assert len(content["shards"]) > 3


def test_duplicates_and_shares(tmp_path: Path, tokenizer: str) -> None:
    """The fields of an example decide, in any order and beside any other field."""
    lines = [{"prompt": "a", "completion": str(n % 10), "n": n} for n in range(20)]
    lines += [{"completion": "0", "prompt": "a"}]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    swapped = [dict(reversed(message.items())) for message in messages]
    lines += [{"messages": messages}, {"messages": swapped}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    content = made(tmp_path / "a.jsonl", tmp_path / "set", tokenizer, val=0, dedup=True)
    assert content["dropped"] == {"duplicate": 12}
    assert len(documents_of(tmp_path / "set", "train")) == 11
    content = made(f"{tmp_path / 'a.jsonl'}=0.5", tmp_path / "half", tokenizer, val=0)
    assert 0 < content["dropped"]["not in the share"] < 23


BAD = [
    (b'{"prompt": "a"}', "not an example", "line at byte 35: an example must have messages"),
    (b"[1]", "not an example", "line at byte 35: an example must be an object with messages"),
    (b'{"prompt"', "not JSON", "line at byte 35: not JSON"),
    (b'{"messages": [{"role": "user", "content": "a"}]}', "bad example", "the tokenizer has no chat template"),
    (b'{"prompt": 1, "completion": "b"}', "bad example", "line at byte 35: the field prompt must be a text; got 1"),
]


@pytest.mark.parametrize(("line", "kind", "words"), BAD)
def test_a_bad_example_is_told_with_its_place(tmp_path: Path, line: bytes, kind: str, words: str) -> None:
    good = b'{"prompt": "a", "completion": "b"}'
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([good, line, good]))
    place = tmp_path / "a.jsonl"
    with pytest.raises(UserError, match=f"{place}, {words}" if words.startswith("line") else words):
        made(place, tmp_path / "set", val=0, part_mb=1)
    content = made(place, tmp_path / "skipped", val=0, part_mb=1, on_error="skip")
    assert content["dropped"] == {kind: 1}
    assert words in content["bad"][0]
    assert content["train"]["documents"] == 2


def test_no_example_is_left(tmp_path: Path) -> None:
    """The message says why no document is left. The folder then takes other options."""
    lines = [{"prompt": "a", "completion": "b" * SEQ}] * 2 + [{"messages": []}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match=r"no document is left; dropped: 1 bad example, 2 too long \(.*must be a list"):
        made(tmp_path / "a.jsonl", tmp_path / "set", val=0, long="drop", on_error="skip")
    assert made(tmp_path / "a.jsonl", tmp_path / "set", val=0, on_error="skip")["cut"] == 2


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"text", "plain text has no examples"),
        ("a.csv", b"prompt,answer\nb,c\n", "no columns of an example, it has 'prompt', 'answer': rename them to mess"),
        ("a.csv", b"prompt,prompt,completion\na,b,c\n", "several columns 'prompt'"),
    ],
)
def test_refused_before_any_work(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=words):
        made(tmp_path / name, tmp_path / "set")
    assert not (tmp_path / "set").exists()


def test_another_template_into_the_same_folder_is_refused(corpus: Any, tmp_path: Path) -> None:
    """The template is no part of the tokenizer's fingerprint."""
    folder = chat_folder(tmp_path / "chat")
    made(corpus[0] / "d.jsonl.zst", tmp_path / "set", str(folder), val=0)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(UserError, match="the chat templates of the tokenizer differ"):
        made(corpus[0] / "d.jsonl.zst", tmp_path / "set", str(folder), val=0)


def test_options_without_a_meaning() -> None:
    with pytest.raises(UserError, match="--column body: the fields of --instructions have fixed names"):
        PrepareOptions(instructions=True, column="body")
    with pytest.raises(UserError, match="--long drop: only examples of --instructions"):
        PrepareOptions(long="drop")


def test_the_bytes_do_not_depend_on_interruptions(
    corpus: Any, tokenizer: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """A job that ends within its fragments goes on."""
    made(corpus[0], tmp_path / "whole", tokenizer)
    calls, encode = [0], InstructionEncoder.encode

    def interrupted(self: Any, example: Any) -> Any:
        calls[0] += 1
        if calls[0] > 60:
            raise KeyboardInterrupt
        return encode(self, example)

    with monkeypatch.context() as patch:
        patch.setattr(example_fragment.InstructionEncoder, "encode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made(corpus[0], tmp_path / "set", tokenizer)
    assert list((tmp_path / "set" / "work").glob("fragment-*"))
    made(corpus[0], tmp_path / "set", tokenizer)
    assert hashes(tmp_path / "set") == hashes(tmp_path / "whole")
