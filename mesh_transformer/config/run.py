"""The groups `data`, `checkpoint` and `logging`: what a run reads and where it writes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge
from pydantic import BeforeValidator, Field, Strict, model_validator

from mesh_transformer.errors import UserError
from mesh_transformer.fields import (
    Count,
    CountOrZero,
    Derived,
    Group,
    Name,
    OptionalText,
    Sequences,
    Steps,
    Switch,
    Text,
    Tokens,
    Unit,
    whole,
)


def _listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class DataConfig(Group):
    """What is read: training, validation, batches."""

    train_set: OptionalText = None
    """index file (one record file a line), .tfrecords or .txt file; a path, gs:// or a name under data/"""
    val_set: dict[Name, Name] = Field(default_factory=dict)
    """validation sets: name to file, as train_set; one file alone is called val"""
    per_replica_batch: Annotated[Sequences | None, Derived("1 if batch_size is absent too")] = None
    """sequences of a microbatch on each data-parallel replica"""
    batch_size: Sequences | None = None
    """sequences of a microbatch over the whole mesh (instead of per_replica_batch)"""
    seq: Annotated[Tokens | None, Derived("model.seq")] = None
    """training sequence length"""
    tokenizer: OptionalText = None
    """`bytes`, a folder with tokenizer files, or a hub name such as gpt2; for .txt files and samples"""
    shuffle: Switch = False
    """shuffle files and records; off: the order of the index and of its files"""
    shuffle_window: Annotated[Count, Unit("records")] = 16384
    """records held for shuffling"""
    batch_across_files: Switch = False
    """batches may span record files; off: what does not fill a batch at the end of a file is dropped, as the original"""
    restart: bool = False
    """a resumed run reads the training data from its beginning, not from where it stopped"""
    read_by: Literal["host", "driver"] = "host"
    """who reads train_set under train.py: each host its own share, or the driver, which streams it to them"""
    seed: CountOrZero = 0
    """seed of the shuffling"""
    val_batches: Annotated[int, Strict(), Ge(0), BeforeValidator(whole), Unit("batches")] = 100
    """batches of one validation of each set; 0: no validation"""
    val_batch_multiplier: Annotated[Count, Unit("microbatches")] = 1
    """microbatches that make one validation batch"""
    val_every: Steps = 500
    """steps between validations, and between runs of eval_harness_tasks"""
    eval_harness_tasks: Annotated[tuple[Name, ...], BeforeValidator(_listed)] = ()
    """lm-evaluation-harness tasks run every val_every steps; a task that cannot be loaded stops the run"""
    eval_harness_include: OptionalText = None
    """folder with further task files for eval_harness_tasks"""
    eval_harness_data: OptionalText = None
    """folder with LAMBADA and PIQA for eval_harness_tasks; absent: the Hugging Face hub"""
    eval_harness_limit: Annotated[Count | None, Unit("questions")] = None
    """ask only this many questions of each of eval_harness_tasks; absent: all"""

    @classmethod
    def derive(cls, values: dict[str, Any]) -> dict[str, Any]:
        """A validation file alone gets the name `val`; an entry that is null is dropped."""
        val_set = values.get("val_set")
        if isinstance(val_set, str):
            values["val_set"] = {"val": val_set} if val_set else {}
        if isinstance(val_set, dict):
            values["val_set"] = {name: file for name, file in val_set.items() if file is not None}
        return values

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        if self.per_replica_batch is not None and self.batch_size is not None:
            raise UserError(
                f"data.per_replica_batch {self.per_replica_batch} and data.batch_size {self.batch_size} are both set: "
                f"keep one (--set data.per_replica_batch=null or --set data.batch_size=null)"
            )
        return self


class CheckpointConfig(Group):
    """Where the run lives and what is kept."""

    bucket: Text = ""
    """Google Cloud Storage bucket, or bucket/folder; empty: model_dir is local"""
    model_dir: Name = "runs/model"
    """the run's folder: checkpoints, metrics, plots"""
    ckpt_every: Steps = 500
    """steps between checkpoints; the last step is always saved"""
    keep_every: Steps | None = None
    """checkpoints of steps that this divides are never deleted; absent: only the newest are kept"""
    keep_latest: Annotated[Count, Unit("checkpoints")] = 1
    """number of newest checkpoints kept, besides those of keep_every"""

    @model_validator(mode="after")
    def _check(self) -> CheckpointConfig:
        if "://" in self.bucket:
            raise UserError(
                f"checkpoint.bucket {self.bucket!r} must be a bucket's name without gs://, such as "
                f"{self.bucket.partition('://')[2].strip('/') or 'my-bucket'}"
            )
        if self.bucket and ("://" in self.model_dir or not self.model_dir.strip("/")):
            raise UserError(
                f"checkpoint.model_dir {self.model_dir!r} must be a folder inside checkpoint.bucket {self.bucket!r}: "
                f"write the folder alone, or leave the bucket empty (--set checkpoint.bucket=)"
            )
        return self

    @property
    def root(self) -> str:
        """The folder of the checkpoints: local, or gs://bucket/model_dir."""
        return f"gs://{self.bucket.strip('/')}/{self.model_dir.strip('/')}" if self.bucket else self.model_dir


class LoggingConfig(Group):
    """Names and sinks of the metrics."""

    name: OptionalText = None
    """name of the run"""
    comment: Text = ""
    """free text, kept with the run"""
    wandb_project: OptionalText = None
    """Weights & Biases project; absent: not used"""
    tensorboard: Switch = True
    """write TensorBoard event files into model_dir/tensorboard"""
