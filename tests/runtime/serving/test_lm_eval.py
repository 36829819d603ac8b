"""lm-evaluation-harness's local-completions model against the server: its results equal those of the engine."""

import json
from typing import Any

import pytest
from support.fake_engine import alone
from support.served import NAME, serve

from mesh_transformer.data.tokens.tokenizer import EOT_TEXT, load_tokenizer
from mesh_transformer.infer.requests import SamplingParams

lm_eval = pytest.importorskip("lm_eval")

QUESTIONS = [
    {"question": "one plus one", "choices": ["two", "three", "eleven"], "answer": 0},
    {"question": "sky is", "choices": ["blue", "a fish"], "answer": 1},
    {"question": "long " * 8, "choices": ["x", "y z"], "answer": 0},
]
CHOICE_TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""
TEXT_TASK = """
task: tiny_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}:"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{until: ["q", "\\n\\n"], max_gen_toks: 12, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> str:
    """A byte-level BPE tokenizer with 256 bytes, some pairs and the end-of-text token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("o", "n"), ("on", "e"), ("t", "h"), ("l", "o"), ("Ġ", "f")]
    vocab = {piece: i for i, piece in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([EOT_TEXT])
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOT_TEXT, "model_max_length": 128}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def server(tokenizer_folder):
    tokenizer = load_tokenizer(tokenizer_folder)
    with serve(tokenizer=tokenizer, vocab=tokenizer.n_vocab, context=128) as served:
        yield served


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Any:
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name, text in (("choice", CHOICE_TASK), ("text", TEXT_TASK)):
        (folder / f"{name}.yaml").write_text(text.format(file=data))
    return folder


@pytest.mark.parametrize("options", [{}, {"tokenized_requests": False}, {"batch_size": 3}, {"num_concurrent": 4}])
def test_scores_and_texts_are_those_of_the_engine(server, tasks, tokenizer_folder, tmp_path, monkeypatch, options):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    import datasets
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    model = LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions", model=NAME, tokenizer=tokenizer_folder,
        tokenizer_backend="huggingface", max_length=128, **options,
    )  # fmt: skip
    results = lm_eval.simple_evaluate(
        model,
        tasks=["tiny_choice", "tiny_text"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )
    tokenizer, vocab = load_tokenizer(tokenizer_folder), server.engine.vocab
    right = 0
    for sample in results["samples"]["tiny_choice"]:
        question = sample["doc"]
        scores = []
        for choice, (response,) in zip(question["choices"], sample["resps"], strict=True):
            context = tokenizer.encode(f"{question['question']}:")
            whole = tokenizer.encode(f"{question['question']}: {choice}")
            known = alone(whole, SamplingParams(max_tokens=0, prompt_logprobs=True, logprobs=1), vocab).prompt
            scores.append(sum(token.logprob for token in known[len(context) - 1 :]))
            greedy = all(token.top[0][0] == token.id for token in known[len(context) - 1 :])
            assert response == (pytest.approx(scores[-1]), greedy)
        right += scores.index(max(scores)) == question["answer"]
    assert results["results"]["tiny_choice"]["acc,none"] == pytest.approx(right / len(QUESTIONS))
    for sample in results["samples"]["tiny_text"]:
        prompt = tokenizer.encode(f"{sample['doc']['question']}:")
        params = SamplingParams(max_tokens=12, seed=1234, stop_token_ids=(tokenizer.eot,))
        text = tokenizer.decode(token.id for token in alone(prompt, params, vocab).tokens)
        ends = [text.index(stop) for stop in ("q", "\n\n") if stop in text]
        assert sample["resps"] == [[text[: min(ends, default=len(text))]]]
