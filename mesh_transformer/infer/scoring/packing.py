"""Packs queries for log-likelihoods into rows of one length. A shared prefix is stored and computed once. No jax.

The model input of a query is its context and its continuation without the last token. Inputs with a common prefix form
one tree; ops/attend/packed.py describes how a row holds trees. A row holds several trees side by side. The head scores
a list of (token of the batch, next token) pairs.

Shapes: B rows, T tokens of a row, P tokens that the head scores, M next tokens to score at each of them.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

# inputs with a shorter common prefix are not combined, unless they share a whole context
MIN_SHARED_TOKENS = 16
SHORTEST_ROW = 64
# positions that go through the head at a time: a multiple of the first, at most the second
_CHUNK_STEP, _LARGEST_CHUNK = 32, 512
# smallest width in the cost of attention: for narrow models it would outweigh the cost of padding
_MIN_WIDTH = 512
# the cost of compiling a second row length, in batches
_COMPILE_COST_BATCHES = 2


class Query(NamedTuple):
    """A query for the log-likelihood of a continuation after a context, as token IDs. Neither is empty."""

    context: Sequence[int]
    continuation: Sequence[int]

    @property
    def inputs(self) -> list[int]:
        """The tokens that the model reads."""
        return [*self.context, *self.continuation[:-1]]


class Tree(NamedTuple):
    """Inputs with a common prefix, as a tree of tokens in preorder.

    Args:
        positions: the position of each token in its input.
        ends: for each token, the index after its last descendant, see ops/attend/packed.py.
        queries: each query, with the indices of the tokens whose next token is scored.
    """

    tokens: list[int]
    positions: list[int]
    ends: list[int]
    queries: list[tuple[int, list[int]]]


class SharedPrefixes:
    """Inputs in lexicographic order, and the length of the common prefix of each input and the one before it."""

    def __init__(self, queries: Sequence[Query], inputs: Sequence[list[int]]):
        self.queries, self.inputs = queries, inputs
        self.order = sorted(range(len(inputs)), key=lambda query: inputs[query])
        pairs = itertools.pairwise([[], *(inputs[query] for query in self.order)])
        self.common = [_in_common(*pair) for pair in pairs]

    def groups(self, longest: int, longer_than: int) -> Iterator[list[tuple[int, int]]]:
        """Groups of queries, one group for each tree, with the number of tokens that each shares with the one before
        it.

        Only inputs longer than `longer_than` and at most `longest` are included. A tree has at most `longest` tokens.
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
        # the indices of the tokens of the newest input
        path: list[int] = []
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
    """Counts of tokens.

    Args:
        given: tokens of all inputs.
        laid_out: tokens of all trees.
        computed: tokens of all batches, with padding.
    """

    queries: int = 0
    given: int = 0
    laid_out: int = 0
    computed: int = 0

    @property
    def shared(self) -> int:
        """Tokens saved by sharing prefixes."""
        return self.given - self.laid_out

    @property
    def padding(self) -> float:
        """The fraction of the computed tokens that is padding."""
        return 1 - self.laid_out / self.computed if self.computed else 0.0

    def add(self, other: TokenCounts) -> None:
        """Add the counts of another plan."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


@dataclasses.dataclass(frozen=True)
class ScoringBatch:
    """The int32 arrays of one call of the model, and which results belong to which query.

    Args:
        at_P: the tokens that go through the head, as indices into the batch's B * T, padded to whole chunks.
        targets_PM: the next tokens to score, padded with 0.
        queries: the queries of the batch.
        firsts: the index in `pairs` of each query's first pair.
        pairs: (pairs, 2), the indices P and M of each scored token, query by query.
    """

    tokens_BT: np.ndarray
    positions_BT: np.ndarray
    ends_BT: np.ndarray
    at_P: np.ndarray
    targets_PM: np.ndarray
    queries: list[int]
    firsts: np.ndarray
    pairs: np.ndarray

    def results(self, logprob_PM: np.ndarray, likeliest_PM: np.ndarray) -> Iterator[tuple[int, float, bool]]:
        """Each query, its log-likelihood in nats, and whether each token of its continuation is the most likely one."""
        p, m = self.pairs.T
        sums = np.add.reduceat(logprob_PM[p, m].astype(np.float64), self.firsts)
        greedy = np.logical_and.reduceat(likeliest_PM[p, m], self.firsts)
        yield from zip(self.queries, sums.tolist(), greedy.tolist(), strict=True)


class BatchPlan(NamedTuple):
    """Batches in the order of computation, of at most two shapes.

    Args:
        chunk: the number of positions P that go through the head at a time.
    """

    batches: list[ScoringBatch]
    counts: TokenCounts
    chunk: int


def plan_batches(queries: Sequence[Query], *, batch_tokens: int, width: int, multiple: int = 1) -> BatchPlan:
    """Pack queries into batches of at most two shapes.

    Args:
        batch_tokens: the largest B * T. It is exceeded only if the longest input or `multiple` rows need more.
        width: width of the residual stream. The cost of attention grows with the ratio of row length and width.
        multiple: B and the head's chunk are multiples of this.
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
    """A chunk size that divides `most` positions with little padding."""
    parts = -(-most // _LARGEST_CHUNK)
    step = math.lcm(_CHUNK_STEP, multiple)
    return -(-most // (parts * step)) * step


class _Shape:
    """Rows of one length, for the inputs that fit and are longer than `longer_than`."""

    def __init__(self, prefixes: SharedPrefixes, length: int, longer_than: int, batch_tokens: int, multiple: int):
        self.prefixes, self.length = prefixes, length
        self.groups = list(prefixes.groups(length, longer_than))
        sizes = [sum(len(prefixes.inputs[query]) - shared for query, shared in group) for group in self.groups]
        self.rows = _best_fit(sizes, length)
        most = max(1, batch_tokens // length)
        self.batches = -(-len(self.rows) // most)
        even = -(-len(self.rows) // max(1, self.batches))
        self.rows_of_batch = -(-even // multiple) * multiple
        self.batches = -(-len(self.rows) // self.rows_of_batch) if self.rows else 0

    def cost(self, width: int) -> float:
        """The cost of all batches, in units of one token through the layers without attention."""
        return self.batches * self.rows_of_batch * self.length * (1 + self.length / (4 * max(width, _MIN_WIDTH)))

    def grids(self) -> Iterator[_Grid]:
        """The batches. Rows are sorted by their number of scored tokens and dealt to the batches in alternating order,
        so that each batch sends about as many tokens through the head."""
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
    """Best-fit decreasing bin packing: the items of each bin of size `room`."""
    bins: list[list[int]] = []
    # (room left, bin), sorted
    open_bins: list[tuple[int, int]] = []
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        index = bisect.bisect_left(open_bins, (sizes[item], -1))
        left, chosen = open_bins.pop(index) if index < len(open_bins) else (room, len(bins))
        if chosen == len(bins):
            bins.append([])
        bins[chosen].append(item)
        bisect.insort(open_bins, (left - sizes[item], chosen))
    return bins


def _in_common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class _Grid:
    """The rows of a batch, and its distinct (token, next token) pairs to score, ordered by token."""

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
        all_pairs = np.asarray([at, targets], np.int64).T
        pairs, self.pair = np.unique(all_pairs, axis=0, return_inverse=True)
        self.at_P, first, self.p = np.unique(pairs[:, 0], return_index=True, return_inverse=True)
        self.m, self.targets = np.arange(len(pairs)) - first[self.p], pairs[:, 1]
        self.most = int(self.m.max()) + 1

    def batch(self, chunk: int, most: int) -> ScoringBatch:
        """The arrays, with P padded to whole chunks and M to `most`."""
        tokens, positions, ends = self._arrays()
        padded = -(-len(self.at_P) // chunk) * chunk
        at_P, targets_PM = np.zeros(padded, np.int32), np.zeros((padded, most), np.int32)
        at_P[: len(self.at_P)] = self.at_P
        targets_PM[self.p, self.m] = self.targets
        pairs = np.stack([self.p, self.m], axis=1)[self.pair]
        return ScoringBatch(tokens, positions, ends, at_P, targets_PM, self.queries, self.firsts, pairs)

    def _arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The tokens, positions and ends of a batch. A padding token attends only to itself."""
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
