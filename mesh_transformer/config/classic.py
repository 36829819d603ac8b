"""Translates the flat JSON config of the original mesh-transformer-jax into groups, with the meaning of its values
there.

Version 1 of the original's model rotated `x[..., :pe_rotary_dims]` of each head. A head had d_model / n_heads dims,
whatever `d_head` was. `bucket` and `model_dir` were only parts of a path. The trainer never read some of the keys.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

from mesh_transformer.config.describe import short
from mesh_transformer.config.schema import CheckpointConfig
from mesh_transformer.errors import UserError, set_options
from mesh_transformer.fields import size

Values = dict[str, Any]
Grouped = dict[str, Values]
DEFAULT_FOLDER = CheckpointConfig.model_fields["model_dir"].default

# classic key -> (group, field). Keys whose values change too are in SWITCHES.
RENAMED: dict[str, tuple[str, str]] = {"cores_per_replica": ("mesh", "tp")} | {
    key: (group, key)
    for group, keys in {
        "model": "layers d_model n_heads d_head n_vocab norm pe pe_rotary_dims seq",
        "mesh": "tpu_size",
        "optimizer": "gradient_accumulation_steps warmup_steps anneal_steps lr end_lr weight_decay total_steps "
        "noise_scale_alpha",
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


def place(grouped: Grouped, key: str, value: Any) -> None:
    """Write the value of a known classic key into a config in the grouped spelling.

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


def to_grouped(flat: dict[str, Any]) -> Grouped:
    """Translate a classic config whose keys are all known into the grouped spelling."""
    grouped: Grouped = {}
    for key, value in flat.items():
        place(grouped, key, value)
    return grouped


def interpret(grouped: Grouped, overridden: Callable[[str, str], bool], *, has_model: bool = True) -> list[str]:
    """Replace the values of a classic file, in place, by what they meant to the original.

    Args:
        grouped: the file in the grouped spelling, after the overrides.
        overridden: whether the command line sets (group, field); such a value does not change.
        has_model: whether the file has the model. Otherwise a checkpoint tells it.

    Returns:
        A sentence for each value that is not used as written.
    """
    groups = ("model", "checkpoint", "data", "mesh", "logging")
    model, checkpoint, data, mesh, logging = (grouped.setdefault(group, {}) for group in groups)
    # no two groups share the name of a field that is used below
    given = {
        field: value for group in groups for field, value in grouped[group].items() if not overridden(group, field)
    }
    notes = [*_width_of_head(model, given)] if has_model else []
    # the command line may choose another family, which lacks these fields
    if has_model and model.get("family") in (None, "gptj"):
        notes += [*_position_encoding(model, given), *_norm(model, mesh, given)]
    notes += [*_run_folder(checkpoint, given), *_tasks(data, given)]
    cores, comment = given.get("tpu_size"), given.get("comment")
    if cores is not None and not size(cores):
        del mesh["tpu_size"]
        notes.append(f"tpu_size {short(cores)} is not a number of cores and is ignored")
    if comment is not None:
        text = comment if isinstance(comment, str) else json.dumps(comment)
        logging["comment"] = "".join(c if c.isprintable() or c in "\n\t" else " " for c in text)
    return notes


def _head(model: Values) -> int | None:
    """Dims of a head, if they are a whole number."""
    d_model, n_heads = size(model.get("d_model")), size(model.get("n_heads"))
    if d_head := size(model.get("d_head")):
        return d_head
    return d_model // n_heads if d_model and n_heads and d_model % n_heads == 0 else None


def _width_of_head(model: Values, given: Values) -> Iterator[str]:
    if (d_head := given.get("d_head")) is None:
        return
    del model["d_head"]
    if (head := _head(model)) and head != d_head:
        yield f"d_head {short(d_head)} is ignored, as in the original: a head has d_model / n_heads = {head} dims"


def _position_encoding(model: Values, given: Values) -> Iterator[str]:
    if model.get("pe") is None:
        # before the key pe the original had only the relative bias; pe_rotary_dims came after pe
        if model.get("pe_rotary_dims") is None:
            model["pe"] = "t5"
            change = set_options("model.pe=rotary")
            yield f"pe is not given: t5 is used, as in the original before this key ({change} changes it)"
        else:
            model["pe"] = "rotary"
            yield "pe is not given: rotary is used, because pe_rotary_dims is given"
    dims, head = given.get("pe_rotary_dims"), _head(model)
    if dims is None or not head:
        return
    if model["pe"] != "rotary":
        del model["pe_rotary_dims"]
    elif size(dims) and dims > head:
        model["pe_rotary_dims"] = head
        yield (
            f"pe_rotary_dims {short(dims)} exceeds the {head} dims of a head: the whole head is rotated, as in the "
            "original"
        )


def _norm(model: Values, mesh: Values, given: Values) -> Iterator[str]:
    # the number of shards in the file, not on the command line
    one_shard = mesh.get("tp") in (None, 1) and ("tp" in given or "tp" not in mesh)
    if given.get("norm") == "layernorm-desync" and one_shard:
        model["norm"] = "layernorm"
        yield "norm layernorm-desync is layernorm on one shard: layernorm is used"
    if model.get("norm") is None:
        model["norm"] = "layernorm"
        change = set_options("model.norm=rmsnorm")
        yield f"norm is not given: layernorm is used ({change} changes it)"


def _run_folder(checkpoint: Values, given: Values) -> Iterator[str]:
    bucket, folder = given.get("bucket"), given.get("model_dir")
    if isinstance(bucket, str) and bucket.startswith("gs://"):
        checkpoint["bucket"] = bucket.removeprefix("gs://")
        yield f"bucket {short(bucket)} is read as {checkpoint['bucket']}"
    if isinstance(folder, str) and folder.startswith("gs://") and checkpoint.get("bucket"):
        checkpoint["bucket"], _, checkpoint["model_dir"] = folder.removeprefix("gs://").partition("/")
        yield f"model_dir {short(folder)} is a whole path: bucket {short(bucket)} is ignored"
    elif isinstance(folder, str) and checkpoint.get("bucket"):
        # the local copy uses this folder too
        checkpoint["model_dir"] = folder.strip("/")
    if isinstance(folder, str) and not checkpoint["model_dir"].strip("/ "):
        # never the bucket itself: --new empties the run's folder
        del checkpoint["model_dir"]
        yield f"model_dir {short(folder)} names no folder: the default, {DEFAULT_FOLDER}, is used"


def _tasks(data: Values, given: Values) -> Iterator[str]:
    tasks = given.get("eval_harness_tasks")
    if isinstance(tasks, (dict, str)):
        del data["eval_harness_tasks"]
        if tasks:
            yield f"eval_harness_tasks {short(tasks)} is not a list of names: no tasks run"
    elif isinstance(tasks, list) and "" in tasks:
        data["eval_harness_tasks"] = [task for task in tasks if task != ""]
        yield f"eval_harness_tasks {short(tasks)}: the empty name is ignored"
