"""manifest.json: what a data set was made from, and what it holds."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Self

from pydantic import BaseModel, NonNegativeInt, ValidationError

from mesh_transformer.data.tokens.tokenizer import Tokenizer
from mesh_transformer.dataset.counts import DocumentCounts, add_reasons, total
from mesh_transformer.dataset.fragment import SIDES, Fragment
from mesh_transformer.dataset.inputs import Input
from mesh_transformer.dataset.shards import RECORDS, Shard
from mesh_transformer.errors import UserError

DUPLICATE = "duplicate"
# messages about bad places
_MESSAGES = 20


class SideSummary(BaseModel, strict=True):
    """The counts of a side that the command prints."""

    records: NonNegativeInt
    tokens: NonNegativeInt
    waste: float = 0.0
    learned: NonNegativeInt = 0


class Summary(BaseModel, strict=True):
    """What the command prints of manifest.json."""

    train: SideSummary
    val: SideSummary
    dropped: dict[str, NonNegativeInt]
    cut: NonNegativeInt = 0

    @classmethod
    def of(cls, content: dict[str, Any], path: str) -> Self:
        """The summary of the content of manifest.json at `path`.

        Raises:
            UserError: counts are missing, or are none.
        """
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            fault = error.errors()[0]
            what = f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
            raise UserError(f"{path} is damaged ({what}): delete the folder, and make it again") from error


def manifest(
    work: dict[str, Any],
    inputs: Sequence[Input],
    tokenizer: Tokenizer,
    fragments: Sequence[tuple[int, Fragment]],
    kept: Sequence[tuple[DocumentCounts, DocumentCounts]],
    shards: dict[str, Shard],
) -> dict[str, Any]:
    """The content of manifest.json. It depends on the input and the options only.

    Args:
        work: the inputs and options that determine the bytes (`Work.content`).
        fragments: each with the number of its input, in input order.
        kept: the counts of the kept documents of each fragment, for each side.
        shards: by name, without the suffix.
    """
    options = work["options"]
    content: dict[str, Any] = {
        **work,
        "n_vocab": tokenizer.n_vocab,
        "eot": tokenizer.eot,
        "sources": [_source(i, source, fragments, kept) for i, source in enumerate(inputs)],
    }
    for number, side in enumerate(SIDES):
        counts = total(sides[number] for sides in kept)
        mine = {name: shard for name, shard in shards.items() if name.startswith(side)}
        content[side] = {
            **_numbers(counts),
            **_records(counts, list(mine.values()), options),
            "lengths": {str(i): n for i, n in enumerate(counts.lengths) if n},
        }
    content["dropped"] = add_reasons(source["dropped"] for source in content["sources"])
    if "instructions" in options:
        content["cut"] = sum(fragment.cut for _, fragment in fragments)
    content["bad"] = [message for _, fragment in fragments for message in fragment.bad][:_MESSAGES]
    content["shards"] = {
        name + RECORDS: {"records": shard.records, "bytes": shard.bytes, "sha256": shard.sha256}
        for name, shard in shards.items()
    }
    return content


def encoded(content: dict[str, Any]) -> bytes:
    """The bytes of manifest.json."""
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def _source(
    number: int,
    source: Input,
    fragments: Sequence[tuple[int, Fragment]],
    kept: Sequence[tuple[DocumentCounts, DocumentCounts]],
) -> dict[str, Any]:
    """The counts of one input."""
    mine = [(fragment, rest) for (input, fragment), rest in zip(fragments, kept, strict=True) if input == number]
    rest = total(side for _, sides in mine for side in sides)
    repeated = sum(fragment.documents for fragment, _ in mine) - rest.documents
    dropped = add_reasons([fragment.dropped for fragment, _ in mine] + [{DUPLICATE: repeated}] * (repeated > 0))
    size = sum(file.size for file in source.files)
    return {
        "input": source.spec,
        "share": source.share,
        "files": len(source.files),
        "bytes_of_files": size,
        **_numbers(rest),
        "dropped": dropped,
    }


def _records(counts: DocumentCounts, shards: Sequence[Shard], options: dict[str, Any]) -> dict[str, Any]:
    """The counts of the records of a side."""
    length, examples = options["seq"] + 1, "instructions" in options
    records = sum(shard.records for shard in shards)
    rest = counts.tokens - records * length
    if not examples and "pack" not in options:
        return {"records": records, "tokens_in_no_record": rest}
    padding = sum(shard.padding for shard in shards)
    numbers = {"records": records, "padding": padding, "waste": round(padding / max(records * length, 1), 6)}
    if examples:
        return {**numbers, "learned": sum(shard.learned for shard in shards)}
    # at each of them, the two pieces of a document share a token
    return {**numbers, "cuts": -rest - padding}


def _numbers(counts: DocumentCounts) -> dict[str, int]:
    numbers = asdict(counts)
    del numbers["lengths"]
    return numbers
