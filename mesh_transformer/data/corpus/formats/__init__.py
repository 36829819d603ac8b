"""The formats of input files. A new format is a file in this folder and a line in the table."""

import posixpath

from mesh_transformer.data.corpus.formats import array, csv_rows, lines, parquet, tar, text
from mesh_transformer.data.corpus.formats.base import InputFormat
from mesh_transformer.data.records.inflate import SUFFIXES, without_suffix

FORMATS: dict[str, InputFormat] = {
    "lines": lines.FORMAT,
    # in archives, .json files often describe the others
    "array": array.FORMAT,
    "csv": csv_rows.FORMAT,
    "text": text.FORMAT,
    "tar": tar.archive(lines.FORMAT, csv_rows.FORMAT, text.FORMAT),
    "parquet": parquet.FORMAT,
}


def format_of(path: str) -> str | None:
    """The key in FORMATS for a file name; None if the name shows no format."""
    stem, compression = without_suffix(path)
    suffix = posixpath.splitext(stem)[1]
    for key, format in FORMATS.items():
        if suffix == format.suffix and (compression is None or format.stream is not None):
            return key
    return None


def allowed() -> str:
    """The suffixes of all formats, for a message."""
    streams = ", ".join(format.suffix for format in FORMATS.values() if format.stream is not None)
    others = ", ".join(format.suffix for format in FORMATS.values() if format.stream is None)
    return f"{streams} (each also with {', '.join(SUFFIXES)} appended), {others}"
