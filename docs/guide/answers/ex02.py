"""Our answers to the exercises of chapter 2."""

import struct

import numpy as np

from mesh_transformer.data.batches.permutation import Permutation
from mesh_transformer.data.records.tfrecords import masked_crc32c


def encode_word(word, merges):
    """The longest token may need a merge that an earlier one prevents, so it is not what the training counted."""
    rank = {pair: number for number, pair in enumerate(merges)}
    tokens = list(word)
    while found := [pair for pair in zip(tokens[:-1], tokens[1:], strict=True) if pair in rank]:
        first, second = min(found, key=rank.__getitem__)
        after, at = [], 0
        while at < len(tokens):
            both = tokens[at : at + 2] == [first, second]
            after.append(first + second if both else tokens[at])
            at += 2 if both else 1
        tokens = after
    return tokens


def read_records(content):
    """Each read is checked for its length, and each part for its checksum."""
    found, at = [], 0

    def take(count):
        nonlocal at
        if at + count > len(content):
            raise ValueError(f"the file ends inside record {len(found)}")
        at += count
        return content[at - count : at]

    def checked(data):
        if struct.unpack("<I", take(4)) != (masked_crc32c(data),):
            raise ValueError(f"record {len(found)} is damaged")
        return data

    while at < len(content):
        (length,) = struct.unpack("<Q", checked(take(8)))
        found.append(checked(take(length)))
    return found


def document_positions(documents_T):
    """A token's place, minus the place where its document begins.

    Rotary encoding and the mask would give the same without. Learned positions and a longest position would not.
    """
    documents_T = np.asarray(documents_T)
    places = np.arange(len(documents_T))
    begins = np.flatnonzero(np.diff(documents_T, prepend=-1))
    return places - begins[np.searchsorted(begins, places, side="right") - 1]


def batch_at(step, batch, records, seed):
    """A place in the endless stream is an epoch and a place in it."""
    places = (divmod(step * batch + row, records) for row in range(batch))
    return [Permutation(records, f"{seed}/{epoch}")[place] for epoch, place in places]
