"""The group `optimizer`: Adam, its schedule and the loss."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Le
from pydantic import Field

from mesh_transformer.fields import (
    Count,
    Fraction,
    Group,
    NonNegative,
    Positive,
    Steps,
    Unit,
)


class OptimizerConfig(Group):
    """Adam, its schedule and the loss."""

    lr: Positive = Field(1.2e-4, description="peak learning rate")
    end_lr: NonNegative = Field(1.2e-5, description="learning rate after annealing")
    # numbers of a formula, not counts: the original's files have fractions here
    warmup_steps: Annotated[NonNegative, Unit("steps")] = Field(
        3000.0, description="linear warm-up from 0 to lr"
    )
    anneal_steps: Annotated[Positive, Unit("steps")] = Field(
        300000.0, description="cosine decay from lr to end_lr, after the warm-up"
    )
    total_steps: Steps = Field(350000, description="length of the whole run")
    weight_decay: NonNegative = Field(
        0.1, description="decoupled decay of matrices (not of biases and norms)"
    )
    gradient_accumulation_steps: Annotated[Count, Unit("microbatches")] = Field(
        1, description="microbatches whose gradients make one step"
    )
    clip_norm: Positive = Field(1.0, description="largest global norm of the mean gradient")
    b1: Fraction = Field(0.9, description="decay of Adam's first moment")
    b2: Fraction = Field(0.999, description="decay of Adam's second moment")
    eps: Positive = Field(1e-8, description="Adam's epsilon")
    moments_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="dtype in which Adam's moments are stored (classic bf16_optimizer: bfloat16)"
    )
    z_loss: NonNegative = Field(1e-4, description="weight of the squared log-normaliser in the training loss")
    z_loss_kind: Literal["classic", "log_z"] = Field(
        "classic",
        description="classic: log-sum-exp after subtracting the maximum, as the original; log_z: the true normaliser",
    )
    noise_scale_alpha: Annotated[Positive, Le(1)] = Field(
        0.01, description="weight of the newest step in the gradient-noise-scale averages"
    )
    nonfinite: Literal["stop", "skip"] = Field(
        "stop",
        description="a step whose loss or gradient is not finite: stop the run, or skip its update and count it",
    )
