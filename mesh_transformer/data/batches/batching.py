"""The form of a step's batch, and the checks of the records that fill it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from mesh_transformer.data.records.example import MAX_NUMBERS
from mesh_transformer.data.records.tfrecords import Record
from mesh_transformer.environment import command
from mesh_transformer.errors import UserError, plural, set_options
from mesh_transformer.sequences import Example, Sequences

Packing = Literal["auto", "concat", "documents"]


@dataclass(frozen=True)
class Batching:
    """The form of a step's batch: (accumulation, rows of this host, seq + 1).

    Args:
        n_vocab: upper bound of tokens; None: not checked.
        packing: see `data.packing`.
        documents: whether the batches have the numbers of documents.
        learned: whether they have the loss mask.
    """

    seq: int
    accumulation: int
    batch: int
    rows: tuple[int, ...]
    n_vocab: int | None = None
    packing: Packing = "auto"
    documents: bool = False
    learned: bool = False

    def __post_init__(self) -> None:
        if not self.rows or list(self.rows) != sorted(set(self.rows).intersection(range(self.batch))):
            raise ValueError(f"rows must be some of 0..{self.batch - 1}, ascending: {self.rows}")

    @property
    def records(self) -> int:
        """Records of one step on all hosts."""
        return self.accumulation * self.batch

    def fitted(self, firsts: Sequence[Record]) -> Self:
        """This form, with the optional arrays that the first records of the sources have.

        Raises:
            UserError: one of them has another length, unknown tokens, or no lengths of its documents where
                `packing` needs them.
        """
        examples = [self._example(record) for record in firsts]
        has_documents = any(example.documents is not None for example in examples)
        documents = self.packing == "documents" or (self.packing == "auto" and has_documents)
        return replace(self, documents=documents, learned=any(example.loss is not None for example in examples))

    def sequences(self, records: Sequence[Record]) -> Sequences:
        """The batch of this host's records, in the order of microbatches and rows.

        Raises:
            UserError: a record does not fit the form of the batch; names the record.
        """
        examples = [self._checked(record) for record in records]
        flat = Sequences.of(examples, documents=self.documents, learned=self.learned)
        return flat.map(lambda array: array.reshape(self.accumulation, len(self.rows), *array.shape[1:]))

    def _checked(self, record: Record) -> Example:
        """The example of a record. Refuses documents or a loss mask that the batches would leave out."""
        example = self._example(record)
        if example.documents is not None and not self.documents and self.packing == "auto":
            raise UserError(
                f"{record.place} has the lengths of its documents, and the first record of its set has none: set "
                f"data.packing to documents or concat, or make the records again"
            )
        if example.loss is not None and not self.learned:
            raise UserError(
                f"{record.place} has a loss mask (the feature `loss`), and the first record of its set has none, so "
                f"the batches have no mask: make the records of the set again, or make the two kinds two sources of a "
                f"mixture"
            )
        return example

    def _example(self, record: Record) -> Example:
        seq = self.seq
        # of a long sequence: its tokens, as many documents, and two lengths of the loss mask for each token
        example = record.example(max(MAX_NUMBERS, 4 * (seq + 1)))
        tokens = example.tokens
        if len(tokens) != seq + 1:
            # a longer one may exceed the context of the model
            give = (
                f"give {set_options(f'data.seq={len(tokens) - 1}')}"
                if len(tokens) <= seq
                else f"set data.seq to {len(tokens) - 1}"
            )
            change = f"{give}, or " if len(tokens) > 1 else ""
            raise UserError(
                f"{record.place} has {plural(len(tokens), 'token')}, sequences of {seq} need {seq + 1}: "
                + f"{change}make the records again with {command('records')} --seq {seq}"
            )
        if self.n_vocab is not None and tokens.max(initial=0) >= self.n_vocab:
            raise UserError(
                f"{record.place} has the token {tokens.max()}, and model.n_vocab is {self.n_vocab}: raise "
                f"model.n_vocab, or make the records with the model's tokenizer (data.tokenizer)"
            )
        if self.packing == "documents" and example.documents is None:
            raise UserError(
                f"{record.place} has no lengths of its documents (the feature `documents`), which data.packing "
                f"documents needs: make the records with {command('prepare')} --pack documents, or set data.packing to "
                f"concat"
            )
        return example
