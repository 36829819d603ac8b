"""Make values.json: what transformers, in float32, computes with the model of tests/support/real_model.py.

By hand, from the root: PYTHONPATH=$PWD:$PWD/tests python -m golden.real.make
transformers dequantises the file itself. Its texts become tokens by the tokenizer that we make of the file, because
its own conversion loses the splitting of words; tests/gguf compares that tokenizer with llama.cpp.
"""

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from support import real_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import golden
from mesh_transformer.data.tokens.tokenizer import save_tokenizer

NEW_TOKENS = 12
PROMPTS = ["Gravity is", "The capital of France is", "    12345 +  1 ="]
QUESTIONS = ["What is the capital of France?", "And of Italy? Answer with one word."]
# public domain: Austen 1813, Lincoln 1863, Melville 1851
PARAGRAPHS = [
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a "
    "wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood, this "
    "truth is so well fixed in the minds of the surrounding families, that he is considered the rightful property of "
    "some one or other of their daughters.",
    "Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty, "
    "and dedicated to the proposition that all men are created equal. Now we are engaged in a great civil war, testing "
    "whether that nation, or any nation so conceived and so dedicated, can long endure.",
    "Call me Ishmael. Some years ago - never mind how long precisely - having little or no money in my purse, and "
    "nothing particular to interest me on shore, I thought I would sail about a little and see the watery part of the "
    "world.",
]
QUESTIONS_OF_EACH = 20
LENGTH, BATCH, LEARNING_RATE = 48, 2, 1e-4


def main() -> None:
    torch.manual_seed(0)
    path = real_model.fetch()
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(str(path), folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tasks = golden.unpack("texts", Path(folder, "texts"))
        values = {
            "greedy": [greedy(model, tokenizer, prompt) for prompt in PROMPTS],
            "chat": chat(model, tokenizer),
            "paragraphs": [paragraph(model, tokenizer, text) for text in PARAGRAPHS],
            "tensors": {
                name: checksum(tensor) for name, tensor in model.state_dict().items() if name != "lm_head.weight"
            },
            "evaluation": evaluation(model, tokenizer, tasks),
            "tuning": tuning(model, tokenizer),
        }
    Path(__file__).with_name("values.json").write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n")


def generate(model: Any, ids: list[int], count: int) -> list[int]:
    """The greedy tokens after `ids`."""
    answer = model.generate(
        torch.tensor([ids]), max_new_tokens=count, do_sample=False, repetition_penalty=1.0, pad_token_id=0
    )
    tokens: list[int] = answer[0, len(ids) :].tolist()
    return tokens


def greedy(model: Any, tokenizer: Any, prompt: str) -> dict[str, Any]:
    ids = tokenizer(prompt).input_ids
    return {"prompt": prompt, "ids": ids, "tokens": generate(model, ids, NEW_TOKENS)}


def chat(model: Any, tokenizer: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, str]] = []
    turns = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        text = tokenizer.decode(generate(model, ids, NEW_TOKENS), skip_special_tokens=True)
        turns.append({"messages": list(messages), "prompt_tokens": len(ids), "answer": text})
        messages.append({"role": "assistant", "content": text})
    return turns


def log_likelihoods(model: Any, ids: list[int]) -> torch.Tensor:
    """The log-probability of each token but the first, float64."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def paragraph(model: Any, tokenizer: Any, text: str) -> dict[str, Any]:
    ids = tokenizer(text).input_ids
    return {"text": text, "tokens": len(ids), "nll": -float(log_likelihoods(model, ids).sum())}


def checksum(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


def evaluation(model: Any, tokenizer: Any, tasks: Path) -> list[list[Any]]:
    """Context, continuation and log-likelihood of each request of the first questions, by the harness's `hf` model."""
    from lm_eval.models.huggingface import HFLM

    from mesh_transformer.runtime.evaluation.tasks import Tasks

    requests = Tasks(["piqa", "lambada"], data_dir=str(tasks), limit=QUESTIONS_OF_EACH).requests()["loglikelihood"]
    # torch's softmax of float32 is off by 3e-4 in a sum of 40 tokens
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, softmax_dtype="float64")
    scores = harness.loglikelihood(requests, disable_tqdm=True)
    return [[*request.args, score] for request, (score, _) in zip(requests, scores, strict=True)]


def tuning(model: Any, tokenizer: Any) -> dict[str, Any]:
    """The losses of two steps of Adam on the same sequences. The rate of the first one is half of the second's."""
    ids = [token for text in PARAGRAPHS for token in tokenizer(text).input_ids][: BATCH * (LENGTH + 1)]
    records = torch.tensor(ids).reshape(BATCH, LENGTH + 1)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8)
    losses = []
    for _ in range(2):
        logits = model(records[:, :-1]).logits.double()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), records[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return {"records": records.tolist(), "learning_rate": LEARNING_RATE, "losses": losses}


if __name__ == "__main__":
    main()
