"""Evaluation speed on PIQA: our adaptor of the harness and lm-eval's own `hf` model (torch), with the same weights, in
turn.

    pip install -e '.[eval,torch]'
    python benchmarks/evaluate.py --data-dir D      # D/piqa; configs/70M.json, random weights, 300 questions, 5 rounds

Each run is a process of its own. Examples per second are questions (two log-likelihoods each) divided by the time of
the harness's `loglikelihood`, with tokenization but without loading the model, after one warm-up pass. `hf` runs with
several batch sizes; the fastest is compared. The log-likelihoods of both sides must be equal up to ROUNDING, or the
exit code is 1.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint import load_torch, make_checkpoint
from common import REPO, config_of, end, in_turn, medians, parse, parser, peak_memory_mib, report

# largest relative difference, in units of the compute dtype's epsilon: the two programs round differently
ROUNDING = 8


def main() -> None:
    made = parser(__doc__)
    # the peers for which make_checkpoint writes weights
    made.set_defaults(peers="torch")
    shared = REPO.parent / "shared/data"
    made.add_argument("--data-dir", default=str(shared), help="folder that holds piqa/")
    made.add_argument("--tokenizer", default=str(shared / "gpt2_tokenizer"), help="folder of GPT-2's tokenizer")
    made.add_argument("--limit", type=int, default=300, help="number of questions (default: %(default)s)")
    made.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], help="batch sizes of `hf`")
    arguments = parse(made)
    with tempfile.TemporaryDirectory() as arguments.folder:
        make_checkpoint(arguments, Path(arguments.folder))
        peers = {f"hf {batch}": {"worker": "hf", "batch": batch} for batch in arguments.batches}
        runs = in_turn(arguments, {"ours": {"worker": "ours"}, **peers})
    report(summary(runs, arguments))
    end(differences(runs))


def summary(runs: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds, and the ratio to the peer with its fastest batch size."""
    result: dict[str, Any] = {"config": arguments.config, "questions": arguments.limit}
    expected = runs["ours"][0]["scores"]
    for name, records in runs.items():
        result[name] = medians(records, "examples_per_s", "peak_memory_mib")
        result[name]["tokens_computed"] = records[0]["tokens_computed"]
        apart = np.abs(np.asarray(records[0]["scores"]) - np.asarray(expected))
        result[name]["largest_difference"] = round(float(apart.max()), 6)
    best = max((name for name in runs if name != "ours"), key=lambda name: result[name]["examples_per_s"])
    ratio = result["ours"]["examples_per_s"] / result[best]["examples_per_s"]
    return {**result, "best_hf": best, "ours_over_hf": round(ratio, 3)}


def differences(runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The log-likelihoods that differ from those of our first run."""
    found, first = [], runs["ours"][0]
    expected = np.asarray(first["scores"])
    for name, records in runs.items():
        for number, record in enumerate(records, 1):
            scores = np.asarray(record["scores"])
            # a log-likelihood near 0 is a difference of numbers of 1 or more, whose rounding counts
            size = np.maximum(np.abs(expected), 1)
            allowed = ROUNDING * max(first["epsilon"], record["epsilon"]) * size
            # not `>`: NaN is different too
            for request in np.flatnonzero(~(np.abs(scores - expected) <= allowed)):
                values = f"{scores[request]}, not {expected[request]}"
                found.append(f"{name}, round {number}, request {request}: {values}")
    return found


def ours(arguments: argparse.Namespace) -> dict[str, Any]:
    """Our adaptor, as eval_harness.py uses it."""
    import jax.numpy as jnp

    from mesh_transformer import platforms
    from mesh_transformer.checkpoint.open import Checkpoint
    from mesh_transformer.data.tokens.tokenizer import load_tokenizer
    from mesh_transformer.runtime.evaluation.adaptor import HarnessLM
    from mesh_transformer.runtime.evaluation.model import EvalModel
    from mesh_transformer.runtime.session.session import Session
    from mesh_transformer.runtime.session.weights import read_params

    platforms.CompileCache()
    session = Session.open(config_of(arguments))
    model = EvalModel(session, load_tokenizer(arguments.tokenizer))
    model.load(read_params(session, Checkpoint.open(f"{arguments.folder}/native")).params)
    result = timed(HarnessLM(model), arguments)
    epsilon = float(jnp.finfo(session.placement.model.dtype).eps)
    return {**result, "tokens_computed": model.counts.computed // 2, "epsilon": epsilon}


def hf(arguments: argparse.Namespace) -> dict[str, Any]:
    """lm-eval's HFLM on a GPTJForCausalLM, on the CPU or the GPU that torch finds."""
    import torch
    from lm_eval.models.huggingface import HFLM
    from transformers import GPT2TokenizerFast

    class Counting(HFLM):
        computed = 0

        def _model_call(self, inps: Any, **options: Any) -> Any:
            self.computed += inps.numel()
            return super()._model_call(inps, **options)

    tokenizer = GPT2TokenizerFast.from_pretrained(arguments.tokenizer)
    model = load_torch(arguments.folder)
    lm = Counting(pretrained=model, tokenizer=tokenizer, batch_size=arguments.batch)
    result = timed(lm, arguments)
    return {**result, "tokens_computed": lm.computed // 2, "epsilon": torch.finfo(model.dtype).eps}


def timed(lm: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """The rate and the scores of the second of two passes."""
    from mesh_transformer.runtime.evaluation.tasks import Tasks

    tasks = Tasks(["piqa"], data_dir=arguments.data_dir, limit=arguments.limit)
    requests = tasks.requests()["loglikelihood"]
    lm.loglikelihood(requests, disable_tqdm=True)
    began = time.perf_counter()
    scores = lm.loglikelihood(requests, disable_tqdm=True)
    seconds = time.perf_counter() - began
    return {
        "examples_per_s": arguments.limit / seconds,
        "peak_memory_mib": peak_memory_mib(),
        "scores": [round(value, 6) for value, _ in scores],
    }


if __name__ == "__main__":
    main()
