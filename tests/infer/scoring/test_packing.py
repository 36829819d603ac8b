"""Each query is packed once, its tokens attend to the right tokens, and the right tokens are scored."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh_transformer.infer.scoring.packing import MIN_SHARED_TOKENS, BatchPlan, Query, ScoringBatch, plan_batches
from mesh_transformer.ops.attend.packed import PackedView

token = st.integers(0, 3)
query = st.builds(Query, st.lists(token, min_size=1, max_size=40), st.lists(token, min_size=1, max_size=30))
question = st.builds(
    lambda context, rest: [Query(context, one) for one in rest],
    st.lists(token, min_size=1, max_size=40),
    st.lists(st.lists(token, min_size=1, max_size=20), min_size=1, max_size=5),
)
queries = st.lists(st.one_of(question, query.map(lambda one: [one])), min_size=1, max_size=30).map(
    lambda some: [one for question in some for one in question]
)


def masks(batch: ScoringBatch) -> np.ndarray:
    """The attention mask (B, T, T) of a batch."""
    view = PackedView(jnp.asarray(batch.ends_BT), groups=(), group_of=())
    return np.asarray(view.mask(jnp.asarray(batch.positions_BT), None))[:, 0]


def check_batch(batch: ScoringBatch, asked: list[Query]) -> None:
    """The scored tokens of each query attend to its own input, in order, and to nothing else."""
    mask_BTT, length = masks(batch), batch.tokens_BT.shape[1]
    assert batch.tokens_BT.dtype == batch.positions_BT.dtype == batch.ends_BT.dtype == np.int32
    stops = [*batch.firsts[1:], len(batch.pairs)]
    for number, start, stop in zip(batch.queries, batch.firsts, stops, strict=True):
        wanted = asked[number]
        assert stop - start == len(wanted.continuation)
        for i, (p, m) in enumerate(batch.pairs[start:stop]):
            row, at = divmod(int(batch.at_P[p]), length)
            seen = np.flatnonzero(mask_BTT[row, at])
            read = wanted.inputs[: len(wanted.context) + i]
            assert batch.tokens_BT[row, seen].tolist() == read
            assert batch.positions_BT[row, seen].tolist() == list(range(len(read)))
            assert batch.targets_PM[p, m] == wanted.continuation[i]


def check(planned: BatchPlan, asked: list[Query]) -> None:
    """Check all batches, and the token counts."""
    assert sorted(number for batch in planned.batches for number in batch.queries) == list(range(len(asked)))
    for batch in planned.batches:
        check_batch(batch, asked)
        assert len(batch.at_P) % planned.chunk == 0
    assert planned.counts.computed == sum(batch.tokens_BT.size for batch in planned.batches)
    assert planned.counts.given == sum(len(one.inputs) for one in asked)
    assert planned.counts.laid_out <= min(planned.counts.given, planned.counts.computed)
    assert len({batch.tokens_BT.shape for batch in planned.batches}) <= 2
    assert len({batch.targets_PM.shape[1] for batch in planned.batches}) == 1


@settings(max_examples=60)
@given(queries, st.sampled_from([64, 128, 1024]), st.sampled_from([1, 2, 8]))
def test_every_query_is_scored_once_and_sees_its_own(asked, batch_tokens, multiple):
    planned = plan_batches(asked, batch_tokens=batch_tokens, width=64, multiple=multiple)
    check(planned, asked)
    assert all(batch.tokens_BT.shape[0] % multiple == 0 for batch in planned.batches)


@settings(max_examples=30)
@given(question)
def test_a_context_is_laid_out_once(asked):
    planned = plan_batches(asked, batch_tokens=1024, width=64)
    prefixes = {tuple(one.inputs[:n]) for one in asked for n in range(1, len(one.inputs) + 1)}
    if len(prefixes) <= 64:  # more may not fit in one row of the shortest length
        assert planned.counts.laid_out == len(prefixes)


def test_examples_that_many_questions_begin_with_are_laid_out_once():
    shots = list(range(MIN_SHARED_TOKENS))
    asked = [Query([*shots, 100 + i], [i, choice]) for i in range(8) for choice in range(4)]
    planned = plan_batches(asked, batch_tokens=1024, width=64)
    check(planned, asked)
    assert planned.counts.laid_out == MIN_SHARED_TOKENS + 8 * 2


def test_shorter_beginnings_are_not_worth_a_common_row():
    asked = [Query([1, 2, 100 + i], [3]) for i in range(8)]
    assert plan_batches(asked, batch_tokens=1024, width=64).counts.shared == 0


def test_one_long_input_does_not_make_all_rows_long():
    random = np.random.default_rng(0)
    asked = [Query(random.integers(0, 9999, 50).tolist(), [1]) for _ in range(2000)]
    asked.append(Query(random.integers(0, 9999, 2000).tolist(), [1]))
    planned = plan_batches(asked, batch_tokens=4096, width=512)
    check(planned, asked)
    assert sorted({batch.tokens_BT.shape[1] for batch in planned.batches})[0] <= 256
    assert planned.counts.padding < 0.15


def test_nothing_to_score():
    assert plan_batches([], batch_tokens=64, width=64).batches == []


def test_a_mask_that_is_wrong_is_noticed():
    asked = [Query([1, 2, 3], [4, 5]), Query([1, 2, 3], [6, 7]), Query([8], [9])]
    planned = plan_batches(asked, batch_tokens=64, width=64)
    batch = planned.batches[0]
    batch.ends_BT[batch.ends_BT == 4] += 1  # the end of the first answer
    with pytest.raises(AssertionError):
        check_batch(batch, asked)
