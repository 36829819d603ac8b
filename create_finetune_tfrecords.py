"""Turn text into record files for training and fine-tuning."""

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import fields

from mesh_transformer import logs
from mesh_transformer.data.corpus import input_files
from mesh_transformer.data.prepare import Options, prepare
from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.runtime import cli


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("input", help="file or folder: .txt, .jsonl, .tar, also compressed (.gz, .xz, .zst)")
    add("name", help="the output is NAME_SEQUENCES.tfrecords")
    add("--output-dir", default=".", help="folder of the output, local or gs:// (default: the current one)")
    add("--seq", type=int, help="tokens of a sequence; a record holds one more (default: %(default)s)")
    add("--tokenizer", default="gpt2", help="hub name, folder or `bytes` (default: %(default)s)")
    add("--normalize-with-ftfy", action="store_true", help="repair broken Unicode")
    add("--normalize-with-wikitext-detokenize", action="store_true", help="undo the spacing of WikiText")
    add(
        "--treat-eot-as-text",
        action="store_true",
        help="<|endoftext|> in the input is text, not a document's end",
    )
    add("--min-unique-tokens", type=int, metavar="N", help="drop sequences with fewer distinct tokens")
    add(
        "--n-repack-epochs",
        type=int,
        metavar="N",
        help="passes over the documents, each shuffled and cut anew",
    )
    add("--seed", type=int, help="seed of the shuffling (default: %(default)s)")
    add("--preserve-data-order", action="store_true", help="do not shuffle documents and sequences")
    add("--verbose", action="store_true", help="more messages on standard error")
    parser.set_defaults(**{field.name: field.default for field in fields(Options)})
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments and write the records."""
    args = vars(parse(arguments))
    logs.set_up(logging.DEBUG if args.pop("verbose") else logging.INFO)
    source, name, folder, spec = (args.pop(key) for key in ("input", "name", "output_dir", "tokenizer"))
    files = input_files(source)  # a missing input is told before a tokenizer is fetched
    written = prepare(files, name, folder, load_tokenizer(spec), Options(**args))
    null = f"; lines skipped because their text is null: {written.null_lines}" if written.null_lines else ""
    sys.stdout.write(f"{written.path}: {written.sequences} sequences, {written.tokens} tokens{null}\n")


if __name__ == "__main__":
    cli.run(main)
