"""Write docs/config.md from the fields of the config groups. Run it after changing a field."""

from __future__ import annotations

from pathlib import Path

from pydantic_core import PydanticUndefined

from mesh_transformer.config import classic, describe
from mesh_transformer.config.base import Group
from mesh_transformer.config.schema import GROUPS

TARGET = Path(__file__).resolve().parents[1] / "docs" / "config.md"
INTRODUCTION = """\
# The configuration

<!-- Written by scripts/config_docs.py from the fields in mesh_transformer/config: change those, then run it. -->

A run is one JSON file plus changes on the command line. `configs/` holds examples.

## Two spellings

A file is written in groups:

    {"model": {"layers": 28, "d_model": 4096, "n_heads": 16, "n_vocab": 50400}, "mesh": {"tp": 8}}

or flat, with the keys of the original mesh-transformer-jax:

    {"layers": 28, "d_model": 4096, "n_heads": 16, "n_vocab": 50400, "cores_per_replica": 8}

A file with groups is grouped; every other file is flat, also one that has the name of a group among its classic keys. One
file does not mix them. Fields with no classic key are reached from a flat file by `--set`. `null` means the same as leaving
the key out, in both spellings and in `--set`. Unknown keys and values of the wrong type are refused with a message that names
the nearest field; `--ignore-keys step_shift,my_key` leaves keys out that only a fork's program reads (of a group:
`--ignore-keys model.my_key`).

### Files of 2021

A flat file that ran on the original works unedited and means what it meant there. Where that is not what the file says, one line
tells it:

| in the file | taken as |
|---|---|
| `pe_rotary_dims` above the width of a head | the whole head is rotated |
| `d_head` | not read: a head has d_model / n_heads dims; `--set model.d_head=N` counts |
| no `pe` | `t5`, all that the original had before it had this key; with `pe_rotary_dims`: `rotary` |
| `norm` `layernorm-desync` | `layernorm` with one shard; with more it is refused, since each had a norm of its own |
| no `norm` | `layernorm`; before the original had this key, each of several shards had a norm of its own |
| a key twice | the last one counts; in a grouped file it is refused |
| `bucket` `B/dir` | folder `dir` of bucket B |
| an empty `model_dir` | the default, `runs/model` |
| a `model_dir` that begins with `gs://` | the whole path, in place of `bucket` |
| `eval_harness_tasks` that is an object or a text | no tasks |
| `tpu_size` that is no number | absent |

A value of the command line counts as it is written.

## Overrides

Every entry point that takes `--config` takes `--set NAME=VALUE`, any number of times, applied in order:

| form | example |
|---|---|
| group and field | `--set optimizer.total_steps=20` |
| a classic key | `--set cores_per_replica=1` |
| a field name that only one group has | `--set batch_size=32` |
| one entry of the validation sets | `--set data.val_set.pile=pile.val.index` |
| back to the default | `--set mesh.dp=null` |
| an empty string | `--set checkpoint.bucket=` |

VALUE is JSON (`true`, `3`, `1e-4`, `["lambada"]`) and otherwise a string. For a field that holds text it is the text as
written: `--set logging.name=1e5` is the name `1e5`. `--ignore-keys` is applied before all of them.

## The mesh

The mesh has the axes dp x fsdp x tp, and their product is the number of devices. `mesh.dp` is best left out: it is then
devices / (fsdp * tp), so the same file runs on any multiple of fsdp * tp devices. On fewer devices the run stops at once
and names the change, such as `--set mesh.tp=1`; the parameters of a checkpoint do not depend on the mesh.

The devices of a host go to `tp` first, then to `fsdp`, then to `dp`. So a `tp` group lies within a host where `mesh.tp` divides the
number of the host's devices: 8 on v2, v3 and v7x and on the single host of a v5e-8 or v6e-8, 4 on other TPU hosts. A larger group
spans `tp` / 4 (or 8) neighbouring hosts.

The batch is split over dp * fsdp. One microbatch has `data.batch_size` sequences, or `data.per_replica_batch` on each of
those replicas (`--set` of one takes the place of the other); one step has `optimizer.gradient_accumulation_steps` microbatches:

    tokens a step = microbatch * gradient_accumulation_steps * data.seq

Sizes that must divide: `mesh.tp` divides `model.n_heads`, `model.d_ff` and the padded vocabulary (`model.n_vocab` rounded
up to `model.vocab_multiple`), with `mesh.shard_activations` also the sequence; `mesh.fsdp` divides `model.d_model`, with
`mesh.zero1` dp * fsdp does; dp * fsdp divides `data.batch_size`.

## Fields

Default `-`: required; in code type: derived from other fields. The classic key is the flat spelling's name.
"""
CLASSIC_SWITCHES = """
## Classic switches

| key | meaning |
|---|---|
| early_cast | accepted, changes nothing: parameters are always cast to the compute dtype once a step |
| early_collect | true: mesh.gather_weights = per_step |
| bf16_optimizer | true: optimizer.moments_dtype = bfloat16 |
"""


def render() -> str:
    """The text of docs/config.md."""
    return INTRODUCTION + "".join(_table(name, group) for name, group in GROUPS.items()) + CLASSIC_SWITCHES


def _table(name: str, group: type[Group]) -> str:
    rows = [_row(name, group, field) for field in group.model_fields]
    header = "| field | allowed | unit | default | meaning | classic key |\n|---|---|---|---|---|---|\n"
    return f"\n### {name}\n\n{group.__doc__}\n\n{header}" + "".join(rows)


def _row(name: str, group: type[Group], field: str) -> str:
    cells = (
        f"`{name}.{field}`",
        describe.allowed(group, field),
        describe.unit(group, field),
        _default(group, field),
        group.model_fields[field].description or "",
        classic.CLASSIC_KEY.get((name, field), ""),
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _default(group: type[Group], field: str) -> str:
    if rule := describe.derived(group, field):
        return f"`{rule}`"
    default = group.model_fields[field].get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "-"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, float):
        return f"{default:g}"
    return "none" if default in (None, "", (), {}) else str(default)


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(render(), encoding="utf-8")
