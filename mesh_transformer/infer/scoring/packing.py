"""Requests for log-likelihoods, laid out as rows of one length in which what they share stands once. No jax.

A request's model input is its context and its continuation without the last token. Inputs that begin alike become one tree
(ops/attend/packed.py says how a row holds trees); trees of one question, or of questions with the same examples before them,
fill rows side by side. What is asked of the head is a list of (token of the batch, next token) pairs.

Shapes: B rows, T tokens of a row, P tokens whose logits are wanted, M next tokens of interest after each.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

MIN_SHARED_TOKENS = 16  # tokens; inputs that share fewer, and not a whole context, go their own ways
SHORTEST_ROW = 64
_CHUNK_STEP, _LARGEST_CHUNK = 32, 512  # positions that go through the head together
_MIN_WIDTH = 512  # narrower models are taken to be so wide: what they compute is little, what padding adds to it should be too
_COMPILE_COST_BATCHES = 2  # batches: what compiling for a second length of rows is taken to cost


class Query(NamedTuple):
    """What is the log-likelihood of the continuation after the context? Neither is empty."""

    context: Sequence[int]
    continuation: Sequence[int]

    @property
    def inputs(self) -> list[int]:
        """The tokens that the model reads."""
        return [*self.context, *self.continuation[:-1]]


class Tree(NamedTuple):
    """Inputs that begin alike, in preorder: a token's index is that from the tree's beginning."""

    tokens: list[int]
    positions: list[int]  # in its own input
    ends: list[int]  # see ops/attend/packed.py
    queries: list[tuple[int, list[int]]]  # each query, and the tokens whose next one is scored


class SharedPrefixes:
    """Inputs in lexicographic order, and how many first tokens each has in common with the one before."""

    def __init__(self, queries: Sequence[Query], inputs: Sequence[list[int]]):
        self.queries, self.inputs = queries, inputs
        self.order = sorted(range(len(inputs)), key=lambda query: inputs[query])
        pairs = itertools.pairwise([[], *(inputs[query] for query in self.order)])
        self.common = [_in_common(*pair) for pair in pairs]

    def groups(self, longest: int, longer_than: int) -> Iterator[list[tuple[int, int]]]:
        """The queries of each tree with the tokens that each shares with the one before it.

        Of the inputs longer than `longer_than` and at most `longest`; no tree is larger than `longest`.
        """
        group: list[tuple[int, int]] = []
        size = common = 0
        for query, with_last in zip(self.order, self.common, strict=True):
            common, length = min(common, with_last), len(self.inputs[query])
            if not longer_than < length <= longest:
                continue
            min_shared = min(len(self.queries[query].context), MIN_SHARED_TOKENS)
            if common >= min_shared and size + length - common <= longest:
                group.append((query, common))
                size += length - common
            else:
                if group:
                    yield group
                group, size = [(query, 0)], length
            common = length
        if group:
            yield group

    def tree(self, group: list[tuple[int, int]]) -> Tree:
        """Lay out the queries of a group."""
        tree = Tree([], [], [], [])
        path: list[int] = []  # the indices of the newest input's tokens
        for query, common in group:
            for index in path[common:]:
                tree.ends[index] = len(tree.tokens)
            new = self.inputs[query][common:]
            path = path[:common] + list(range(len(tree.tokens), len(tree.tokens) + len(new)))
            tree.tokens.extend(new)
            tree.positions.extend(range(common, common + len(new)))
            tree.ends.extend([0] * len(new))
            tree.queries.append((query, path[len(self.queries[query].context) - 1 :]))
        for index in path:
            tree.ends[index] = len(tree.tokens)
        return tree


@dataclasses.dataclass
class TokenCounts:
    """Tokens of the inputs as given, as laid out, and as computed with the padding of rows and batches."""

    queries: int = 0
    given: int = 0
    laid_out: int = 0
    computed: int = 0

    @property
    def shared(self) -> int:
        """Tokens that were not computed again."""
        return self.given - self.laid_out

    @property
    def padding(self) -> float:
        """Share of the computed tokens that belong to no input."""
        return 1 - self.laid_out / self.computed if self.computed else 0.0

    def add(self, other: TokenCounts) -> None:
        """Count another plan's tokens too."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


@dataclasses.dataclass(frozen=True)
class Batch:
    """The arrays of one call of the model, and whose numbers come out. All int32."""

    tokens_BT: np.ndarray
    positions_BT: np.ndarray
    ends_BT: np.ndarray
    # tokens that go through the head: indices into the batch's B * T, padded to whole chunks
    at_P: np.ndarray
    targets_PM: np.ndarray  # padded with zeros
    queries: list[int]
    firsts: np.ndarray  # where each query's pairs begin
    pairs: np.ndarray  # (pairs, 2): P and M of each scored token, query by query

    def results(self, logprob_PM: np.ndarray, likeliest_PM: np.ndarray) -> Iterator[tuple[int, float, bool]]:
        """Each query, its log-likelihood, and whether every token of its continuation was the likeliest."""
        p, m = self.pairs.T
        sums = np.add.reduceat(logprob_PM[p, m].astype(np.float64), self.firsts)
        greedy = np.logical_and.reduceat(likeliest_PM[p, m], self.firsts)
        yield from zip(self.queries, sums.tolist(), greedy.tolist(), strict=True)


class BatchPlan(NamedTuple):
    """Batches in the order in which they are computed; the shapes are few."""

    batches: list[Batch]
    counts: TokenCounts
    chunk: int  # the head's P


def plan_batches(queries: Sequence[Query], *, batch_tokens: int, width: int, multiple: int = 1) -> BatchPlan:
    """Lay out queries, in at most two shapes of batches.

    Args:
        batch_tokens: B * T at most; more only where the longest input or `multiple` rows need it.
        width: of the residual stream: attention costs the more, the longer a row is compared to it.
        multiple: what divides B, and the head's chunk.
    """
    if not queries:
        return BatchPlan([], TokenCounts(), multiple)
    inputs = [query.inputs for query in queries]
    prefixes = SharedPrefixes(queries, inputs)
    longest = max(map(len, inputs))
    largest = next(length for length in _lengths() if length >= longest)
    layouts = []
    for length in itertools.takewhile(lambda length: length <= 4 * largest, _lengths()):
        shapes = [_Shape(prefixes, length, 0, batch_tokens, multiple)]
        if length < longest:
            shapes.append(_Shape(prefixes, largest, length, batch_tokens, multiple))
        extra = _COMPILE_COST_BATCHES * batch_tokens * (len(shapes) - 1)
        layouts.append((sum(shape.cost(width) for shape in shapes) + extra, length, shapes))
    _, _, shapes = min(layouts)
    grids = [grid for shape in shapes for grid in shape.grids()]
    counts = TokenCounts(
        len(queries),
        sum(map(len, inputs)),
        sum(len(tree.tokens) for grid in grids for row in grid.rows for tree in row),
        sum(grid.shape[0] * grid.shape[1] for grid in grids),
    )
    chunk = _chunk(max(len(grid.at_P) for grid in grids), multiple)
    most = 1 << (max(grid.most for grid in grids) - 1).bit_length()
    return BatchPlan([grid.batch(chunk, most) for grid in grids], counts, chunk)


def _lengths() -> Iterator[int]:
    """64, 128, 192, 256, 384, 512, 768, ..."""
    yield SHORTEST_ROW
    length = 2 * SHORTEST_ROW
    while True:
        yield from (length, length * 3 // 2)
        length *= 2


def _chunk(most: int, multiple: int) -> int:
    """A size that divides `most` positions evenly, or nearly so."""
    parts = -(-most // _LARGEST_CHUNK)
    step = math.lcm(_CHUNK_STEP, multiple)
    return -(-most // (parts * step)) * step


class _Shape:
    """Rows of one length, for the inputs longer than `longer_than` that fit one."""

    def __init__(
        self, prefixes: SharedPrefixes, length: int, longer_than: int, batch_tokens: int, multiple: int
    ):
        self.prefixes, self.length = prefixes, length
        self.groups = list(prefixes.groups(length, longer_than))
        sizes = [
            sum(len(prefixes.inputs[query]) - shared for query, shared in group) for group in self.groups
        ]
        self.rows = _best_fit(sizes, length)
        most = max(1, batch_tokens // length)
        self.batches = -(-len(self.rows) // most)
        even = -(-len(self.rows) // max(1, self.batches))
        self.rows_of_batch = -(-even // multiple) * multiple
        self.batches = -(-len(self.rows) // self.rows_of_batch) if self.rows else 0

    def cost(self, width: int) -> float:
        """In tokens through everything but attention."""
        return (
            self.batches * self.rows_of_batch * self.length * (1 + self.length / (4 * max(width, _MIN_WIDTH)))
        )

    def grids(self) -> Iterator[_Grid]:
        """The batches. Rows with much and with little to score are dealt to them in turn, there and back: what goes through
        the head is as much in each."""
        dealt: list[list[list[Tree]]] = [[] for _ in range(self.batches)]
        for number, row in enumerate(sorted(self.rows, key=lambda row: -sum(map(self._scored_tokens, row)))):
            turn, place = divmod(number, self.batches)
            trees = [self.prefixes.tree(self.groups[group]) for group in row]
            dealt[place if turn % 2 == 0 else -1 - place].append(trees)
        for rows in dealt:
            yield _Grid(rows, (self.rows_of_batch, self.length), self.prefixes.queries)

    def _scored_tokens(self, group: int) -> int:
        return sum(len(self.prefixes.queries[query].continuation) for query, _ in self.groups[group])


def _best_fit(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Which items go into each bin of size `room`: the largest first, each where it leaves the least room."""
    bins: list[list[int]] = []
    open_bins: list[tuple[int, int]] = []  # (room left, bin), in order
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        found = bisect.bisect_left(open_bins, (sizes[item], -1))
        left, chosen = open_bins.pop(found) if found < len(open_bins) else (room, len(bins))
        if chosen == len(bins):
            bins.append([])
        bins[chosen].append(item)
        bisect.insort(open_bins, (left - sizes[item], chosen))
    return bins


def _in_common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class _Grid:
    """Rows of trees, a batch, and the (token, next token) pairs that are asked of it, each once, ordered by token."""

    def __init__(self, rows: list[list[Tree]], shape: tuple[int, int], queries: Sequence[Query]):
        self.rows, self.shape = rows, shape
        self.queries: list[int] = []
        counts: list[int] = []
        at: list[int] = []
        targets: list[int] = []
        for number, row in enumerate(rows):
            start = number * shape[1]
            for tree in row:
                for query, indices in tree.queries:
                    self.queries.append(query)
                    counts.append(len(indices))
                    at.extend(start + index for index in indices)
                    targets.extend(queries[query].continuation)
                start += len(tree.tokens)
        self.firsts = np.cumsum([0, *counts[:-1]])
        wanted = np.asarray([at, targets], np.int64).T
        pairs, self.pair = np.unique(wanted, axis=0, return_inverse=True)
        self.at_P, first, self.p = np.unique(pairs[:, 0], return_index=True, return_inverse=True)
        self.m, self.targets = np.arange(len(pairs)) - first[self.p], pairs[:, 1]
        self.most = int(self.m.max()) + 1

    def batch(self, chunk: int, most: int) -> Batch:
        """The arrays, with P padded to whole chunks and M to `most`."""
        tokens, positions, ends = self._arrays()
        padded = -(-len(self.at_P) // chunk) * chunk
        at_P, targets_PM = np.zeros(padded, np.int32), np.zeros((padded, most), np.int32)
        at_P[: len(self.at_P)] = self.at_P
        targets_PM[self.p, self.m] = self.targets
        pairs = np.stack([self.p, self.m], axis=1)[self.pair]
        return Batch(tokens, positions, ends, at_P, targets_PM, self.queries, self.firsts, pairs)

    def _arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, positions and ends of a batch; a token that pads sees itself alone."""
        tokens_BT, positions_BT = np.zeros((2, *self.shape), np.int32)
        ends_BT = np.broadcast_to(np.arange(1, self.shape[1] + 1, dtype=np.int32), self.shape).copy()
        for number, row in enumerate(self.rows):
            start = 0
            for tree in row:
                span = slice(start, start + len(tree.tokens))
                tokens_BT[number, span], positions_BT[number, span] = tree.tokens, tree.positions
                ends_BT[number, span] = start + np.asarray(tree.ends)
                start = span.stop
        return tokens_BT, positions_BT, ends_BT
