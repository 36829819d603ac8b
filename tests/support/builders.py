"""Small programs for tests."""

from typing import Any

import jax
import jax.numpy as jnp

from mesh_transformer.config import ComputeConfig, ModelConfig, parse_config
from mesh_transformer.models.head import Normalizer, TokenLoss
from mesh_transformer.models.model import Model
from mesh_transformer.models.placement import Placement
from mesh_transformer.train.step import TrainProgram

TINY: dict[str, Any] = {
    "model": {"layers": 3, "d_model": 64, "n_heads": 8, "n_vocab": 512, "seq": 40, "pe_rotary_dims": 4},
    "optimizer": {
        "warmup_steps": 2,
        "anneal_steps": 10,
        "lr": 1e-2,
        "total_steps": 12,
        "gradient_accumulation_steps": 2,
    },
    "data": {"batch_size": 8},
}


def program(
    raw: dict[str, Any], *overrides: str, devices: int = 1, remat: str = "none", dtype: str = "float32"
) -> TrainProgram:
    """The compiled-on-first-use functions of a config on the first `devices` CPU devices."""
    config = parse_config(raw, overrides)
    config.check_devices(devices)
    compute = config.compute.model_copy(update={"dtype": dtype, "remat": remat})
    resolved = config.model_copy(update={"compute": compute})
    return TrainProgram(Placement.of(resolved, jax.devices()[:devices]), config)


def float32_model(config: ModelConfig) -> Model:
    """The model alone, computed in float32."""
    return Model(config.decoder(), ComputeConfig(dtype="float32", remat="none"))


def token_loss(logits_BTV: jax.Array, targets_BT: jax.Array) -> TokenLoss:
    """Softmax cross-entropy of float32 logits; rows at -inf take no part."""
    normalizer, _ = Normalizer.empty(targets_BT.shape).add(logits_BTV)
    return normalizer.token_loss(jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0])
