"""The flat JSON of the original mesh-transformer-jax, key for key, translated into groups."""

from __future__ import annotations

from typing import Any

# classic key -> (group, field). Keys that need more than a new name are handled in `to_grouped`.
RENAMED: dict[str, tuple[str, str]] = {
    **{key: ("model", key) for key in ("layers", "d_model", "n_heads", "d_head", "n_vocab", "norm", "pe", "pe_rotary_dims", "seq")},
    "cores_per_replica": ("mesh", "tp"),
    "tpu_size": ("mesh", "tpu_size"),
    **{
        key: ("optimizer", key)
        for key in (
            "gradient_accumulation_steps", "warmup_steps", "anneal_steps", "lr", "end_lr", "weight_decay",
            "total_steps", "noise_scale_alpha",
        )
    },
    **{
        key: ("data", key)
        for key in (
            "per_replica_batch", "train_set", "val_set", "val_batches", "val_batch_multiplier", "val_every",
            "eval_harness_tasks",
        )
    },
    **{key: ("checkpoint", key) for key in ("bucket", "model_dir", "ckpt_every", "keep_every")},
    **{key: ("logging", key) for key in ("name", "wandb_project", "comment")},
}  # fmt: skip
SWITCHES = ("early_cast", "early_collect", "bf16_optimizer")
KEYS = (*RENAMED, *SWITCHES)


def to_grouped(flat: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Translate a classic config whose keys are all known into the grouped spelling.

    `early_cast` needs no field: parameters are always cast to the compute dtype once a step.
    """
    grouped: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        if key in RENAMED and value is not None:
            group, field = RENAMED[key]
            grouped.setdefault(group, {})[field] = value
    if flat.get("early_collect"):
        grouped.setdefault("mesh", {})["gather_weights"] = "per_step"
    if flat.get("bf16_optimizer"):
        grouped.setdefault("optimizer", {})["moments_dtype"] = "bfloat16"
    return grouped
