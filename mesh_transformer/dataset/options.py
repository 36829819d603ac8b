"""The options of a job, and its key: two jobs with one key have the same bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from mesh_transformer.errors import UserError

if TYPE_CHECKING:
    # the parser of arguments uses this module
    from mesh_transformer.dataset.inputs import Input

# change it when the same input and options give other bytes
_FORMAT = 1
_MEGABYTE = 1_000_000
# options of later versions. The key has them where they are not the default, so that earlier data sets keep their keys
_LATER = ("pack", "instructions", "long")


@dataclass(frozen=True)
class PrepareOptions:
    """How a corpus becomes records.

    Args:
        seq: tokens of a sequence; a record holds one more.
        column: the name of the text in rows and JSON objects.
        val: the share of the documents that go to the validation set.
        dedup: drop documents with the text of an earlier one.
        on_error: whether a place that is not a document is counted or ends the job. The bytes do not depend on it.
        part_mb: megabytes of a part of a file that can be entered in the middle.
        shard_tokens: most tokens of a shard.
        pack: records are a stream of tokens, cut at each record; or rows of whole documents.
        instructions: rows and JSON objects are examples of instruction data. Records are rows of whole examples.
        long: whether an example that does not fit a record is cut at the end, or dropped.
    """

    seq: int = 2048
    column: str = "text"
    val: float = 0.001
    dedup: bool = False
    on_error: Literal["skip", "stop"] = "stop"
    part_mb: float = 64.0
    shard_tokens: int = 1 << 27
    pack: Literal["concat", "documents"] = "concat"
    instructions: bool = False
    long: Literal["cut", "drop"] = "cut"

    def __post_init__(self) -> None:
        if self.seq < 1:
            raise UserError(f"--seq {self.seq}: must be 1 or more")
        if not 0 <= self.val < 1:
            raise UserError(f"--val {self.val}: the share of the validation set must be 0 or more, and below 1")
        if self.part_bytes < 1:
            raise UserError(f"--part-mb {self.part_mb}: must be above 0")
        if self.shard_tokens <= self.seq:
            raise UserError(f"--shard-tokens {self.shard_tokens}: must be above --seq {self.seq}")
        if self.instructions and self.column != PrepareOptions.column:
            raise UserError(f"--column {self.column}: the fields of --instructions have fixed names: leave it out")
        if self.long != PrepareOptions.long and not self.instructions:
            raise UserError(f"--long {self.long}: only examples of --instructions are cut or dropped: leave it out")

    @property
    def packed(self) -> bool:
        """Whether records are rows of whole documents."""
        return self.pack == "documents" or self.instructions

    @property
    def part_bytes(self) -> int:
        return int(self.part_mb * _MEGABYTE)


@dataclass(frozen=True)
class Work:
    """The inputs and options that determine the bytes of a job.

    Args:
        content: their entries in manifest.json, with the key.
    """

    content: dict[str, Any]

    @classmethod
    def of(
        cls,
        inputs: Sequence[Input],
        tokenizer: str,
        fingerprint: str,
        options: PrepareOptions,
        template: str | None = None,
    ) -> Work:
        """The work of a command.

        Args:
            fingerprint: of the tokenizer.
            template: the fingerprint of its chat templates. None: they are not used.
        """
        chosen = asdict(options)
        # the result of a job that has ended does not depend on it
        del chosen["on_error"]
        for name in _LATER:
            if chosen[name] == getattr(PrepareOptions, name):
                del chosen[name]
        files = [[asdict(file) for file in source.files] for source in inputs]
        content = {
            "format": _FORMAT,
            "options": {
                "input": [source.spec if source.share == 1 else f"{source.spec}={source.share:g}" for source in inputs],
                "tokenizer": tokenizer,
                **chosen,
            },
            "tokenizer_sha256": fingerprint,
            "files_sha256": _sha256(files),
        }
        if template is not None:
            content["template_sha256"] = template
        return cls({"key": _sha256([content, [source.share for source in inputs]]), **content})

    def check(self, other: dict[str, Any], folder: str) -> None:
        """Compare with the job that a folder has.

        Raises:
            UserError: it is another job; names what differs.
        """
        if other.get("key") == self.content["key"]:
            return
        later = {name: getattr(PrepareOptions, name) for name in _LATER}
        given = other.get("options")
        mine = {**later, **self.content["options"]}
        theirs = {**later, **given} if isinstance(given, dict) else {}
        differ = [
            f"--{name.replace('_', '-')} was {_shown(theirs.get(name))} and is {_shown(mine[name])}"
            for name in mine
            if theirs.get(name) != mine[name]
        ]
        if other.get("tokenizer_sha256") != self.content["tokenizer_sha256"]:
            differ.append("the files of the tokenizer differ")
        if other.get("template_sha256") != self.content.get("template_sha256"):
            differ.append("the chat templates of the tokenizer differ")
        if other.get("files_sha256") != self.content["files_sha256"]:
            differ.append("the names or sizes of the input files differ")
        raise UserError(
            f"{folder} was begun with other options ({'; '.join(differ) or 'by another version'}): choose another "
            "--output, give the options of the first command, or delete the folder"
        )


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
