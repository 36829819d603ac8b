"""What the values of a classic file meant to the original program, where that is not what they say.

Version 1 of its model turned `x[..., :pe_rotary_dims]` of each head, and a head had d_model / n_heads dims whatever
`d_head` said. `bucket` and `model_dir` were only parts of a path. Its trainer never looked at some keys at all.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

from mesh_transformer.config.describe import short
from mesh_transformer.config.schema import CheckpointConfig
from mesh_transformer.fields import size

DEFAULT_FOLDER = CheckpointConfig.model_fields["model_dir"].default
Grouped = dict[str, dict[str, Any]]


def apply(grouped: Grouped, overridden: Callable[[str, str], bool]) -> list[str]:
    """Give the values of a classic file their meaning, in place, once the overrides are in it.

    Args:
        grouped: the file in the grouped spelling.
        overridden: whether the command line gives (group, field), which then stays as it is.

    Returns:
        A sentence for each value that was not taken as it is written.
    """
    for group in ("model", "checkpoint", "data", "mesh", "logging"):
        grouped.setdefault(group, {})
    given = _Given(grouped, overridden)
    # the command line may ask for another family, which has no such fields
    of_gptj = (_position_encoding, _norm) if grouped["model"].get("family") in (None, "gptj") else ()
    rules = (_width_of_head, *of_gptj, _place, _tasks, _tpu_size, _comment)
    return [note for rule in rules for note in rule(given)]


class _Given:
    """The values of the file. One that the command line gives reads as absent."""

    def __init__(self, grouped: Grouped, overridden: Callable[[str, str], bool]):
        self.groups, self.overridden = grouped, overridden

    def get(self, group: str, field: str) -> Any:
        return None if self.overridden(group, field) else self.groups[group].get(field)

    def drop(self, group: str, field: str) -> None:
        del self.groups[group][field]

    def absent(self, group: str, field: str) -> bool:
        return self.groups[group].get(field) is None


def _head(given: _Given) -> int | None:
    """Dims of a head, where they are a whole number."""
    model = given.groups["model"]
    d_model, n_heads = size(model.get("d_model")), size(model.get("n_heads"))
    if d_head := size(model.get("d_head")):
        return d_head
    return d_model // n_heads if d_model and n_heads and d_model % n_heads == 0 else None


def _width_of_head(given: _Given) -> Iterator[str]:
    if (d_head := given.get("model", "d_head")) is None:
        return
    given.drop("model", "d_head")
    if (head := _head(given)) and head != d_head:
        yield f"d_head {short(d_head)}: not read, as in the original; a head has d_model / n_heads = {head} dims"


def _position_encoding(given: _Given) -> Iterator[str]:
    model, dims = given.groups["model"], given.get("model", "pe_rotary_dims")
    if given.absent("model", "pe"):
        # the original had the relative bias alone until it had this key, and pe_rotary_dims came later still
        if given.absent("model", "pe_rotary_dims"):
            model["pe"] = "t5"
            yield "no pe: t5, as the original before it had this key (--set model.pe=rotary for another)"
        else:
            model["pe"] = "rotary"
            yield "no pe: rotary, for pe_rotary_dims is given"
    head = _head(given)
    if dims is None or not head:
        return
    if model["pe"] != "rotary":
        given.drop("model", "pe_rotary_dims")
    elif size(dims) and dims > head:
        model["pe_rotary_dims"] = head
        yield f"pe_rotary_dims {short(dims)}: more than the {head} dims of a head; the whole head is rotated, as in the original"


def _norm(given: _Given) -> Iterator[str]:
    one_shard = given.groups["mesh"].get("tp") in (None, 1) and not given.overridden("mesh", "tp")
    if given.get("model", "norm") == "layernorm-desync" and one_shard:
        given.groups["model"]["norm"] = "layernorm"
        yield "norm layernorm-desync: on one shard that is layernorm"
    if given.absent("model", "norm"):
        given.groups["model"]["norm"] = "layernorm"
        yield "no norm: layernorm (--set model.norm=rmsnorm for another)"


def _place(given: _Given) -> Iterator[str]:
    checkpoint = given.groups["checkpoint"]
    bucket, folder = given.get("checkpoint", "bucket"), given.get("checkpoint", "model_dir")
    if isinstance(bucket, str) and bucket.startswith("gs://"):
        checkpoint["bucket"] = bucket.removeprefix("gs://")
        yield f"bucket {short(bucket)}: read as {checkpoint['bucket']}"
    if isinstance(folder, str) and folder.startswith("gs://") and checkpoint.get("bucket"):
        checkpoint["bucket"], _, checkpoint["model_dir"] = folder.removeprefix("gs://").partition("/")
        yield f"model_dir {short(folder)}: a whole path; bucket {short(bucket)} is not used"
    elif isinstance(folder, str) and checkpoint.get("bucket"):
        checkpoint["model_dir"] = folder.strip("/")  # it is the folder of the local copy too
    if isinstance(folder, str) and not checkpoint["model_dir"].strip("/ "):
        # never the bucket itself: a run's folder is emptied by --new
        given.drop("checkpoint", "model_dir")
        yield f"model_dir {short(folder)}: no folder; the default is taken, {DEFAULT_FOLDER}"


def _tasks(given: _Given) -> Iterator[str]:
    tasks = given.get("data", "eval_harness_tasks")
    if isinstance(tasks, (dict, str)):
        given.drop("data", "eval_harness_tasks")
        if tasks:
            yield f"eval_harness_tasks {short(tasks)}: no list of names; no tasks are run"
    elif isinstance(tasks, list) and "" in tasks:
        given.groups["data"]["eval_harness_tasks"] = [task for task in tasks if task != ""]
        yield f"eval_harness_tasks {short(tasks)}: an empty name is left out"


def _tpu_size(given: _Given) -> Iterator[str]:
    cores = given.get("mesh", "tpu_size")
    if cores is not None and not size(cores):
        given.drop("mesh", "tpu_size")
        yield f"tpu_size {short(cores)}: no number of cores; not read"


def _comment(given: _Given) -> Iterator[str]:
    comment = given.get("logging", "comment")
    if comment is not None:
        text = comment if isinstance(comment, str) else json.dumps(comment)
        given.groups["logging"]["comment"] = "".join(
            c if c.isprintable() or c in "\n\t" else " " for c in text
        )
    yield from ()
