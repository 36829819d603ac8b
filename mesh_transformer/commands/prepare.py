"""Tokenize any corpus into record files for training, on one or many machines.

Give the same command again after an interruption: it goes on with the parts that are finished.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

from mesh_transformer.runtime import cli


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    from mesh_transformer.dataset.options import PrepareOptions

    parser = cli.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    cli.add_corpus(parser)
    add(
        "--tokenizer",
        default="gpt2",
        help="name on the Hugging Face hub, folder, GGUF file, or `bytes` (default: %(default)s)",
    )
    add("--output", required=True, metavar="DIR", help="folder for the data set, local or gs://")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--ray-address", metavar="HOST:PORT", help="run the tasks on this Ray cluster")
    where.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="run N tasks at once in processes of this machine (default: the number of CPU cores)",
    )
    add("--seq", type=int, help="tokens per sequence; a record holds one token more (default: %(default)s)")
    add("--val", type=float, metavar="SHARE", help="share of the documents for validation (default: %(default)s)")
    add("--dedup", action="store_true", help="drop documents with exactly the text of an earlier one")
    add(
        "--part-mb",
        type=float,
        metavar="MB",
        help="megabytes of a part, the work of one task, of a file that can be entered in the middle (default: "
        "%(default)s)",
    )
    add(
        "--pack",
        choices=("concat", "documents"),
        help="concat: records are one stream of tokens, cut at each record; documents: records have whole documents "
        "(default: %(default)s)",
    )
    add(
        "--instructions",
        action="store_true",
        help="each line of .jsonl and each row of .csv and .parquet is an example: messages; prompt and completion; or "
        "instruction, input and output. Only answers are learned; records have whole examples",
    )
    add(
        "--long",
        choices=("cut", "drop"),
        help="what to do with an example that does not fit a record: cut its end, or drop it (default: %(default)s)",
    )
    add("--shard-tokens", type=int, metavar="N", help="most tokens of a record file (default: %(default)s)")
    parser.set_defaults(**{name: getattr(PrepareOptions, name) for name in PrepareOptions.__dataclass_fields__})
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments and make the data set."""
    given = parse(arguments)
    from mesh_transformer import logs
    from mesh_transformer.dataset.job import prepare
    from mesh_transformer.dataset.manifest import Summary
    from mesh_transformer.dataset.options import PrepareOptions
    from mesh_transformer.dataset.tasks import runner
    from mesh_transformer.errors import UserError, plural

    logs.set_up()
    options = cli.fields(PrepareOptions, given)
    workers = given.workers if given.workers is not None else os.cpu_count() or 1
    if workers < 1:
        raise UserError(f"--workers {workers}: must be 1 or more")
    with contextlib.ExitStack() as stack:
        tasks = stack.enter_context(runner(given.ray_address, workers))
        content = prepare(given.input, given.tokenizer, given.output, options, tasks)
    made = Summary.of(content, given.output)
    packed = f"{made.train.waste:.2%} padding, " if options.packed else ""
    if options.instructions:
        packed = f"{made.train.learned:,} learned, {plural(made.cut, 'example')} cut, {packed}"
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in made.dropped.items())
    sys.stdout.write(
        f"{given.output}: {plural(made.train.records, 'training record')} ({plural(made.train.tokens, 'token')}), "
        f"{packed}{plural(made.val.records, 'validation record')}; dropped: {dropped or 'nothing'}; "
        f"data.train_set={given.output.rstrip('/')}/train.index\n"
    )
