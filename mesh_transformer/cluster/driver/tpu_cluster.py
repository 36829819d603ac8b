"""`TPUCluster`: the original program's interface to a model on the hosts of a cluster."""

from collections.abc import Sequence
from typing import Any

from mesh_transformer.cluster.base import Job
from mesh_transformer.cluster.driver.compute_target import ComputeTarget
from mesh_transformer.config import Config, parse_config
from mesh_transformer.errors import RunError, UserError


class TPUCluster:
    """Trains, evaluates and samples the model of a run on a compute target.

    The state between two calls is the run's newest checkpoint, in `checkpoint.model_dir`. Each call is a job that all
    workers start from this checkpoint. The driver restarts a job after a failure.

    Args:
        config: config of the run.
        target: a TPU slice, a Ray cluster, or processes of this machine.
    """

    def __init__(self, config: Config, target: ComputeTarget):
        self.config, self.target = config, target
        self._load: dict[str, Any] = {}

    def train(self, steps: int | None = None) -> int:
        """Train up to step `steps` of the run (None: optimizer.total_steps) and save.

        Returns:
            0, or 128 + the signal that stopped the job.

        Raises:
            UserError, RunError: as `Supervisor.run`.
        """
        raw = self.config.model_dump(mode="json")
        if steps is not None:
            raw["optimizer"]["total_steps"] = steps
        config = parse_config(raw)
        return self.target.run(Job.of("train", config, **self._load), config)[0]

    def eval(self, tasks: Sequence[str], **options: Any) -> dict[str, Any]:
        """Evaluate the newest checkpoint on tasks of lm-evaluation-harness.

        Args:
            options: further fields of `runtime.evaluation.command.EvalOptions`.

        Returns:
            The report that eval_harness.py writes.
        """
        return self._result("evaluate", tasks=list(tasks), **options)["report"]

    def generate(self, prompts: Sequence[str | list[int]], checkpoint: str | None = None, **request: Any) -> Any:
        """Sample from the newest checkpoint, or from `checkpoint`.

        Args:
            prompts: texts, or lists of token ids.
            request: fields of `runtime.sampling.sampler.SampleRequest`, such as max_new_tokens.

        Returns:
            For each prompt a list of samples, each with the fields of `runtime.sampling.sampler.Sample`.
        """
        source = checkpoint or self.config.checkpoint.root
        return self._result("generate", checkpoint=source, prompts=list(prompts), request=request)

    def load(self, path: str, *, fresh_opt: bool = False) -> None:
        """Start a run without a checkpoint from this one, in any format; `fresh_opt` ignores its optimizer state."""
        self._load = {"tune_model_path": path, "fresh_opt": fresh_opt}

    def save(self, path: str, format: str = "native") -> None:
        """Write the newest checkpoint, with its optimizer state, to another path. This process copies it, tensor by
        tensor.

        Args:
            path: the parent folder of the new step_N (native), or the folder of the step (classic).
            format: "native" or "classic".

        Raises:
            UserError: there is no checkpoint, there is no such format, or `path` exists already.
        """
        from mesh_transformer.checkpoint.open import Checkpoint
        from mesh_transformer.runtime.convert import write_step

        source = Checkpoint.open(self.config.checkpoint.root).source(self.config.model)
        write_step(
            source,
            self.config.model,
            path,
            format=format,
            shards=self.config.mesh.tp,
            tokenizer=self.config.data.tokenizer,
        )

    def _result(self, name: str, **arguments: Any) -> Any:
        code, result = self.target.run(Job.of(name, self.config, **arguments), self.config)
        if code != 0:
            raise RunError(f"{name} was stopped by signal {code - 128}")
        if result is None:
            raise UserError(f"the job {name} returned no result")
        return result
