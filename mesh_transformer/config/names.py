"""Names of fields in both spellings, and messages for unknown names."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from mesh_transformer.config import classic
from mesh_transformer.config.schema import GROUPS, VARIANTS
from mesh_transformer.errors import UserError, options_to_add

Fields = Mapping[str, tuple[str, ...]]
"""The names of the fields of each group."""
FIELDS: Fields = {name: tuple(group.model_fields) for name, group in GROUPS.items()}
SHOWN_CHARS = 60
SHOWN_KEYS = 8
SHOWN_HINT = 600
# bounds the work: each unknown key is compared with every known name
MAX_KEYS = 1000
# difflib's ratio for a suggestion: one letter of four may be wrong, or two of a longer name
NEAR = 0.75
UNKNOWN = "not a field of this program"
# other names that --set accepts for a field
OTHER_NAMES = {"dropout": ("optimizer", "dropout"), **classic.RENAMED, "model.scan_unroll": ("compute", "scan_unroll")}
# the fields with named entries
_ENTRIES = {"data.val_set": "data.val_set.NAME=FILE", "data.train_set": "data.train_set.NAME.FIELD=VALUE"}
# What other programs call our fields. Messages suggest the field; the name itself is refused.
_ALIASES_OF = {
    "model.layers": "n_layer n_layers num_layers num_hidden_layers transformer_layers depth",
    "model.d_model": "n_embd hidden_size embed_dim d_embed dim width hidden_dim",
    "model.n_heads": "n_head num_heads num_attention_heads heads",
    "model.d_head": "head_dim head_size d_kv",
    "model.d_ff": "n_inner intermediate_size ffn_dim mlp_dim",
    "model.n_experts": "num_experts num_local_experts n_routed_experts moe_num_experts",
    "model.experts_per_token": "num_experts_per_tok top_k moe_top_k moe_router_topk",
    "model.expert_d_ff": "moe_intermediate_size moe_ffn_hidden_size",
    "model.q_rank": "q_lora_rank",
    "model.kv_rank": "kv_lora_rank",
    "model.nope_dims": "qk_nope_head_dim",
    "model.rotary_dims": "qk_rope_head_dim",
    "model.v_dims": "v_head_dim",
    "model.n_vocab": "vocab vocab_size n_tokens",
    "model.seq": "context context_length context_size ctx n_ctx n_positions max_position_embeddings "
    "block_size seq_len seq_length sequence_length max_seq_len max_seq_length max_length",
    "model.pe": "position_encoding positional_encoding position_embedding",
    "model.pe_rotary_dims": "rotary_dim rotary_dims rotary_ndims",
    "model.norm": "norm_type normalization",
    "compute.dtype": "dtype precision torch_dtype compute_dtype",
    "compute.attention": "attn_implementation flash_attention use_flash_attention attention_kernel",
    "compute.remat": "gradient_checkpointing activation_checkpointing checkpoint_activations",
    "mesh.tp": "mp model_parallel tensor_parallel tp_size mp_size",
    "mesh.cp": "context_parallel context_parallel_size cp_size sequence_parallel sp ring_degree",
    "mesh.dp": "data_parallel dp_size",
    "lora.rank": "lora_r lora_rank lora_dim adapter_rank load_in_4bit load_in_8bit use_lora",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.targets": "target_modules lora_targets lora_target_modules",
    "optimizer.name": "optim optimizer_name optimizer_type optim_type",
    "optimizer.lr": "learning_rate max_lr peak_lr lr_max",
    "optimizer.end_lr": "min_lr final_lr lr_min",
    "optimizer.warmup_steps": "warmup warmup_iters num_warmup_steps",
    "optimizer.schedule": "lr_schedule lr_schedule_type lr_scheduler lr_scheduler_type lr_decay_style scheduler",
    "optimizer.anneal_steps": "lr_decay_steps lr_decay_iters",
    "optimizer.total_steps": "steps max_steps num_steps n_steps train_steps num_train_steps iterations "
    "iters max_iters train_iters epochs n_epochs num_epochs num_train_epochs",
    "optimizer.weight_decay": "wd",
    "optimizer.gradient_accumulation_steps": "grad_accum gradient_accumulation accumulation_steps gas",
    "optimizer.clip_norm": "grad_clip clip gradient_clipping max_grad_norm clip_grad",
    "optimizer.b1": "beta1 adam_beta1 adam_b1",
    "optimizer.b2": "beta2 adam_beta2 adam_b2",
    "optimizer.eps": "epsilon adam_epsilon adam_eps",
    "data.batch_size": "batch bs train_batch_size global_batch_size micro_batch_size",
    "data.per_replica_batch": "per_device_batch_size per_device_train_batch_size",
    "data.train_set": "dataset train_data train_file train_path data_path train_dataset",
    "data.val_set": "val_data val_file valid_set validation_set eval_set eval_data val_dataset",
    "data.val_batches": "eval_batches eval_iters val_steps",
    "data.val_every": "eval_every eval_steps eval_interval val_interval",
    "checkpoint.model_dir": "output_dir out_dir save_dir checkpoint_dir ckpt_dir run_dir",
    "checkpoint.ckpt_every": "save_every save_steps save_interval checkpoint_every",
    "checkpoint.keep_latest": "keep_n keep_last save_total_limit",
    "logging.name": "run_name experiment_name",
    "logging.wandb_project": "project project_name",
}
_ALIASES = {alias: name for name, aliases in _ALIASES_OF.items() for alias in aliases.split()}


def owners(field: str) -> list[str]:
    """The groups that have a field of this name."""
    return [group for group, fields in FIELDS.items() if field in fields]


def spelled(group: str, field: str) -> str:
    """A field with its classic key, such as `mesh.tp (classic: cores_per_replica)`."""
    key = classic.CLASSIC_KEY.get((group, field))
    return f"{group}.{field}" + (f" (classic: {key})" if key and key != field else "")


def is_grouped(raw: dict[str, Any]) -> bool:
    """Whether a file is in the grouped spelling. A key of a classic file may be the name of a group."""
    groups = [key for key in raw if key in GROUPS]
    inside = sum(len(raw[key].keys() & set(FIELDS[key])) for key in groups if isinstance(raw[key], dict))
    return bool(groups) and len(groups) + inside >= len(raw.keys() & set(classic.KEYS))


def check_file(raw: dict[str, Any]) -> None:
    """Refuse the unknown keys of a file.

    Raises:
        UserError: suggests a name for each unknown key, and says how to ignore it.
    """
    count = len(raw) + sum(len(value) for value in raw.values() if isinstance(value, dict))
    if count > MAX_KEYS:
        raise UserError(f"the file has {count:,} keys: a config has at most {MAX_KEYS:,}")
    faults = dict(_grouped_faults(raw) if is_grouped(raw) else _flat_faults(raw))
    if not faults:
        return
    unknown = [key for key, fault in faults.items() if fault == UNKNOWN]
    all_objects = all(isinstance(value, dict) for value in raw.values())
    if not is_grouped(raw) and len(unknown) == len(raw) and all_objects:
        objects = f"{len(raw)} objects" if len(raw) > 1 else "one object"
        raise UserError(
            f"the file holds {objects}, {_some(raw)}: a file holds one config, so write one of them to its own file"
        )
    texts = [fault for fault in faults.values() if fault != UNKNOWN][:SHOWN_KEYS]
    if len(unknown) == 1:
        texts.insert(0, f"unknown key {_cut(unknown[0])}: {UNKNOWN}")
    elif unknown:
        texts.insert(0, f"unknown keys {_some(unknown)}: not fields of this program")
    message = "; ".join(texts).replace("?;", "?")
    advice = _how_to_ignore(sorted(faults, key=lambda key: faults[key] != UNKNOWN))
    raise UserError(f"{message}{' ' if message.endswith('?') else '; '}{advice}")


def _how_to_ignore(keys: list[str]) -> str:
    them = "them" if len(keys) > 1 else "it"
    if not all(_is_plain(key) and "," not in key and not key.startswith("-") for key in keys):
        return f"remove {them} from the file"
    listed = ",".join(keys)
    if len(listed) > SHOWN_HINT:
        return f"--ignore-keys KEY,... ignores {them}"
    return f"{options_to_add('--ignore-keys', listed)} ignores {them}"


def resolve(name: str, config: Mapping[str, Any] | None = None) -> tuple[str, str, str]:
    """(group, field, entry) of a dotted name, of a classic key, or of a field name that only one group has.

    Args:
        config: grouped values; a suggestion is a field of the family and the optimizer that they select.

    Raises:
        UserError: no field has this name, or fields of several groups have it.
    """
    if name in OTHER_NAMES:
        return *OTHER_NAMES[name], ""
    fields = _fields(config or {})
    group, dot, rest = name.partition(".")
    field, inner, entry = rest.partition(".")
    if dot and field:
        if group not in GROUPS:
            raise UserError(f"unknown group {_cut(group)}: {_advice(group, fields) or _known(GROUPS)}")
        if field not in FIELDS[group]:
            raise UserError(
                f"unknown key {group}.{_cut(field)}: {_advice(field, fields, group) or _known(fields[group])}"
            )
        if inner and f"{group}.{field}" not in _ENTRIES:
            raise UserError(f"{group}.{field} has no entries: only {' and '.join(_ENTRIES.values())} have")
        if inner and not entry:
            raise UserError(f"{group}.{field}. needs the name of an entry: write {_ENTRIES[f'{group}.{field}']}")
        return group, field, entry
    if group in GROUPS:
        raise UserError(f"{group} is a group: name one of its fields, {', '.join(FIELDS[group])}")
    if dot or not (groups := owners(group)):
        raise UserError(f"unknown key {_cut(name)}: {_advice(group, fields) or _known(GROUPS)}")
    if len(groups) > 1:
        raise UserError(f"{name} is in more than one group: write {' or '.join(f'{g}.{name}' for g in groups)}")
    return groups[0], group, ""


def moved(raw: dict[str, Any]) -> dict[str, Any]:
    """A grouped file with `scan_unroll` in the group compute, where its value takes precedence. Some configs of commit
    50565e5 have it in the group model."""
    model, compute = raw.get("model"), raw.get("compute")
    if not isinstance(model, dict) or "scan_unroll" not in model or not isinstance(compute, dict | None):
        return raw
    unroll = (compute or {}).get("scan_unroll")
    unroll = model["scan_unroll"] if unroll is None else unroll
    model = {field: value for field, value in model.items() if field != "scan_unroll"}
    return {**raw, "model": model, "compute": {**(compute or {}), "scan_unroll": unroll}}


def _flat_faults(raw: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Each key that is not classic, with its message."""
    classic_keys = sum(key in classic.KEYS for key in raw)
    for key in raw:
        if key in GROUPS:
            yield (
                key,
                f'"{key}" is the name of a group, but the other {classic_keys} keys are classic: remove or rename it',
            )
        elif key not in classic.KEYS:
            yield key, _unknown(key, _advice(key, FIELDS, flat=True))


def _grouped_faults(raw: dict[str, Any]) -> Iterator[tuple[str, str]]:
    known = _fields(raw)
    for key, values in raw.items():
        if key in GROUPS:
            for field in values if isinstance(values, dict) else ():
                if field not in FIELDS[key]:
                    yield f"{key}.{field}", _unknown(f"{key}.{field}", _advice(field, known, key))
        elif key in classic.RENAMED:
            yield key, _outside(key, [classic.RENAMED[key][0]], classic.RENAMED[key][1])
        elif groups := owners(key):
            yield key, _outside(key, groups, key)
        else:
            yield key, _unknown(key, _advice(key, known), "group" if isinstance(values, dict) else "key")


def _outside(key: str, groups: list[str], field: str) -> str:
    inside = " or ".join(f'"{group}": {{...}}' for group in groups)
    written = "it" if field == key else f'it as "{field}"'
    return f"{key} is outside the groups: write {written} inside {inside}"


def _unknown(key: str, advice: str, what: str = "key") -> str:
    return f"unknown {what} {_cut(key)}: {advice}" if advice else UNKNOWN


def _fields(config: Mapping[str, Any]) -> Fields:
    """The fields of each group; for a group with variants, the fields of the class that `config` selects."""
    fields = dict(FIELDS)
    for group, variants in VARIANTS.items():
        values = config.get(group)
        chosen = variants.chosen(values if isinstance(values, dict) else {})
        if chosen in tuple(variants.classes):
            fields[group] = tuple(variants.classes[chosen].model_fields)
    return fields


def _advice(key: str, fields: Fields, group: str | None = None, flat: bool = False) -> str:
    """A suggestion for an unknown key, or an empty string."""
    near = _nearest(key, fields, group)
    outer, _, inner = key.partition(".")
    if not group and inner in FIELDS.get(outer, ()):
        return f'write it inside its group, {{"{outer}": {{"{inner}": ...}}}}'
    if near is None:
        return ""
    if flat and "." in near and tuple(near.split(" ")[0].split(".")) not in classic.CLASSIC_KEY:
        return (
            f"did you mean {near}? A flat (classic) file cannot hold it: remove it and pass --set {near}=VALUE, or "
            "write the file in groups"
        )
    return f"did you mean {near}?"


def _nearest(key: str, fields: Fields, group: str | None) -> str | None:
    """The field that `key` may mean: by another program's name, by its name in another group, or by a similar name."""
    # fields of the selected family and optimizer come first, then all fields
    return _search(key, fields, group) or _search(key, FIELDS, group)


def _search(key: str, fields: Fields, group: str | None) -> str | None:
    alias = _ALIASES.get(key.lower(), "")
    alias_group, _, alias_field = alias.partition(".")
    if alias and alias_field in fields[alias_group]:
        return spelled(alias_group, alias_field)
    anywhere = {f"{g}.{f}": spelled(g, f) for g, names in fields.items() for f in names}
    anywhere |= {f: spelled(g, f) for g, names in fields.items() for f in names}
    anywhere |= {classic_key: spelled(*at) for at, classic_key in classic.CLASSIC_KEY.items()}
    if key in anywhere:
        return anywhere[key]
    in_group = {field: spelled(group, field) for field in fields[group]} if group else {g: g for g in GROUPS}
    for known in (in_group, anywhere):
        if close := difflib.get_close_matches(key[:SHOWN_CHARS], known, n=1, cutoff=NEAR):
            return known[close[0]]
    return None


def _known(names: dict[str, Any] | tuple[str, ...]) -> str:
    return f"{UNKNOWN}; known are {', '.join(names)}"


def _some(keys: Any) -> str:
    shown = [_cut(key) for key in list(keys)[:SHOWN_KEYS]]
    return ", ".join(shown) + (f" and {len(keys) - SHOWN_KEYS} more" if len(keys) > SHOWN_KEYS else "")


def _cut(key: str) -> str:
    cut = key if len(key) <= SHOWN_CHARS else f"{key[:SHOWN_CHARS]}..."
    return cut if _is_plain(key) else repr(cut)


def _is_plain(key: str) -> bool:
    """Whether a message can show the key as it is: no line break, no control character, no space around it."""
    return key.isprintable() and key == key.strip() != ""
