"""Exercises of chapter 2: fill in the functions, then run `python scripts/guide.py check 2`."""


def encode_word(word, merges):
    """The tokens of a word, as a list of strings that together are the word.

    `merges` is a list of pairs of strings in the order in which they were learned. Begin with the characters. Of all
    pairs of neighbours in the word, merge the one that was learned first, everywhere from left to right; repeat until
    no pair is in the list. Why is it wrong to take the longest token that fits, from left to right?
    """
    raise NotImplementedError


def read_records(content):
    """The data of each record in the bytes of a record file, as a list of bytes.

    Raise ValueError if a checksum does not match or if the file ends inside a record. An empty file has no records.
    The function of the checksums is `mesh_transformer.data.records.tfrecords.masked_crc32c`.
    """
    raise NotImplementedError


def document_positions(documents_T):
    """The position of each token in its document, from 0: an integer array (T,).

    `documents_T` has the number of the document of each token, in ascending order, and 0 for the padding at the end.
    Padding has the positions 0, 1 ... too. Rotary encoding depends on distances only. So does it matter, with the mask
    of the chapter, if positions do not begin again?
    """
    raise NotImplementedError


def batch_at(step, batch, records, seed):
    """The numbers of the records of a step: a list of `batch` integers from 0 to `records` - 1. `step` counts from 0.

    Each epoch has each record once, in an order of its own. The order of epoch E, counted from 0, is
    `mesh_transformer.data.batches.permutation.Permutation(records, f"{seed}/{E}")`. A batch may span two epochs.
    Compute only the entries that the step needs.
    """
    raise NotImplementedError
