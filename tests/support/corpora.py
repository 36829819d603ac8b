"""Documents of inputs as `mesh_transformer.dataset` reads them, and files in its formats."""

import csv
import io
import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mesh_transformer.dataset.inputs import read_inputs
from mesh_transformer.dataset.parts import Bad, FilePart, pieces, plan

# a part of this many bytes holds any file of a test
WHOLE = 1 << 30


def parts_of(*specs: str | Path, part_bytes: int = WHOLE, column: str = "text") -> list[FilePart]:
    """The parts of inputs."""
    return plan(read_inputs([str(spec) for spec in specs]), part_bytes, column)


def documents(parts: Iterable[FilePart], column: str = "text") -> list[str | None | Bad]:
    """The documents of parts, in order: texts, None for null, and the bad places. A document that is open at a bad
    place is dropped, and a part ends no document of another."""
    found: list[str | None | Bad] = []
    for part in parts:
        texts: list[str] = []
        for item in pieces(part, column):
            if isinstance(item, Bad):
                texts.clear()
                found.append(item)
                continue
            texts.append(item.text)
            if item.ends:
                found.append(None if item.null else "".join(texts))
                texts.clear()
        assert not texts
    return found


def read(*specs: str | Path, part_bytes: int = WHOLE, column: str = "text") -> list[str | None | Bad]:
    """The documents of inputs."""
    return documents(parts_of(*specs, part_bytes=part_bytes, column=column), column)


def as_lines(texts: Sequence[str | None], column: str = "text", end: str = "\n") -> bytes:
    """A file of JSON lines, with characters as they are."""
    return "".join(json.dumps({"n": 1, column: text}, ensure_ascii=False) + end for text in texts).encode()


def as_csv(texts: Sequence[str], column: str = "text") -> bytes:
    """A file of comma-separated values with a column of numbers before the text."""
    file = io.StringIO(newline="")
    csv.writer(file).writerows([("n", column), *((n, text) for n, text in enumerate(texts))])
    return file.getvalue().encode()


def as_parquet(texts: Sequence[str | None], rows: int = 1 << 20, column: str = "text") -> bytes:
    """A Parquet file with row groups of `rows` rows, and a column of numbers before the text."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"n": list(range(len(texts))), column: pyarrow.array(texts, pyarrow.string())})
    file = io.BytesIO()
    pyarrow.parquet.write_table(table, file, row_group_size=rows)
    return file.getvalue()


def as_tar(members: Mapping[str, bytes | tarfile.TarInfo]) -> bytes:
    """An archive of files by name; a header is written as it is, under its name."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content in members.items():
            info = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.name = name
            data = b"" if isinstance(content, tarfile.TarInfo) else content
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()
