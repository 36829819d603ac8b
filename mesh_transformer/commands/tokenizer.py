"""Train a byte-level BPE tokenizer on text, as GPT-2's, and write it as a Hugging Face folder."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from mesh_transformer.runtime import cli


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    cli.add_corpus(parser)
    add("--output", required=True, metavar="FOLDER", help="the new folder, local or gs://; --tokenizer takes it")
    add(
        "--vocab",
        type=int,
        default=50257,
        metavar="N",
        help="number of tokens, with the 256 bytes and the special tokens (default: %(default)s)",
    )
    add(
        "--special",
        action="append",
        default=[],
        metavar="NAME",
        help="a further special token, such as <|user|>; <|endoftext|>, which ends a document, is always there; may be "
        "repeated",
    )
    add(
        "--chat-template",
        metavar="NAME",
        help="make it a tokenizer of chats, with this template: chatml, or a file in Jinja; the names of the form "
        "<|name|> in it become special tokens (default: no template)",
    )
    add("--verbose", action="store_true", help="log more messages to standard error")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments and train."""
    args = parse(arguments)
    from mesh_transformer import logs
    from mesh_transformer.data.chat import new_template
    from mesh_transformer.dataset.tokenizer_training import Training, train
    from mesh_transformer.errors import plural

    logs.set_up(logging.DEBUG if args.verbose else logging.INFO)
    template = None if args.chat_template is None else new_template.find(args.chat_template)
    training = Training(args.vocab, tuple(args.special), args.column, args.on_error, template)
    trained = train(args.input, args.output, training)
    skipped = f"; skipped: {plural(trained.bad, 'bad place')}" if trained.bad else ""
    chat = f"; chats: an answer ends with {template.end}" if template else ""
    documents = plural(trained.documents, "document")
    sys.stdout.write(f"{trained.folder}: {plural(trained.vocab, 'token')}, from {documents}{skipped}{chat}\n")
