"""The whole config: its groups and the checks across them. The group `mesh` is in mesh.py."""

import functools
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from annotated_types import Le
from pydantic import Field, model_validator

from mesh_transformer.config.data import DataConfig
from mesh_transformer.config.lora import LoraConfig, with_adapters
from mesh_transformer.config.mesh import (
    MeshConfig,
    MeshShape,
    check_context,
    check_overlap,
    check_pipeline,
    check_sizes,
    check_stages,
    mesh_shape,
    parts,
    training_rules,
)
from mesh_transformer.config.variants import Variants
from mesh_transformer.errors import UserError, set_options
from mesh_transformer.families import FAMILIES
from mesh_transformer.families.base import ModelConfig
from mesh_transformer.fields import (
    ConfigGroup,
    Count,
    CountOrZero,
    Derived,
    Layers,
    Mebibytes,
    Name,
    NonNegative,
    OptionalText,
    Positive,
    Prompts,
    Size,
    StepRange,
    Steps,
    Switch,
    Text,
    Tokens,
    Unit,
    marks,
)
from mesh_transformer.optimizers import OPTIMIZERS, OptimizerConfig, adam
from mesh_transformer.spec import Decoder

# the `bytes` tokenizer: 256 bytes, and the end of a text
BYTES_VOCAB = 257
Seconds = Annotated[Positive, Unit("seconds")]


class ComputeConfig(ConfigGroup):
    """Precision, memory and compile time of the computation."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of the arithmetic; auto: bfloat16 on TPU and GPU, float32 on CPU"""
    remat: Literal["auto", "none", "full", "save_attn", "save_matmuls"] = "auto"
    """what the backward pass recomputes: none; full (keeps only the input of each block); save_attn (also keeps the
    attention output); save_matmuls (also keeps the attention output and the hidden values of the feed-forward); auto:
    none on CPU, full elsewhere"""
    attention: Literal["auto", "plain", "splash", "cudnn"] = "auto"
    """the kernel that computes attention in training and validation. splash: JAX's kernel for TPU v4 and later.
    cudnn: cuDNN's, for GPUs of compute capability 8.0 and later. plain: no kernel. auto: splash or cudnn where it can
    compute the model's attention, else plain. A kernel never writes logits to memory"""
    scan_unroll: Layers = 1
    """layers per scan iteration; a larger number runs faster and compiles slower"""
    logits_mib: Literal["auto"] | Mebibytes = "auto"
    """memory for float32 logits on each device in training and validation; the head and the loss run over chunks of
    the positions whose logits fit in it; auto: 128 on CPU, 1024 elsewhere"""
    # not in the repr: eval_harness.py --cache finds the answers of a model by the repr of its fields
    memory_check: Switch = Field(True, repr=False)
    """refuse a model whose parameters, optimizer state and gradients, or cache, do not fit the memory of a device,
    before they are allocated; false: go on"""


class ExpertsConfig(ConfigGroup):
    """Routed experts in training. A model without experts refuses values other than the defaults."""

    exchange: Literal["tokens", "gather"] = "tokens"
    """how tokens reach experts on other devices of mesh.ep. tokens: each token is sent to the devices of its experts.
    gather: each device gathers all tokens of its mesh.ep group, which sends less if a token chooses more experts than
    mesh.ep has devices"""
    capacity_factor: Positive | None = None
    """each device computes at most this many times the mean number of its tokens for each expert, and drops the rest,
    later choices first; metrics count them. Absent: no token is dropped, and validation drops none"""
    balance_loss: NonNegative = 0.01
    """weight of the balance loss (Switch, arXiv:2101.03961): for each layer, experts x the sum over experts of the
    share of choices x the mean probability, 1 if even; the mean over layers. To compute the loss of transformers, set
    it to router_aux_loss_coef x model.experts_per_token"""
    z_loss: NonNegative = 0.001
    """weight of the router's z-loss (ST-MoE, arXiv:2202.08906): the mean of the squared log-sum-exp of a router's
    logits; the mean over layers"""
    bias_rate: NonNegative = 0.001
    """for routers with a bias (DeepSeek-V3, arXiv:2412.19437): after each step, the bias of an expert with fewer tokens
    than the mean rises by this number, and the bias of an expert with more tokens falls by it. 0: the biases stay"""


class CheckpointConfig(ConfigGroup):
    """Where the run is stored, and which checkpoints are kept."""

    bucket: Text = ""
    """Google Cloud Storage bucket, or bucket/folder; empty: model_dir is local"""
    model_dir: Name = "runs/model"
    """the run's folder: checkpoints, metrics, plots"""
    ckpt_every: Steps = 500
    """steps between checkpoints; the last step is always saved"""
    keep_every: Steps | None = None
    """keep the checkpoint of every step that this number divides; absent: keep only the newest ones"""
    keep_latest: Annotated[Count, Unit("checkpoints")] = 2
    """number of newest checkpoints to keep, in addition to the checkpoints that keep_every keeps. With 1, a damaged
    checkpoint has none before it"""

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
                f"write the folder alone, or leave the bucket empty ({set_options('checkpoint.bucket=')})"
            )
        return self

    @property
    def root(self) -> str:
        """The folder of the checkpoints: local, or gs://bucket/model_dir."""
        return f"gs://{self.bucket.strip('/')}/{self.model_dir.strip('/')}" if self.bucket else self.model_dir


class LoggingConfig(ConfigGroup):
    """Names and sinks of the metrics."""

    name: OptionalText = None
    """name of the run"""
    comment: Text = ""
    """free text, stored with the run"""
    wandb_project: OptionalText = None
    """Weights & Biases project; absent: do not log there"""
    tensorboard: Switch = True
    """write TensorBoard event files into model_dir/tensorboard"""
    plot: Switch = True
    """plot the losses to model_dir/loss.png during the run and at its end; with routed experts also their load to
    model_dir/experts.png"""
    sample_prompts: Prompts = ()
    """prompts that the run completes with its own weights; a list of messages is a prompt by the chat template of the
    tokenizer"""
    sample_every: Annotated[Steps | None, Derived("data.val_every")] = None
    """steps between samples of sample_prompts; the last step has samples too, and a fine-tuning begins with some"""
    sample_tokens: Tokens = 64
    """largest number of new tokens of a sample"""
    sample_temperature: Annotated[NonNegative, Le(1_000_000)] = 0.0
    """temperature of the samples; 0: the most likely token"""
    profile_steps: StepRange | None = None
    """first and last step of a trace for TensorBoard and Perfetto, which is written into model_dir/profile"""
    op_table: Switch = False
    """write a table of the compiled step's operations, with estimated times on a TPU or a GPU, to
    model_dir/profile/op_table.tsv"""


class ClusterConfig(ConfigGroup):
    """How `mesh-transformer drive` watches its workers. These fields have no effect without a driver."""

    step_limit: Seconds = 20.0
    """seconds by which a step may exceed the slowest recent step before it counts as hung; also the longest silence in
    any other phase. Each hang doubles it until the run has passed that step"""
    phase_limit: Seconds = 3600.0
    """seconds after which a start, a compilation, a wait for data, a validation or a save counts as hung, even while it
    makes progress"""
    max_crashes: Annotated[CountOrZero, Unit("crashes")] = 5
    """crashes in a row without a newer checkpoint after which the driver still restarts the workers; the next ends the
    run"""
    driver_timeout: Seconds = 20.0
    """seconds without contact from a driver after which workers save and wait for a new one"""
    driver_wait: Annotated[Count, Unit("seconds")] = 3600
    """seconds that workers wait for a new driver (the same command) before they exit"""


class Config(ConfigGroup):
    """A whole run."""

    model: Annotated[ModelConfig, Variants("family", FAMILIES)]
    mesh: MeshConfig = MeshConfig()
    compute: ComputeConfig = ComputeConfig()
    experts: ExpertsConfig = ExpertsConfig()
    lora: LoraConfig = LoraConfig()
    optimizer: Annotated[OptimizerConfig, Variants("name", OPTIMIZERS)] = adam.AdamConfig()
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_experts()
        self._check_mesh(mesh_shape(**self.mesh.given))
        if self.seq > self.model.seq:
            raise UserError(
                f"data.seq {self.seq} exceeds model.seq {self.model.seq}: lower data.seq "
                f"({set_options(f'data.seq={self.model.seq}')}), or raise model.seq"
            )
        if self.data.tokenizer == "bytes" and self.model.n_vocab < BYTES_VOCAB:
            raise UserError(
                f"model.n_vocab {self.model.n_vocab} is less than the {BYTES_VOCAB} tokens of data.tokenizer bytes: "
                f"set model.n_vocab to this or more ({set_options(f'model.n_vocab={BYTES_VOCAB}')})"
            )
        return self

    @property
    def seq(self) -> int:
        """Length of a training sequence, tokens."""
        return self.data.seq or self.model.seq

    @property
    def decoder(self) -> Decoder:
        """The decoder that the config describes, with its adapters."""
        return _decoder(self.model, self.lora)

    @property
    def sizes(self) -> dict[str, list[Size]]:
        """The sizes of the named dimensions, with the fields that set them."""
        batch, seq = self.data.batch_size, [Size("data.seq", self.seq)]
        batches = [Size("data.batch_size", batch)] if batch else []
        return {"batch": batches, "seq": seq, "block_seq": seq, **self.decoder.sizes}

    def microbatch(self, shape: MeshShape) -> int:
        """Sequences of a microbatch on the whole mesh.

        Raises:
            UserError: the axes that split the batch do not divide data.batch_size.
        """
        check_sizes({"batch": self.sizes["batch"]}, self.mesh, shape)
        replicas = parts(shape, training_rules(self.mesh), "batch")
        return self.data.batch_size or (self.data.per_replica_batch or 1) * replicas

    def check_devices(self, n_devices: int) -> MeshShape:
        """The mesh shape for `n_devices`, after all checks that depend on it.

        Raises:
            UserError: the axes do not fit these devices, or do not divide a size.
        """
        shape = self.mesh.shape(n_devices)
        self._check_mesh(shape)
        return shape

    def _check_experts(self) -> None:
        defaults = ExpertsConfig()
        # most configs: a decoder need not be made
        if self.experts == defaults and self.mesh.ep == 1:
            return
        experts = self.decoder.experts
        if experts is not None:
            rate = self.experts.bias_rate
            # 0 is what a router without biases does
            if not experts.router.bias and rate not in (0, defaults.bias_rate):
                raise UserError(
                    f"experts.bias_rate {rate} has no effect: the routers of model.family {self.model.family} have no "
                    "biases: remove it"
                )
            return
        for name, value in self.experts:
            if value != getattr(defaults, name):
                raise UserError(
                    f"experts.{name} {value} has no effect: model.family {self.model.family} has no experts: remove it"
                )
        if self.mesh.ep > 1:
            raise UserError(
                f"mesh.ep {self.mesh.ep} splits experts, and model.family {self.model.family} has none: set mesh.ep=1 "
                "and use mesh.dp or mesh.fsdp"
            )

    def _check_mesh(self, shape: MeshShape) -> None:
        decoder = self.decoder
        check_stages(decoder, self.mesh, shape)
        check_sizes(self.sizes, self.mesh, shape)
        check_context(self.sizes, self.mesh, shape)
        check_overlap(self.mesh, shape)
        check_pipeline(self.sizes, self.mesh, shape, self.optimizer.gradient_accumulation_steps)
        if shape["pp"] > 1 and self.compute.remat not in ("auto", "full"):
            raise UserError(
                f"compute.remat {self.compute.remat} does not work with mesh.pp {shape['pp']}, which keeps the input "
                "of each block and recomputes the rest: set compute.remat=full, or mesh.pp=1"
            )


# a search makes hundreds of configs of one model
@functools.lru_cache(maxsize=8)
def _decoder(model: ModelConfig, lora: LoraConfig) -> Decoder:
    return with_adapters(model.decoder(), lora, model)


VARIANTS = marks(Config, Variants)
"""The groups whose class one of their fields selects."""

GROUPS: dict[str, Any] = {
    name: VARIANTS[name].merged if name in VARIANTS else field.annotation for name, field in Config.model_fields.items()
}
"""Every group: a subclass of `ConfigGroup` with all fields that it may have."""


def class_at(place: Sequence[str]) -> tuple[type[ConfigGroup], list[str]]:
    """The class of the group of a validation error, and the path inside it. pydantic puts the variant into the path."""
    group, *inside = place
    if group not in VARIANTS:
        return GROUPS[group], inside
    variant, *inside = inside or [VARIANTS[group].chosen({})]
    return VARIANTS[group].classes[variant], inside
