"""The configuration's groups and fields. docs/config.md is generated from the descriptions below."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mesh_transformer.errors import UserError

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]

Norm = Literal["layernorm", "layernorm-nobias", "rmsnorm", "rmsnorm-bias", "scalenorm", "scalenorm-bias"]
Remat = Literal["auto", "none", "full", "save_attn", "save_matmuls"]


class Group(BaseModel):
    """A frozen group of fields that rejects names it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


class ModelConfig(Group):
    """The architecture and the precision it computes in."""

    family: Literal["gptj"] = Field("gptj", description="model family: a file in mesh_transformer/models")
    layers: Positive = Field(description="number of transformer layers")
    d_model: Positive = Field(description="width of the residual stream")
    n_heads: Positive = Field(description="attention heads; divisible by mesh.tp")
    d_head: Positive = Field(
        0, description="width of one head; d_model / n_heads if absent", validate_default=False
    )
    d_ff: Positive = Field(
        0, description="hidden width of the feed-forward; 4 * d_model if absent", validate_default=False
    )
    n_vocab: Positive = Field(
        description="rows of the vocabulary that take part in the softmax, samples and exports"
    )
    vocab_multiple: Positive = Field(
        128, description="tables are padded with dead rows up to this multiple, so that mesh.tp divides them"
    )
    seq: Positive = Field(2048, description="longest context, in tokens")
    pe: Literal["rotary", "fixed", "t5"] = Field(
        "rotary", description="position encoding: rotary (GPT-J), fixed (a learned table), t5 (relative bias)"
    )
    pe_rotary_dims: Positive = Field(
        64, description="first dims of each head that rotary turns; even, at most d_head"
    )
    norm: Norm = Field("layernorm", description="normalisation before each block and before the head")
    compute_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="dtype of the arithmetic; auto: bfloat16 on TPU and GPU, float32 on CPU"
    )
    remat: Remat = Field(
        "auto",
        description="what the backward pass recomputes: none; full (everything but the block's input); save_attn "
        "(keeps the attention output); save_matmuls (keeps attention output and feed-forward hidden); "
        "auto: none on CPU, full elsewhere",
    )
    scan_unroll: Positive = Field(
        1, description="layers unrolled per scan iteration; more is faster to run, slower to compile"
    )
    seed: NonNegative = Field(0, description="seed of the initial parameters; they do not depend on the mesh")

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, values: Any) -> Any:
        values = dict(values)
        d_model, n_heads = values.get("d_model"), values.get("n_heads")
        if isinstance(d_model, int) and isinstance(n_heads, int) and n_heads > 0:
            if values.get("d_head") is None and d_model % n_heads:
                raise UserError(
                    f"model.d_model {d_model} is not divisible by model.n_heads {n_heads}: "
                    f"change one of them or set model.d_head"
                )
            if values.get("d_head") is None:
                values["d_head"] = d_model // n_heads
            if values.get("d_ff") is None:
                values["d_ff"] = 4 * d_model
        return values

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if self.pe == "rotary" and (self.pe_rotary_dims > self.d_head or self.pe_rotary_dims % 2):
            raise UserError(
                f"model.pe_rotary_dims {self.pe_rotary_dims} must be even and at most model.d_head {self.d_head}: "
                f"set model.pe_rotary_dims to {self.d_head - self.d_head % 2} or less"
            )
        return self

    @property
    def padded_vocab(self) -> int:
        """Rows of the vocabulary tables: n_vocab rounded up to vocab_multiple, whatever the mesh."""
        return -(-self.n_vocab // self.vocab_multiple) * self.vocab_multiple


class MeshShape(NamedTuple):
    """Sizes of the mesh axes."""

    dp: int
    fsdp: int
    tp: int

    @property
    def replicas(self) -> int:
        """Shards of the batch: dp * fsdp."""
        return self.dp * self.fsdp


class MeshConfig(Group):
    """How the devices are laid out."""

    dp: Positive | None = Field(
        None, description="data-parallel replicas; the devices left over by fsdp and tp if absent"
    )
    fsdp: Positive = Field(1, description="data-parallel shards that also split weights and moments (ZeRO-3)")
    tp: Positive = Field(
        1,
        description="tensor parallelism (Megatron): heads, feed-forward and vocabulary are split; the classic cores_per_replica",
    )
    zero1: bool = Field(False, description="shard the Adam moments over dp too, weights replicated (ZeRO-1)")
    shard_activations: bool = Field(
        False,
        description="between blocks, split the activations' sequence dimension over tp (sequence parallelism)",
    )
    gather_weights: Literal["per_layer", "per_step"] = Field(
        "per_layer",
        description="when fsdp gathers the weights: layer by layer (least memory) or once a step (classic early_collect)",
    )
    tpu_size: Positive | None = Field(
        None, description="TPU cores that train.py asks the cloud for; sizes nothing elsewhere"
    )

    def shape(self, n_devices: int) -> MeshShape:
        """The mesh for `n_devices` devices.

        Raises:
            UserError: the axes do not multiply to the number of devices.
        """
        model = self.fsdp * self.tp
        if self.dp is None and (n_devices < model or n_devices % model):
            raise UserError(
                f"mesh.fsdp {self.fsdp} x mesh.tp {self.tp} needs a multiple of {model} devices, found {n_devices}: "
                + _way_out(self, n_devices)
            )
        dp = self.dp if self.dp is not None else n_devices // model
        if dp * model != n_devices:
            raise UserError(
                f"mesh.dp {dp} x mesh.fsdp {self.fsdp} x mesh.tp {self.tp} = {dp * model} devices, found {n_devices}: "
                f"leave mesh.dp out, or " + _way_out(self, n_devices)
            )
        return MeshShape(dp, self.fsdp, self.tp)


def _way_out(mesh: MeshConfig, n_devices: int) -> str:
    changes = [f"--set mesh.{axis}=1" for axis in ("fsdp", "tp") if getattr(mesh, axis) > 1]
    if mesh.dp is not None and mesh.dp > 1:
        changes.append("--set mesh.dp=1")
    return (" ".join(changes) or "use fewer devices") + (
        ""
        if n_devices > 1
        else " runs it on this one device (on a CPU, "
        "XLA_FLAGS=--xla_force_host_platform_device_count=8 makes eight)"
    )


class OptimizerConfig(Group):
    """Adam, its schedule and the loss."""

    lr: Annotated[float, Field(gt=0)] = Field(1.2e-4, description="peak learning rate")
    end_lr: Annotated[float, Field(ge=0)] = Field(1.2e-5, description="learning rate after annealing")
    warmup_steps: NonNegative = Field(3000, description="steps of linear warm-up from 0 to lr")
    anneal_steps: Positive = Field(
        300000, description="steps of cosine decay from lr to end_lr, after the warm-up"
    )
    total_steps: Positive = Field(350000, description="steps of the whole run")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.1, description="decoupled decay of matrices (not of biases and norms)"
    )
    gradient_accumulation_steps: Positive = Field(1, description="microbatches per step")
    clip_norm: Annotated[float, Field(gt=0)] = Field(
        1.0, description="largest global norm of the mean gradient"
    )
    b1: Fraction = Field(0.9, description="decay of Adam's first moment")
    b2: Fraction = Field(0.999, description="decay of Adam's second moment")
    eps: Annotated[float, Field(gt=0)] = Field(1e-8, description="Adam's epsilon")
    moments_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="dtype in which Adam's moments are stored (classic bf16_optimizer: bfloat16)"
    )
    z_loss: Annotated[float, Field(ge=0)] = Field(
        1e-4, description="weight of the squared log-normaliser in the training loss"
    )
    z_loss_kind: Literal["classic", "true"] = Field(
        "classic",
        description="classic: log-sum-exp after subtracting the maximum, as the original; true: log Z",
    )
    noise_scale_alpha: Annotated[float, Field(gt=0, le=1)] = Field(
        0.01, description="weight of the newest step in the gradient-noise-scale averages"
    )
    nonfinite: Literal["stop", "skip"] = Field(
        "stop",
        description="a step whose loss or gradient is not finite: stop the run, or skip its update and count it",
    )


class DataConfig(Group):
    """What is read: training, validation, batches."""

    train_set: str | None = Field(
        None,
        description="index file (one record file a line), .tfrecords or .txt file; a path, gs:// or a name under data/",
    )
    val_set: dict[str, str] = Field(
        default_factory=dict, description="validation sets: name to file, as train_set"
    )
    per_replica_batch: Positive | None = Field(
        None,
        description="sequences of one microbatch on each data-parallel replica; 1 if batch_size is absent too",
    )
    batch_size: Positive | None = Field(
        None, description="sequences of one microbatch over the whole mesh (instead of per_replica_batch)"
    )
    seq: Positive | None = Field(None, description="training sequence length in tokens; model.seq if absent")
    tokenizer: str | None = Field(
        None,
        description="`bytes`, a folder with tokenizer files, or a hub name such as gpt2; for .txt files and samples",
    )
    shuffle: bool = Field(False, description="shuffle files and records; off: index order and record order")
    shuffle_window: Positive = Field(16384, description="records held for shuffling")
    batch_across_files: bool = Field(
        False,
        description="batches may span record files; off: what does not fill a batch at the end of a file is dropped, as the original",
    )
    seed: NonNegative = Field(0, description="seed of the shuffling")
    val_batches: Positive = Field(100, description="batches of each validation set per validation")
    val_batch_multiplier: Positive = Field(1, description="validation batch, in training microbatches")
    val_every: Positive = Field(500, description="steps between validations")
    eval_harness_tasks: tuple[str, ...] = Field(
        (), description="lm-evaluation-harness tasks run with each validation"
    )

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, values: Any) -> Any:
        values = dict(values)
        if isinstance(values.get("val_set"), str):
            values["val_set"] = {"val": values["val_set"]}
        if values.get("val_set") is None:
            values.pop("val_set", None)
        return values

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        if self.per_replica_batch is not None and self.batch_size is not None:
            raise UserError(
                f"data.per_replica_batch {self.per_replica_batch} and data.batch_size {self.batch_size} "
                f"are both set: keep one"
            )
        return self


class CheckpointConfig(Group):
    """Where the run lives and what is kept."""

    bucket: str = Field("", description="Google Cloud Storage bucket; empty: model_dir is a local path")
    model_dir: str = Field("runs/model", description="the run's folder: checkpoints, metrics, plots")
    ckpt_every: Positive = Field(500, description="steps between checkpoints; the last step is always saved")
    keep_every: Positive | None = Field(
        None, description="checkpoints at multiples of this are never deleted; absent: only the latest stay"
    )
    keep_latest: Positive = Field(1, description="newest checkpoints kept besides those of keep_every")

    @property
    def root(self) -> str:
        """The folder of the checkpoints: local, or gs://bucket/model_dir."""
        return f"gs://{self.bucket}/{self.model_dir.strip('/')}" if self.bucket else self.model_dir


class LoggingConfig(Group):
    """Names and sinks of the metrics."""

    name: str | None = Field(None, description="name of the run")
    comment: str = Field("", description="free text, kept with the run")
    wandb_project: str | None = Field(None, description="Weights & Biases project; absent: not used")
    tensorboard: bool = Field(True, description="write TensorBoard event files into model_dir/tensorboard")


class Config(Group):
    """A whole run."""

    model: ModelConfig
    mesh: MeshConfig = Field(default_factory=lambda: MeshConfig())
    optimizer: OptimizerConfig = Field(default_factory=lambda: OptimizerConfig())
    data: DataConfig = Field(default_factory=lambda: DataConfig())
    checkpoint: CheckpointConfig = Field(default_factory=lambda: CheckpointConfig())
    logging: LoggingConfig = Field(default_factory=lambda: LoggingConfig())

    @model_validator(mode="after")
    def _check(self) -> Config:
        check_divides("model.n_heads", self.model.n_heads, "mesh.tp", self.mesh.tp)
        check_divides("model.d_ff", self.model.d_ff, "mesh.tp", self.mesh.tp)
        check_divides("model.d_model", self.model.d_model, "mesh.fsdp", self.mesh.fsdp)
        check_divides(
            "the padded vocabulary", self.model.padded_vocab, "mesh.tp", self.mesh.tp, "model.vocab_multiple"
        )
        if self.seq > self.model.seq:
            raise UserError(
                f"data.seq {self.seq} is over the model's limit model.seq {self.model.seq}: lower data.seq or raise model.seq"
            )
        if self.mesh.shard_activations:
            check_divides(
                "the sequence length", self.seq, "mesh.tp", self.mesh.tp, "mesh.shard_activations=false"
            )
        if self.data.batch_size is not None:
            check_divides(
                "data.batch_size",
                self.data.batch_size,
                "mesh.dp x mesh.fsdp",
                (self.mesh.dp or 1) * self.mesh.fsdp,
            )
        return self

    @property
    def seq(self) -> int:
        """Tokens of a training sequence."""
        return self.data.seq or self.model.seq

    def microbatch(self, shape: MeshShape) -> int:
        """Sequences of one microbatch over the whole mesh.

        Raises:
            UserError: data.batch_size does not divide over dp x fsdp.
        """
        if self.data.batch_size is None:
            return (self.data.per_replica_batch or 1) * shape.replicas
        check_divides("data.batch_size", self.data.batch_size, "mesh.dp x mesh.fsdp", shape.replicas)
        return self.data.batch_size

    def check_devices(self, n_devices: int) -> MeshShape:
        """The mesh shape for `n_devices`, after every check that depends on it.

        Raises:
            UserError: the axes, the batch or ZeRO-1 do not fit these devices.
        """
        shape = self.mesh.shape(n_devices)
        self.microbatch(shape)
        if self.mesh.zero1:
            check_divides(
                "model.d_model", self.model.d_model, "mesh.dp x mesh.fsdp", shape.replicas, "mesh.zero1=false"
            )
        return shape


def check_divides(what: str, value: int, by_what: str, by: int, also: str = "") -> None:
    """Refuse a size that its mesh axes do not divide, naming sizes that would do.

    Raises:
        UserError: `by` does not divide `value`.
    """
    if value % by:
        below, above = value // by * by, (value // by + 1) * by
        sizes = f"{below} or {above}" if below else f"{above}"
        raise UserError(
            f"{what} {value} is not divisible by {by_what} {by}: make it {sizes}, or change {by_what}"
            + (f" or set {also}" if also else "")
        )
