"""Requests for log-likelihoods that share what they begin with, as trees of tokens. No jax.

A request's model input is its context and its continuation without the last token. Inputs that begin alike become one tree
(ops/attend/packed.py says how a row holds trees).
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

WORTH_SHARING = 16  # tokens; inputs that share fewer, and not a whole context, go their own ways


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


class Common:
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
            least = min(len(self.queries[query].context), WORTH_SHARING)
            if common >= least and size + length - common <= longest:
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


def _in_common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
