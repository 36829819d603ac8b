"""Tokenize text into record files for training and fine-tuning."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import fields

from mesh_transformer.runtime import cli


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    from mesh_transformer.data.corpus.options import SequenceOptions

    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    add(
        "input",
        help="a file, or a folder of files: .txt, .jsonl or .tar, plain or compressed (.gz, .xz, .zst)",
    )
    add("name", help="name of the output: NAME_SEQUENCES.tfrecords, with the number of sequences")
    add("--output-dir", default=".", help="output folder, local or gs:// (default: the current folder)")
    add("--seq", type=int, help="tokens per sequence; a record holds one token more (default: %(default)s)")
    add(
        "--tokenizer",
        default="gpt2",
        help="name on the Hugging Face hub, folder, or `bytes` (default: %(default)s)",
    )
    add("--normalize-with-ftfy", action="store_true", help="repair broken Unicode")
    add("--normalize-with-wikitext-detokenize", action="store_true", help="undo the spacing of WikiText")
    add(
        "--treat-eot-as-text",
        action="store_true",
        help="treat <|endoftext|> in the input as text, not as the end of a document",
    )
    add("--min-unique-tokens", type=int, metavar="N", help="drop sequences with fewer distinct tokens")
    add(
        "--n-repack-epochs",
        type=int,
        metavar="N",
        help="passes over the documents; each pass shuffles them and cuts new sequences",
    )
    add("--seed", type=int, help="seed of the shuffling (default: %(default)s)")
    add("--preserve-data-order", action="store_true", help="do not shuffle documents and sequences")
    add("--verbose", action="store_true", help="log more messages to standard error")
    parser.set_defaults(**{field.name: field.default for field in fields(SequenceOptions)})
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments and write the records."""
    args = vars(parse(arguments))
    from mesh_transformer import logs
    from mesh_transformer.data.corpus.options import SequenceOptions
    from mesh_transformer.data.corpus.pieces import input_files
    from mesh_transformer.data.corpus.sequences import prepare
    from mesh_transformer.data.tokens.tokenizer import load_tokenizer
    from mesh_transformer.errors import plural

    logs.set_up(logging.DEBUG if args.pop("verbose") else logging.INFO)
    source, name, folder, spec = (args.pop(key) for key in ("input", "name", "output_dir", "tokenizer"))
    # report a missing input before downloading a tokenizer
    files = input_files(source)
    logs.log.info("reading %s", source)
    written = prepare(files, name, folder, load_tokenizer(spec), SequenceOptions(**args))
    null = f"; lines skipped because their text is null: {written.null_lines}" if written.null_lines else ""
    sys.stdout.write(
        f"{written.path}: {plural(written.sequences, 'sequence')}, {plural(written.tokens, 'token')}{null}\n"
    )
