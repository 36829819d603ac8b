"""Tasks of the harness during training: loaded and checked when the run starts, run with each validation."""

from collections.abc import Callable
from typing import Any

import jax

from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.logs import log
from mesh_transformer.models.model import Params
from mesh_transformer.runtime.evals.model import EvalModel, Rehearsal, Stopped
from mesh_transformer.runtime.evals.tasks import Tasks
from mesh_transformer.runtime.session import Session


class Evaluation:
    """The tasks of data.eval_harness_tasks. Every process takes part.

    Args:
        stop: asked between batches whether the run is to end.

    Raises:
        UserError: a task or the tokenizer cannot be loaded, or does not fit the model.
    """

    def __init__(self, session: Session, stop: Callable[[], bool]):
        data = session.config.data
        self._tasks: Tasks | None = None
        if not data.eval_harness_tasks:
            return
        self._tasks = Tasks(
            data.eval_harness_tasks,
            include_path=data.eval_harness_include,
            data_dir=data.eval_harness_data,
            limit=data.eval_harness_limit,
        )
        from mesh_transformer.runtime.evals.adaptor import HarnessLM

        self._model = EvalModel(session, load_tokenizer(data.tokenizer), stop=stop)
        self._lm = HarnessLM(self._model)
        self._cast = jax.jit(session.placement.cast)
        rehearsal = HarnessLM(Rehearsal(self._model))
        for kind, requests in self._tasks.requests().items():
            getattr(rehearsal, kind)(requests)
        log.info("tasks that go with each validation: %s", ", ".join(self._tasks.names))

    def __bool__(self) -> bool:
        """Whether there is anything to evaluate."""
        return self._tasks is not None

    def run(self, params: Params) -> dict[str, float]:
        """{"eval/<task>/<metric>": value} of float32 parameters; nothing if the run is to end."""
        if self._tasks is None:
            return {}
        self._model.load(self._cast(params))
        try:
            return scalars(self._tasks.run(self._lm))
        except Stopped:
            return {}
        finally:
            self._model.unload()


def scalars(results: dict[str, Any]) -> dict[str, float]:
    """The numbers of the harness's results, named as they are logged: `acc,none` of piqa is eval/piqa/acc.

    A metric after a filter keeps the filter's name: eval/gsm8k/exact_match/strict-match.
    """
    found = {}
    for task, metrics in {**results["results"], **results.get("groups", {})}.items():
        for key, value in metrics.items():
            metric, _, chosen = key.partition(",")
            if chosen and not metric.endswith("_stderr") and isinstance(value, int | float):
                name = metric if chosen == "none" else f"{metric}/{chosen}"
                found[f"eval/{task}/{name}"] = float(value)
    return found
