"""The words of messages."""

import pytest

from mesh_transformer.errors import byte_size, plural


@pytest.mark.parametrize(
    ("count", "noun", "several", "words"),
    [
        (1, "document", "", "1 document"),
        (0, "document", "", "0 documents"),
        (12345, "document", "", "12,345 documents"),
        (1, "process", "processes", "1 process"),
        (2, "process", "processes", "2 processes"),
    ],
)
def test_a_count(count: int, noun: str, several: str, words: str) -> None:
    assert plural(count, noun, several) == words


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (524_288, "524 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (1_500_000_000, "1.5 GB"),
    ],
)
def test_a_number_of_bytes(count: int, words: str) -> None:
    assert byte_size(count) == words
