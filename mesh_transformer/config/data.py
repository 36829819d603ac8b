"""The group `data` of the config."""

import json
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge
from pydantic import BeforeValidator, Field, Strict, model_validator

from mesh_transformer.config.mixture import TrainSet, check_weights
from mesh_transformer.errors import UserError, set_options
from mesh_transformer.fields import (
    ConfigGroup,
    Count,
    CountOrZero,
    Derived,
    Name,
    OptionalText,
    Sequences,
    Steps,
    Switch,
    Tokens,
    Unit,
    Words,
    whole,
)


def _list_to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class DataConfig(ConfigGroup):
    """Training data, validation data and batches."""

    train_set: TrainSet = None
    """index file (one record file per line), .tfrecords file, .txt file, or a folder with train.index or train.txt: a
    path, a gs:// URL or a name under data/; or the sources of a mixture"""
    val_set: Annotated[
        dict[Name, Name],
        Words('one file, or an object that maps names to files, such as {"pile": "pile.val.index"}'),
    ] = Field(default_factory=dict)
    """validation sets: names mapped to files like train_set, or to folders with val.index or val.txt; a single one is
    named val"""
    per_replica_batch: Annotated[Sequences | None, Derived("1 if batch_size is absent too")] = None
    """sequences of a microbatch on each data-parallel replica"""
    batch_size: Sequences | None = None
    """sequences of a microbatch on the whole mesh; an alternative to per_replica_batch"""
    seq: Annotated[Tokens | None, Derived("model.seq")] = None
    """length of a training sequence"""
    tokenizer: OptionalText = None
    """`bytes`, a folder with tokenizer files, or a name on the Hugging Face hub such as gpt2; for .txt files and
    samples; absent: the tokenizer of the checkpoint, else gpt2"""
    shuffle: Annotated[Switch | Literal["whole"], Derived("whole for a mixture, else false")] = False
    """whole: each pass is a permutation of all records. true: shuffle the files, and the records within shuffle_window.
    false: keep the order of the index and of its files"""
    shuffle_window: Annotated[Count, Unit("records")] = 16384
    """size of the shuffle buffer"""
    packing: Literal["auto", "concat", "documents"] = "auto"
    """documents: a token attends only to its own document of the record. concat: a record is one text, whatever
    documents it has. auto: documents if the first record of a source has the lengths of its documents"""
    batch_across_files: Switch = False
    """batches may span record files; false: an incomplete batch at the end of a file is dropped, as in the original"""
    restart: Switch = False
    """a resumed run reads the training data from the beginning instead of from where it stopped"""
    read_by: Literal["host", "driver"] = "host"
    """what reads train_set under `drive`: each host reads its own share, or the driver reads all and streams it to the
    hosts"""
    seed: CountOrZero = 0
    """seed of the shuffling"""
    val_batches: Annotated[int, Strict(), Ge(0), BeforeValidator(whole), Unit("batches")] = 100
    """batches per validation of each set; 0: no validation"""
    val_batch_multiplier: Annotated[Count, Unit("microbatches")] = 1
    """microbatches per validation batch"""
    val_every: Steps = 500
    """steps between validations and between runs of eval_harness_tasks; a fine-tuning begins with one of each"""
    eval_harness_tasks: Annotated[tuple[Name, ...], BeforeValidator(_list_to_tuple)] = ()
    """lm-evaluation-harness tasks to run every val_every steps; a task that cannot be loaded stops the run"""
    eval_harness_include: OptionalText = None
    """folder with additional task files for eval_harness_tasks"""
    eval_harness_data: OptionalText = None
    """folder with LAMBADA and PIQA for eval_harness_tasks; absent: download from the Hugging Face hub"""
    eval_harness_limit: Annotated[Count | None, Unit("questions")] = None
    """largest number of questions per task of eval_harness_tasks; absent: all"""

    @classmethod
    def derive(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Name a single validation file `val`, drop the entries that are null, and shuffle a mixture."""
        val_set = values.get("val_set")
        if isinstance(val_set, str):
            values["val_set"] = {"val": val_set} if val_set else {}
        if isinstance(val_set, dict):
            values["val_set"] = {name: file for name, file in val_set.items() if file is not None}
        train_set = values.get("train_set")
        if isinstance(train_set, dict):
            values["train_set"] = {name: source for name, source in train_set.items() if source is not None}
            values.setdefault("shuffle", "whole")
        return values

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources of a mixture, by name: `Sequences.sources` has their places. Empty for a single set."""
        return tuple(sorted(self.train_set)) if isinstance(self.train_set, dict) else ()

    @property
    def train_files(self) -> tuple[str, ...]:
        """The files of `train_set`, in the order of `sources`."""
        if isinstance(self.train_set, dict):
            return tuple(self.train_set[name].set for name in self.sources)
        return (self.train_set,) if self.train_set else ()

    @property
    def reads_any_record(self) -> bool:
        """Whether the training records are read in another order than their files have them."""
        return bool(self.sources) or self.shuffle == "whole"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.per_replica_batch is not None and self.batch_size is not None:
            raise UserError(
                f"data.per_replica_batch {self.per_replica_batch} and data.batch_size {self.batch_size} are both set: "
                f"keep one ({set_options('data.per_replica_batch=null')} or "
                f"{set_options('data.batch_size=null')})"
            )
        if isinstance(self.train_set, dict):
            check_weights(self.train_set)
            if self.shuffle is True:
                raise UserError(
                    "data.shuffle true shuffles within a window, and data.train_set is a mixture, which has none: set "
                    "data.shuffle to whole, or to false to read each source in the order of its files"
                )
        if self.reads_any_record:
            self._check_no_window()
        return self

    def _check_no_window(self) -> None:
        """Refuse the fields that only affect a reader in the order of the files."""
        why = "data.train_set is a mixture" if self.sources else "data.shuffle is whole"
        for name in ("shuffle_window", "batch_across_files"):
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                raise UserError(
                    f"data.{name} {json.dumps(value)} has no effect, because {why}, where any record may follow any "
                    "other: remove it"
                )
