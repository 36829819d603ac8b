"""Our EvalModel and the harness's `hf` model with the same float32 weights give the same results."""

import golden
import numpy as np
import pytest
from support import hf_folders as hf
from support.builders import program
from support.evaluated import SEQ, gpt2_model, harness_requests, ours, theirs

from mesh_transformer.data.tokens.tokenizer import load_tokenizer
from mesh_transformer.errors import UserError
from mesh_transformer.runtime.evaluation.adaptor import HarnessLM
from mesh_transformer.runtime.evaluation.tasks import Tasks

# nats per request
TOLERANCE = 1e-4
EXAMPLES = 300


def assert_same(our: list[tuple[float, bool]], their: list[tuple[float, bool]]) -> None:
    np.testing.assert_allclose([a for a, _ in our], [b for b, _ in their], rtol=1e-7, atol=TOLERANCE)
    assert [a for _, a in our] == [b for _, b in their]


@pytest.fixture(scope="module")
def questions(texts):
    return Tasks(["piqa", "lambada"], data_dir=str(texts), limit=EXAMPLES)


@pytest.fixture(scope="module")
def their_scores(questions, their_lm):
    """The result of each request, and the number of tokens that the `hf` model read."""
    requests, before = questions.requests()["loglikelihood"], their_lm.computed
    scores = their_lm.loglikelihood(requests, disable_tqdm=True)
    return requests, scores, their_lm.computed - before


@pytest.mark.nightly
def test_piqa_and_lambada(our_model, their_scores):
    requests, scores, computed = their_scores
    assert len(requests) == 3 * EXAMPLES
    longest = max(len(our_model.tokenizer.encode("".join(request.args))) for request in requests)
    assert longest > SEQ + 50  # so some are cut
    before = our_model.counts.computed
    assert_same(HarnessLM(our_model).loglikelihood(requests), scores)
    assert our_model.counts.computed - before < 0.9 * computed


def test_padding_of_piqa_alone(our_model, texts):
    requests = Tasks(["piqa"], data_dir=str(texts), limit=EXAMPLES).requests()["loglikelihood"]
    our_model.counts.__init__()
    HarnessLM(our_model).loglikelihood(requests)
    assert our_model.counts.padding < 0.15
    assert our_model.counts.shared > 0.2 * our_model.counts.given


def test_metrics(our_model, their_lm, texts, task_files):
    tasks = Tasks(
        ["piqa", "lambada", "rolled", "written", "bare"],
        include_path=str(task_files), data_dir=str(texts), limit=16,
    )  # fmt: skip
    found, expected = (tasks.run(lm)["results"] for lm in (HarnessLM(our_model), their_lm))
    assert found.keys() == expected.keys() == {"piqa", "lambada_openai", "rolled", "written", "bare"}
    for task, metrics in expected.items():
        assert found[task].keys() == metrics.keys()
        for name, value in metrics.items():
            assert found[task][name] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value)


def test_the_rolling_task_by_text(our_model, their_lm, task_files):
    requests = Tasks(["rolled"], include_path=str(task_files)).requests()["loglikelihood_rolling"]
    requests = [*requests, *harness_requests(("",), ("a",), ("x" * 7,))]
    our = HarnessLM(our_model).loglikelihood_rolling(requests)
    their = their_lm.loglikelihood_rolling(requests, disable_tqdm=True)
    assert max(len(our_model.tokenizer.encode(request.args[0])) for request in requests) > SEQ
    np.testing.assert_allclose(our, their, rtol=1e-7, atol=TOLERANCE)


def test_the_generated_texts(our_model, their_lm, task_files, monkeypatch):
    monkeypatch.setattr(their_lm, "batch_size_per_gpu", 1)  # padding on the left moves their numbers
    requests = Tasks(["written"], include_path=str(task_files), limit=16).requests()["generate_until"]
    kwargs = {"until": ["zzz"], "max_gen_toks": SEQ - 8, "do_sample": False}
    requests = [*requests, *harness_requests(("A long line, of which the beginning is cut. " * 9, kwargs))]
    our = HarnessLM(our_model).generate_until(requests)
    assert our == their_lm.generate_until(requests, disable_tqdm=True)
    assert len(set(our)) > len(our) // 2


def test_greedy_continuations_are_known_as_such(our_model, their_lm):
    contexts = [f"{i} and then, in the end," for i in range(8)]
    wanted = {"until": [], "max_gen_toks": 3, "do_sample": False}
    texts = HarnessLM(our_model).generate_until(harness_requests(*((context, wanted) for context in contexts)))
    pairs = list(zip(contexts, texts, strict=True))
    pairs += [(context, text + "x") for context, text in pairs] + [(c, " the") for c in contexts]
    our = HarnessLM(our_model).loglikelihood(harness_requests(*pairs))
    assert_same(our, their_lm.loglikelihood(harness_requests(*pairs), disable_tqdm=True))
    assert any(flag for _, flag in our)
    assert not all(flag for _, flag in our)


def test_one_row_at_a_time_gives_the_same_flags(questions, tokenizer):
    requests = questions.requests()["loglikelihood"][::9]
    model = gpt2_model()
    params = hf.random_params(model)
    scores = []
    for batch_tokens in (64, 16 * 256):
        lm = HarnessLM(ours(model, params, tokenizer, batch_tokens=batch_tokens))
        scores.append(lm.loglikelihood(requests))
    assert_same(*scores)


def test_golden_weights(original, texts, tmp_path, tokenizer):
    model = program(golden.config(original / "configs/tiny_mp1.json")).config.model
    params = golden.read_params(original / "mp1/ckpt_params/step_5", model)
    random = np.random.default_rng(0)
    train = np.load(original / "mp1/f32/eval.npz")["tokens"]
    requests = []
    for _ in range(100):
        context = [*train[0], *random.integers(0, model.n_vocab, 20)][: random.integers(1, 80)]
        for _ in range(random.integers(1, 5)):
            requests.append((("a", "b"), context, random.integers(0, model.n_vocab, random.integers(1, 9)).tolist()))
    requests = [(texts, [int(t) for t in context], rest) for texts, context, rest in requests]
    their = theirs(model, params, texts / "gpt2_tokenizer", tmp_path / "hf")
    our = HarnessLM(ours(model, params, tokenizer))
    assert_same(our._loglikelihood_tokens(requests), their._loglikelihood_tokens(requests, disable_tqdm=True))


@pytest.mark.parametrize(
    "pair",
    [
        ("The end ", "of it"),  # spaces at the end of a context belong to the continuation
        ("The end  ", " of it"),
        ("a\n\n", "b"),
        ("", "The end"),
        ("", "<|endoftext|>The end"),  # the prefix itself
        ("Wor", "ds and more"),  # a continuation that changes the context's last token
        ("One, two, " * 60, "three"),
        ("One, ", "two, " * (SEQ // 2 - 2)),
        ("<|endoftext|>One", " two"),
    ],
)
def test_how_texts_become_tokens(our_model, their_lm, pair):
    assert_same(
        HarnessLM(our_model).loglikelihood(harness_requests(pair)),
        their_lm.loglikelihood(harness_requests(pair), disable_tqdm=True),
    )


def test_a_start_token_stands_where_the_harness_puts_it(our_model, their_lm, texts, tmp_path, monkeypatch):
    """Llama's and Gemma's tokenizers add a start token, which GPT-2's does not."""
    from tokenizers.processors import TemplateProcessing
    from transformers import GPT2TokenizerFast, PreTrainedTokenizerFast

    backend = GPT2TokenizerFast.from_pretrained(texts / "gpt2_tokenizer").backend_tokenizer
    backend.add_special_tokens(["<s>"])
    start = backend.token_to_id("<s>")
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    both = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<|endoftext|>")
    both.save_pretrained(tmp_path)
    monkeypatch.setattr(our_model, "tokenizer", load_tokenizer(str(tmp_path)))
    monkeypatch.setattr(their_lm, "tokenizer", both)
    ours = HarnessLM(our_model)
    assert ours.prefix_token_id == their_lm.prefix_token_id == start
    for text in ("The end of it", "<s>The end", "", "a <s> b"):
        assert ours.tok_encode(text) == their_lm.tok_encode(text)
        assert ours.tok_encode(text, add_special_tokens=False) == their_lm.tok_encode(text, add_special_tokens=False)
    assert ours.tok_encode("The end")[0] == start


def test_left_truncation_keeps_one_token_more_than_the_context(our_model):
    lm = HarnessLM(our_model)
    context = list(range(1000))
    assert lm._query(context, [7, 8]).inputs == [*context[-(SEQ - 1) :], 7]
    assert lm._query(context[: SEQ - 1], [7, 8]).context == context[: SEQ - 1]
    whole = lm._query(context, list(range(SEQ)))
    assert (whole.context, len(whole.inputs)) == (context[-1:], SEQ)
    with pytest.raises(UserError, match="a continuation has 145 tokens"):
        lm._query(context, list(range(SEQ + 1)))


def test_ftfy_cleans_what_is_scored(our_model):
    from mesh_transformer.data.tokens.cleaning import make_cleaner

    broken = harness_requests(
        ("He said \u201cit doesn\u00e2\u20ac\u2122t", " \ufb01t\u201d")
    )  # mojibake, a ligature, quotes
    mended = harness_requests(("He said \"it doesn't", ' fit"'))
    plain, cleaning = HarnessLM(our_model), HarnessLM(our_model, make_cleaner(ftfy=True, wikitext=False))
    assert cleaning.loglikelihood(broken) == plain.loglikelihood(mended)
    assert plain.loglikelihood(broken) != plain.loglikelihood(mended)


def test_a_smaller_vocabulary_than_the_tokenizers_is_refused(tokenizer):
    model = gpt2_model(n_vocab=300)
    lm = HarnessLM(ours(model, hf.random_params(model), tokenizer))
    with pytest.raises(UserError, match=r"has the token 464 \('The'\), but model\.n_vocab is 300"):
        lm.loglikelihood(harness_requests(("The", " end")))


def test_a_continuation_without_tokens_is_refused(our_model):
    with pytest.raises(UserError, match="no token"):
        HarnessLM(our_model).loglikelihood(harness_requests(("Word", "s")))


def test_too_many_new_tokens_are_refused(our_model):
    with pytest.raises(UserError, match="max_gen_toks"):
        HarnessLM(our_model).generate_until(harness_requests(("The", {"until": []})))


def test_a_task_may_set_every_sampling_option(our_model):
    options = {
        "temperature": 0.5, "top_p": 0.75, "top_k": 7, "min_p": 0.125, "repetition_penalty": 1.5,
        "presence_penalty": 0.25,
        "frequency_penalty": -2.0, "no_repeat_ngram_size": 3,
    }  # fmt: skip
    given = {"until": [], "do_sample": True, "max_gen_toks": 2, **options}
    assert HarnessLM(our_model)._prompt("The", given, 0).params.options == options
