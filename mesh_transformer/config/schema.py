"""The whole configuration: its groups, and the checks that span them. The group `mesh` is in mesh.py."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge
from pydantic import BeforeValidator, Field, Strict, model_validator

from mesh_transformer.config.mesh import MeshConfig, MeshShape, check_sizes, mesh_shape, parts, training_rules
from mesh_transformer.config.variants import Variants
from mesh_transformer.errors import UserError
from mesh_transformer.families import FAMILIES
from mesh_transformer.families.base import ModelConfig
from mesh_transformer.fields import (
    Count,
    CountOrZero,
    Derived,
    Group,
    Layers,
    Mebibytes,
    Name,
    OptionalText,
    Positive,
    Sequences,
    Size,
    Steps,
    Switch,
    Text,
    Tokens,
    Unit,
    marks,
    whole,
)
from mesh_transformer.optimizers import OPTIMIZERS, OptimizerConfig, adam

BYTES_VOCAB = 257  # the `bytes` tokenizer: every byte, and the end of a text
Seconds = Annotated[Positive, Unit("seconds")]


def _listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class ComputeConfig(Group):
    """Precision, memory and compile time of the computation."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of the arithmetic; auto: bfloat16 on TPU and GPU, float32 on CPU"""
    remat: Literal["auto", "none", "full", "save_attn", "save_matmuls"] = "auto"
    """what the backward pass recomputes: none; full (everything but the block's input); save_attn (keeps the attention
    output); save_matmuls (keeps attention output and feed-forward hidden); auto: none on CPU, full elsewhere"""
    scan_unroll: Layers = 1
    """layers unrolled per scan iteration; more runs faster and compiles slower"""
    logits_mib: Literal["auto"] | Mebibytes = "auto"
    """float32 logits that a device holds at a time in training and validation, in MiB: the head and the loss run over
    the positions in that many parts; auto: 128 on CPU, 1024 elsewhere"""


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
    def _check(self) -> Self:
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
    def _check(self) -> Self:
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


class ClusterConfig(Group):
    """How train.py watches its workers. Without a driver these mean nothing."""

    step_limit: Seconds = 20.0
    """a step that takes this much longer than the slowest recent one is a hang; so is any other phase without work for this
    long. Each hang doubles it until the run has passed that step"""
    phase_limit: Seconds = 3600.0
    """a start, a compilation, a wait for data, a validation or a save that takes longer is a hang, even if work is done
    meanwhile"""
    max_crashes: Annotated[CountOrZero, Unit("crashes")] = 5
    """crashes in a row without a newer checkpoint after which the driver still starts the workers again"""
    driver_timeout: Seconds = 20.0
    """workers that hear nothing from a driver for this long save and wait for one"""
    driver_wait: Annotated[Count, Unit("seconds")] = 3600
    """how long they wait for a driver, the same command, before they end"""


class Config(Group):
    """A whole run."""

    model: Annotated[ModelConfig, Variants("family", FAMILIES)]
    mesh: MeshConfig = MeshConfig()
    compute: ComputeConfig = ComputeConfig()
    optimizer: Annotated[OptimizerConfig, Variants("name", OPTIMIZERS)] = adam.Config()
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_sizes(self.sizes, self.mesh, mesh_shape(**self.mesh.given))
        if self.seq > self.model.seq:
            raise UserError(
                f"data.seq {self.seq} is over the model's limit model.seq {self.model.seq}: "
                f"lower data.seq or raise model.seq"
            )
        if self.data.tokenizer == "bytes" and self.model.n_vocab < BYTES_VOCAB:
            raise UserError(
                f"model.n_vocab {self.model.n_vocab} is under the {BYTES_VOCAB} tokens of data.tokenizer bytes: "
                f"set model.n_vocab to {BYTES_VOCAB} or more"
            )
        return self

    @property
    def seq(self) -> int:
        """Tokens of a training sequence."""
        return self.data.seq or self.model.seq

    @property
    def sizes(self) -> dict[str, list[Size]]:
        """The named dimensions, with the fields that give their sizes."""
        batch, seq = self.data.batch_size, [Size("data.seq", self.seq)]
        batches = [Size("data.batch_size", batch)] if batch else []
        return {"batch": batches, "seq": seq, "block_seq": seq, **self.model.decoder().sizes}

    def microbatch(self, shape: MeshShape) -> int:
        """Sequences of one microbatch over the whole mesh.

        Raises:
            UserError: the axes that split the batch do not divide data.batch_size.
        """
        check_sizes({"batch": self.sizes["batch"]}, self.mesh, shape)
        replicas = parts(shape, training_rules(self.mesh), "batch")
        return self.data.batch_size or (self.data.per_replica_batch or 1) * replicas

    def check_devices(self, n_devices: int) -> MeshShape:
        """The mesh shape for `n_devices`, after every check that depends on it.

        Raises:
            UserError: the axes do not fit these devices, or do not divide a size.
        """
        shape = self.mesh.shape(n_devices)
        check_sizes(self.sizes, self.mesh, shape)
        return shape


VARIANTS = marks(Config, Variants)
"""The groups whose class one of their fields chooses."""

GROUPS: dict[str, Any] = {
    name: VARIANTS[name].merged if name in VARIANTS else field.annotation
    for name, field in Config.model_fields.items()
}
"""Every group, a subclass of `Group` with all fields that may stand in it."""


def class_at(place: Sequence[str]) -> tuple[type[Group], list[str]]:
    """The class of the group that a validation error is in, and the place inside it: pydantic names the variant too."""
    group, *inside = place
    if group not in VARIANTS:
        return GROUPS[group], inside
    variant, *inside = inside or [VARIANTS[group].chosen({})]
    return VARIANTS[group].classes[variant], inside
