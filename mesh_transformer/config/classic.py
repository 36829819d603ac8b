"""The flat JSON of the original mesh-transformer-jax, key for key, translated into groups."""

from typing import Any

from mesh_transformer.config.describe import short
from mesh_transformer.errors import UserError

# classic key -> (group, field). Keys that need more than a new name are SWITCHES.
RENAMED: dict[str, tuple[str, str]] = {"cores_per_replica": ("mesh", "tp")} | {
    key: (group, key)
    for group, keys in {
        "model": "layers d_model n_heads d_head n_vocab norm pe pe_rotary_dims seq",
        "mesh": "tpu_size",
        "optimizer": "gradient_accumulation_steps warmup_steps anneal_steps lr end_lr weight_decay total_steps noise_scale_alpha",
        "data": "per_replica_batch train_set val_set val_batches val_batch_multiplier val_every eval_harness_tasks",
        "checkpoint": "bucket model_dir ckpt_every keep_every",
        "logging": "name wandb_project comment",
    }.items()
    for key in keys.split()
}

# classic switch -> (group, field, value when off, value when on). `early_cast` needs no field: parameters
# are always cast to the compute dtype once a step.
SWITCHES: dict[str, tuple[str, str, str, str] | None] = {
    "early_cast": None,
    "early_collect": ("mesh", "gather_weights", "per_layer", "per_step"),
    "bf16_optimizer": ("optimizer", "moments_dtype", "float32", "bfloat16"),
}
KEYS = (*RENAMED, *SWITCHES)

CLASSIC_KEY: dict[tuple[str, str], str] = {place: key for key, place in RENAMED.items()} | {
    switch[:2]: key for key, switch in SWITCHES.items() if switch
}


def place(grouped: dict[str, dict[str, Any]], key: str, value: Any) -> None:
    """Write the value of one known classic key where the grouped spelling has it.

    Raises:
        UserError: a switch is neither true nor false.
    """
    if key in RENAMED:
        group, field = RENAMED[key]
        grouped.setdefault(group, {})[field] = value
        return
    if value not in (True, False, None):
        raise UserError(f"{key} = {short(value)}: expected true or false")
    if switch := SWITCHES[key]:
        group, field, off, on = switch
        grouped.setdefault(group, {})[field] = None if value is None else on if value else off


def to_grouped(flat: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Translate a classic config whose keys are all known into the grouped spelling."""
    grouped: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        place(grouped, key, value)
    return grouped
