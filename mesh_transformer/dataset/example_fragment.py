"""The first task for instruction data: the examples of a part become a fragment (fragment.py), each a document."""

import contextlib
import hashlib
import io
import platform

import numpy as np

from mesh_transformer.data.chat.instructions import (
    InstructionEncoder,
    LearnedTokens,
    canonical,
    learns,
    shortened,
    template_fingerprint,
)
from mesh_transformer.data.corpus.formats.base import Row
from mesh_transformer.dataset.fragment import LEARNED, Collected, Examples, Fragment, Text, tokenizer_of
from mesh_transformer.dataset.parts import Bad, FilePart, examples
from mesh_transformer.errors import BadDataError, UserError

TOO_LONG, NO_ANSWER = "too long", "no answer"


def write_example_fragment(
    target: str, scratch: str, part: FilePart, share: float, text: Text, chosen: Examples
) -> Fragment:
    """Encode the examples of a part into the object `target`.

    Args:
        share: of the examples of this input that are taken.

    Raises:
        UserError: a place is not an example, and `text.on_error` is "stop"; the input is missing or damaged; or the
            chat template differs from the driver's.
    """
    tokenizer = tokenizer_of(text)
    if template_fingerprint(tokenizer) != chosen.template:
        raise UserError(
            f"the tokenizer {text.tokenizer} has another chat template here, on {platform.node()}, than where "
            "prepare_dataset.py began: give a folder that all nodes share, and do not change it meanwhile"
        )
    with contextlib.ExitStack() as stack:
        collected = Collected(stack, scratch, share, text)
        encoder = stack.enter_context(InstructionEncoder(tokenizer))
        for item in examples(part):
            if isinstance(item, Bad):
                collected.refuse(item)
            else:
                _add(item, encoder, collected, chosen)
        return collected.write(target)


def _add(row: Row, encoder: InstructionEncoder, collected: Collected, chosen: Examples) -> None:
    """Add an example, or count why it is left out."""
    digest = hashlib.blake2b(canonical(row.example), digest_size=16).digest()
    if not collected.takes(digest):
        return
    try:
        tokens = encoder.encode(row.example)
    except UserError as error:
        collected.refuse(Bad.of(BadDataError(row.place, "bad example", str(error))))
        return
    too_long = len(tokens.ids) > chosen.most
    if too_long and chosen.long == "drop":
        collected.drop(TOO_LONG)
        return
    tokens = shortened(tokens, chosen.most)
    if not learns(tokens):
        collected.drop(NO_ANSWER)
        return
    collected.cut += too_long
    # without the size of the text, which is for bits per byte of whole documents
    collected.add(digest, io.BytesIO(_stored(tokens)), len(tokens.ids), 0)


def _stored(tokens: LearnedTokens) -> bytes:
    """The tokens as a fragment has them."""
    return (tokens.ids.astype("<u4") | np.where(tokens.learned, LEARNED, 0).astype("<u4")).tobytes()
