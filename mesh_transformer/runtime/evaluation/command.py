"""The evaluation of a checkpoint, for eval_harness.py, and of a training run at each validation."""

import dataclasses
import importlib.metadata
import json
import os
import sys
import time
import unittest.mock
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from mesh_transformer import __version__, files, logs, platforms
from mesh_transformer.checkpoint.open import Checkpoint
from mesh_transformer.config import Config
from mesh_transformer.data.tokens.cleaning import make_cleaner
from mesh_transformer.data.tokens.tokenizer import load_tokenizer, warn_of_more_ids
from mesh_transformer.errors import UserError, plural
from mesh_transformer.infer.scoring.packing import TokenCounts
from mesh_transformer.logs import log
from mesh_transformer.parallel.sharding import Params
from mesh_transformer.runtime.evaluation.model import (
    BATCH_TOKENS,
    AnswerCache,
    DryRunModel,
    EvalModel,
    EvaluationStopped,
)
from mesh_transformer.runtime.evaluation.tasks import DEFAULT_TASKS, Tasks, check_installed
from mesh_transformer.runtime.session import memory
from mesh_transformer.runtime.session.session import Session
from mesh_transformer.runtime.session.tokenizer import open_tokenizer
from mesh_transformer.runtime.session.weights import config_for, of_whole_model, open_with, read_params

# samples for the standard errors that have no formula, such as that of a perplexity
BOOTSTRAP = 1000
PACKAGES = ("lm_eval", "jax", "jaxlib", "dm-haiku", "datasets", "transformers")


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """The options of eval_harness.py.

    Raises:
        UserError: an option is out of its range.
    """

    checkpoint: str | None = None
    base: str | None = None
    adapter: str | None = None
    tasks: tuple[str, ...] = DEFAULT_TASKS
    include_path: str | None = None
    data_dir: str | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    batch_tokens: int = BATCH_TOKENS
    cache: str | None = None
    ftfy: bool = False
    output: str | None = None

    def __post_init__(self) -> None:
        for name, value, allowed, fits in [
            ("--tasks", ",".join(self.tasks), "names separated by commas", all(self.tasks) and self.tasks),
            ("--limit", self.limit, "1 or more", self.limit is None or self.limit >= 1),
            ("--num-fewshot", self.num_fewshot, "0 or more", (self.num_fewshot or 0) >= 0),
            ("--batch-tokens", self.batch_tokens, "1 or more", self.batch_tokens >= 1),
        ]:
            if not fits:
                raise UserError(f"{name} {value}: must be {allowed}")
        if self.output is not None and os.path.isdir(self.output):
            raise UserError(f"--output {self.output} is a folder: give the path of a file")
        if self.output is not None and not os.path.isdir(os.path.dirname(self.output) or "."):
            raise UserError(f"--output {self.output}: there is no folder {os.path.dirname(self.output)}")


def run(config_path: str | None, overrides: Sequence[str], options: EvalOptions) -> int:
    """Run eval_harness.py. The tables are printed to standard output, log lines to standard error.

    Raises:
        UserError: an argument, the config, the devices, a task, the tokenizer or the checkpoint cannot be used.
    """
    logs.set_up()
    config, checkpoint = config_for(config_path, overrides, options.checkpoint, options.base, options.adapter)
    evaluation = evaluate(config, options, checkpoint)
    if jax.process_index() == 0:
        show(evaluation, options.output)
    return 0


class Evaluation(NamedTuple):
    """The result of an evaluation: the report as JSON values, and the tables to print."""

    report: dict[str, Any]
    tables: str


def evaluate(config: Config, options: EvalOptions, checkpoint: Checkpoint | None = None) -> Evaluation:
    """Evaluate a checkpoint. Joins the other processes first, if the environment defines any.

    Only process 0 computes standard errors and tables.

    Args:
        checkpoint: None: the one that the options name, else the run of the config.

    Raises:
        UserError: as `run`.
    """
    check_installed()
    from mesh_transformer.runtime.evaluation.adaptor import HarnessLM

    checkpoint = checkpoint or open_with(options.checkpoint or config.checkpoint.root, options.base, options.adapter)
    config = of_whole_model(config)
    platforms.CompileCache()
    platforms.start_devices()
    session = Session.open(config)
    memory.check_scoring(session)
    tokenizer = open_tokenizer(config, checkpoint)
    tasks = Tasks(
        options.tasks,
        include_path=options.include_path,
        data_dir=options.data_dir,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
    )
    answers = AnswerCache(options.cache) if options.cache is not None else None
    log.info("reading %s", checkpoint)
    weights = read_params(session, checkpoint)
    log.info("parameters of step %d from %s", weights.step, checkpoint)
    model = EvalModel(session, tokenizer, batch_tokens=options.batch_tokens, answers=answers)
    model.load(weights.params)
    began = time.monotonic()
    lm = HarnessLM(model, make_cleaner(ftfy=True, wikitext=False) if options.ftfy else None)
    results = tasks.run(lm, bootstrap=BOOTSTRAP if jax.process_index() == 0 else 0)
    options_used = {name: value for name, value in dataclasses.asdict(options).items() if name != "output"}
    report: dict[str, Any] = {
        **{name: results[name] for name in ("results", "groups", "n-shot", "n-samples") if name in results},
        "versions": {
            "mesh_transformer": __version__,
            **{name: importlib.metadata.version(name) for name in PACKAGES},
            "tasks": results["versions"],
        },
        "evaluation": {**options_used, "checkpoint": checkpoint.path, "step": weights.step},
        "config": config.model_dump(mode="json"),
        "tokens": _tokens(model.counts),
        "seconds": round(time.monotonic() - began, 1),
    }
    return Evaluation(report, _tables(results) if jax.process_index() == 0 else "")


def _tokens(counts: TokenCounts) -> dict[str, Any]:
    return {
        "scored_requests": counts.queries,
        "as_given": counts.given,
        "shared": counts.shared,
        "computed": counts.computed,
        "padding_share": round(counts.padding, 4),
    }


def _tables(results: dict[str, Any]) -> str:
    from lm_eval.utils import make_table

    kinds = ("results", "groups") if results.get("groups") else ("results",)
    # the harness's writer of tables would fork this process, which uses devices, once for each core
    with unittest.mock.patch("multiprocessing.cpu_count", return_value=1):
        return "\n".join(make_table(results, kind) for kind in kinds)


def show(evaluation: Evaluation, output: str | None) -> None:
    """Print the tables, and write the report to the file `output`, if it is given."""
    report, tokens = evaluation.report, evaluation.report["tokens"]
    log.info(
        "scored %s in %s s: %s, of which %s were shared; computed %s tokens, %.1f%% of them padding",
        *(plural(tokens["scored_requests"], "request"), report["seconds"], plural(tokens["as_given"], "token")),
        *(f"{tokens['shared']:,}", f"{tokens['computed']:,}", 100 * tokens["padding_share"]),
    )
    version = report["versions"]["lm_eval"]
    sys.stdout.write(f"lm-evaluation-harness {version}\n\n{evaluation.tables}\n")
    sys.stdout.flush()
    if output is not None:
        files.replace(output, json.dumps(report, indent=2).encode())
        log.info("wrote %s", output)


class RunEvaluation:
    """Evaluates data.eval_harness_tasks at each validation of a run. The constructor loads and checks the tasks.

    All processes take part.

    Args:
        stop: called between batches; returns whether the run must end.

    Raises:
        UserError: a task or the tokenizer cannot be loaded, or does not fit the model.
    """

    def __init__(self, session: Session, stop: Callable[[], bool]):
        data = session.config.data
        self._tasks: Tasks | None = None
        self._session = session
        if not data.eval_harness_tasks:
            return
        self._tasks = Tasks(
            data.eval_harness_tasks,
            include_path=data.eval_harness_include,
            data_dir=data.eval_harness_data,
            limit=data.eval_harness_limit,
        )
        from mesh_transformer.runtime.evaluation.adaptor import HarnessLM

        tokenizer = load_tokenizer(session.tokenizer)
        if jax.process_index() == 0:
            warn_of_more_ids(tokenizer, session.config.model.n_vocab)
        self._model = EvalModel(session, tokenizer, stop=stop)
        self._lm = HarnessLM(self._model)
        dry_run = HarnessLM(DryRunModel(self._model))
        for kind, requests in self._tasks.requests().items():
            getattr(dry_run, kind)(requests)
        log.info("tasks at each validation: %s", ", ".join(self._tasks.names))

    def __bool__(self) -> bool:
        """Whether there are tasks."""
        return self._tasks is not None

    def run(self, params: Params) -> dict[str, float]:
        """{"eval/<task>/<metric>": value} for the parameters of a run. Empty if the run must end."""
        if self._tasks is None:
            return {}
        self._model.load(self._session.whole_sequences.in_compute_dtype(params))
        try:
            return scalars(self._tasks.run(self._lm))
        except EvaluationStopped:
            return {}
        finally:
            self._model.unload()


def scalars(results: dict[str, Any]) -> dict[str, float]:
    """The harness's results by their names in the log: `acc,none` of piqa becomes eval/piqa/acc.

    A filter is part of the name: eval/gsm8k/exact_match/strict-match.
    """
    found = {}
    for task, metrics in {**results["results"], **results.get("groups", {})}.items():
        for key, value in metrics.items():
            metric, _, chosen = key.partition(",")
            if chosen and not metric.endswith("_stderr") and isinstance(value, int | float):
                name = metric if chosen == "none" else f"{metric}/{chosen}"
                found[f"eval/{task}/{name}"] = float(value)
    return found
