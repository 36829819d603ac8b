"""Checks of the exercises of chapter 2, against the tokenizers library, the record writer and a replay."""

import io
import itertools

import numpy as np

from mesh_transformer.data.batches.permutation import Permutation
from mesh_transformer.data.records.tfrecords import write_record
from mesh_transformer.sequences import Example, document_numbers

# the second list has a long token that is learned from parts which "abc" never has: its "bc" is merged first
MERGES = (
    ([("t", "h"), ("th", "e"), ("a", "a"), ("aa", "aa"), ("o", "th")], ["the", "other", "aaaaaaa", "mother", "x", ""]),
    ([("b", "c"), ("a", "b"), ("ab", "c"), ("bc", "d")], ["abc", "abcd", "ab", "aabbcc"]),
)


def _tokenizers(merges, words):
    from tokenizers import Tokenizer, models

    tokens = {*"".join(words), *itertools.chain(*merges), *("".join(pair) for pair in merges)}
    vocabulary = {token: number for number, token in enumerate(sorted(tokens))}
    return Tokenizer(models.BPE(vocabulary, list(merges)))


def check_encode_word(answer):
    """Against the tokenizers library."""
    for merges, words in MERGES:
        reference = _tokenizers(merges, words)
        for word in words:
            right = reference.encode(word).tokens
            ours = list(answer(word, list(merges)))
            assert "".join(ours) == word, f"the tokens of {word!r} are {ours}: together they must be the word"
            guess = "Of the pairs in the word, merge the one that was learned first, from left to right."
            if len(ours) > len(right):
                guess = "A merge is missing: go on until no pair is in the list."
            assert ours == right, f"{word!r} with the merges {merges} gives {right}, and not {ours}. {guess}"


def _records():
    file = io.BytesIO()
    ends = []
    for count in (3, 0, 200):
        write_record(file, np.arange(count))
        ends.append(file.tell())
    content = file.getvalue()
    begins = [0, *ends[:-1]]
    return content, [content[begin + 12 : end - 4] for begin, end in zip(begins, ends, strict=True)], ends


def check_read_records(answer):
    """Against the writer, after a change of each bit of one byte in each part, and cut at each byte."""
    content, right, ends = _records()
    ours = list(answer(content))
    assert len(ours) == len(right), f"there are {len(right)} records, and you return {len(ours)}"
    assert ours == right, "the data of a record lies between the checksum of its length and its own checksum"
    assert list(answer(b"")) == [], "a file without a byte has no records"
    parts = {"the length": 0, "the checksum of the length": 9, "the data": ends[1] + 14, "its checksum": ends[2] - 2}
    for part, at in parts.items():
        damaged = bytearray(content)
        damaged[at] ^= 1
        _refused(answer, bytes(damaged), f"one bit of {part} is wrong")
    for size in range(1, len(content)):
        if size not in ends:
            _refused(answer, content[:size], f"the file of {len(content)} bytes ends after {size}")


def _refused(answer, content, case):
    try:
        answer(content)
    except ValueError:
        return
    except Exception as error:
        raise AssertionError(f"{case}: raise ValueError, and not {type(error).__name__}: {error}") from error
    raise AssertionError(f"{case}, and no ValueError is raised")


def check_document_positions(answer):
    """Against counting, for packed records with and without padding."""
    for lengths, length in (([3, 1, 4], 8), ([2, 5], 12), ([6], 6)):
        documents = document_numbers(Example(np.zeros(length, np.int32), np.array(lengths)))
        right = np.concatenate([np.arange(count) for count in [*lengths, length - sum(lengths)]])
        ours = np.asarray(answer(documents))
        assert ours.shape == right.shape, f"the result has the shape {ours.shape}, not {right.shape}"
        wrong = int((ours != right).sum())
        guess = "It counts through all documents." if (ours == np.arange(length)).all() else ""
        if wrong and (ours == right + 1).all():
            guess = "It counts from 1."
        assert not wrong, f"{wrong} of {length} positions are wrong for the documents {documents.tolist()}. {guess}"


def check_batch_at(answer):
    """Against a replay of the whole stream, with a batch that does not divide the records."""
    records, batch, seed = 50, 8, 3
    epochs = ([Permutation(records, f"{seed}/{epoch}")[place] for place in range(records)] for epoch in range(4))
    stream = list(itertools.chain(*epochs))
    for step in (0, 1, 6, 13, 24):
        right = stream[step * batch : (step + 1) * batch]
        ours = [int(record) for record in answer(step, batch, records, seed)]
        guess = "Compare with the places step * batch and so on of the endless stream."
        if ours[: len(right)] != right and (step + 1) * batch > records:
            guess = "Up to the end of the first epoch it may be right: which epoch and which place follow?"
        assert ours == right, f"step {step} has the records {right}, and not {ours}. {guess}"
