"""Input files of data sets in every format: the plan of their parts, and the documents of each part."""

import gzip
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import zstandard
from support.corpora import as_csv, as_lines, as_parquet, as_tar, parts_of
from support.mutations import mutated_bytes

from fuzz.harness import Attempt
from mesh_transformer.dataset.parts import Bad, pieces

TEXTS = [f"text {n} \u00e9 " * (n % 7) for n in range(60)]


def contents() -> dict[str, bytes]:
    """Valid files by name."""
    lines, rows, table = as_lines(TEXTS), as_csv(TEXTS), as_parquet([*TEXTS, None], rows=20)
    archive = as_tar({"a.jsonl": lines[:800], "b.txt": TEXTS[6].encode(), "c.csv.gz": gzip.compress(rows[:800])})
    plain = {"a.jsonl": lines, "b.csv": rows, "c.parquet": table, "d.txt": TEXTS[6].encode(), "e.tar": archive}
    return plain | {
        "f.jsonl.zst": zstandard.compress(lines),
        "g.csv.xz": lzma.compress(rows),
        "h.tar.gz": gzip.compress(archive),
        "i.tgz": gzip.compress(archive),
    }


@contextmanager
def fuzzer(folder: Path) -> Iterator[Attempt]:
    """Plans the parts of a mutated file and reads them."""
    seeds = contents()

    def attempt(random: Random) -> str:
        name = random.choice([*seeds, "c.parquet"])
        path = folder / name
        path.write_bytes(mutated_bytes(random, seeds[name]))
        bad = False
        for part in parts_of(path, part_bytes=random.choice([100, 1 << 20])):
            for piece in pieces(part, "text"):
                bad = bad or isinstance(piece, Bad)
        return "bad" if bad else "read"

    yield attempt
