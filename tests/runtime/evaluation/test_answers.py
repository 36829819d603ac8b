"""The answer cache returns a result only for the same weights and the same request."""

import jax
import numpy as np
import pytest
from support import hf_folders as hf
from support.evaluated import gpt2_model, harness_requests, ours

from mesh_transformer.errors import UserError
from mesh_transformer.runtime.evaluation.adaptor import HarnessLM
from mesh_transformer.runtime.evaluation.model import AnswerCache, fingerprint

PAIRS = harness_requests(("The end", " of it"), ("The end", " of that"), ("", "Once"))
WRITTEN = harness_requests(("The end", {"until": ["zz"], "max_gen_toks": 4}))


def run(tokenizer, path, seed=0, stop=lambda: False):
    model = gpt2_model()
    made = ours(model, hf.random_params(model, seed), tokenizer, answers=AnswerCache(str(path)), stop=stop)
    return made, HarnessLM(made)


def test_what_was_answered_is_not_computed_again(tokenizer, tmp_path):
    path = tmp_path / "new" / "answers.sqlite"
    made, lm = run(tokenizer, path)
    scores, rolled, texts = (
        lm.loglikelihood(PAIRS),
        lm.loglikelihood_rolling(harness_requests(("a b c",))),
        lm.generate_until(WRITTEN),
    )
    assert made.counts.queries == 4
    again, lm = run(tokenizer, path)
    assert lm.loglikelihood(PAIRS) == scores
    assert lm.loglikelihood_rolling(harness_requests(("a b c",))) == rolled
    assert lm.generate_until(WRITTEN) == texts
    assert again.counts.queries == 0
    assert not again._engines
    assert lm.loglikelihood([*PAIRS, *harness_requests(("The", " end"))])[:3] == scores
    assert again.counts.queries == 1


def test_other_weights_have_other_answers(tokenizer, tmp_path):
    _, lm = run(tokenizer, tmp_path / "answers")
    first = lm.loglikelihood(PAIRS)
    other, lm = run(tokenizer, tmp_path / "answers", seed=1)
    assert lm.loglikelihood(PAIRS) != first
    assert other.counts.queries == 3


def test_a_file_that_is_none_of_ours_is_refused(tmp_path):
    (tmp_path / "text").write_text("not a database, and long enough to be seen as none. " * 50)
    with pytest.raises(UserError, match="--cache"):
        AnswerCache(str(tmp_path / "text"))


def test_a_fingerprint_changes_with_every_value_and_every_place():
    tree = {"a": np.arange(24, dtype=np.float32).reshape(2, 3, 4), "b": np.ones(5, np.float32)}
    first = fingerprint(tree)
    assert fingerprint({name: jax.device_put(leaf) for name, leaf in tree.items()}) == first
    for change in ("value", "order", "sign"):
        other = {name: leaf.copy() for name, leaf in tree.items()}
        if change == "value":
            other["a"][1, 2, 3] += 1e-5
        elif change == "order":
            other["a"][0, 0], other["a"][1, 0] = tree["a"][1, 0], tree["a"][0, 0]
        else:
            other["b"][0] = -1
        assert fingerprint(other) != first, change
