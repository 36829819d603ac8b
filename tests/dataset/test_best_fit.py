"""Rows of whole documents: nothing is lost or repeated but the token at a cut, and little room is wasted."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_transformer.dataset.packing import DocumentPiece, best_fit, example_of, pieces_of
from mesh_transformer.sequences import document_numbers, learned_tokens


def rows_of(lengths, length, cut=True):
    firsts, counts = pieces_of(np.array(lengths, np.int64), length)
    return list(best_fit(map(DocumentPiece, firsts.tolist(), counts.tolist()), length, cut))


def parts_by_document(rows, lengths):
    """The pieces of each document, in order, as (first token, tokens) within the document."""
    begins = np.cumsum(lengths) - lengths
    found = defaultdict(list)
    for piece in sorted(piece for row in rows for piece in row):
        number = int(np.searchsorted(begins, piece.first, "right")) - 1
        found[number].append((piece.first - int(begins[number]), piece.tokens))
    return found


def waste(rows, length):
    return 1 - sum(piece.tokens for row in rows for piece in row) / (len(rows) * length)


LENGTHS = st.lists(st.integers(1, 40), max_size=60)


@given(lengths=LENGTHS, length=st.integers(2, 17), cut=st.booleans())
def test_each_target_is_in_one_row(lengths, length, cut):
    """The targets of a document are its tokens but the first. A piece's first token is no target."""
    rows = rows_of(lengths, length, cut)
    assert all(row and sum(piece.tokens for piece in row) <= length for row in rows)
    found = parts_by_document(rows, lengths)
    for number, tokens in enumerate(lengths):
        targets = [target for first, count in found[number] for target in range(first + 1, first + count)]
        assert targets == list(range(1, tokens))


@given(lengths=LENGTHS, length=st.integers(2, 17))
def test_without_cuts_only_a_document_over_a_row_is_in_pieces(lengths, length):
    rows = rows_of(lengths, length, cut=False)
    for number, parts in parts_by_document(rows, lengths).items():
        # the shared token makes each piece but the first one longer
        full, rest = divmod(lengths[number] - 1, length - 1)
        assert [count for _, count in parts] == [length] * full + [rest + 1] * (rest > 0)


def test_a_row_takes_the_longest_that_fits():
    assert rows_of([3, 7, 5, 4, 2, 7], 10, cut=False) == [
        [DocumentPiece(3, 7), DocumentPiece(0, 3)],
        [DocumentPiece(21, 7), DocumentPiece(19, 2)],
        [DocumentPiece(10, 5), DocumentPiece(15, 4)],
    ]


def test_the_rest_of_a_row_gets_the_first_part_of_a_document():
    assert rows_of([6, 6, 6], 10) == [
        # 4 tokens of the second document, whose rest begins with the last of these
        [DocumentPiece(0, 6), DocumentPiece(6, 4)],
        [DocumentPiece(12, 6), DocumentPiece(9, 3)],
    ]


@pytest.mark.parametrize(("mean", "sigma"), [(500, 1.2), (1100, 1.0), (3000, 1.5)])
def test_little_is_wasted_where_lengths_vary(mean, sigma):
    """And nearly no document is cut for it."""
    lengths = drawn(mean, sigma)
    uncut = rows_of(lengths, 2049, cut=False)
    rows = rows_of(lengths, 2049)
    assert waste(rows, 2049) < 0.005 + 1 / len(rows)
    assert sum(map(len, rows)) - sum(map(len, uncut)) < 0.005 * len(lengths)


@pytest.mark.parametrize(
    ("mean", "sigma", "uncut"), [(1147, 0.3, 0.05), (1349, 0.1, 0.3), (1100, 0.01, 0.45), (84, 0.15, 0.008)]
)
def test_narrow_lengths_are_cut(mean, sigma, uncut):
    """The waste has a limit, whatever the lengths; the last row is added to it."""
    lengths = drawn(mean, sigma)
    assert waste(rows_of(lengths, 2049, cut=False), 2049) > uncut
    rows = rows_of(lengths, 2049)
    assert waste(rows, 2049) < 0.005 + 1 / len(rows)
    assert sum(map(len, rows)) < 1.5 * len(lengths)


def drawn(mean, sigma):
    lengths = np.random.default_rng(0).lognormal(np.log(mean) - sigma**2 / 2, sigma, 4000)
    return np.maximum(lengths, 2).astype(np.int64)


def test_the_record_of_a_row():
    example = example_of([np.array([5, 6, 7]), np.array([8, 9])], 7, 99)
    assert example.tokens.tolist() == [5, 6, 7, 8, 9, 99, 99]
    assert document_numbers(example).tolist() == [1, 1, 1, 2, 2, 0, 0]
    assert example.loss is None
    learned = [np.array([False, True, True]), np.array([True, False])]
    example = example_of([np.array([5, 6, 7]), np.array([8, 9])], 7, 99, learned)
    assert learned_tokens(example).tolist() == [False, True, True, True, False, False, False]
