"""Converts the data position of the original program.

The original counts batches: `used` lists the files of the index that are read to their end,
`file_idx` is the number of the last batch taken from the next file. It never shuffles, and drops the records that fill
no batch at the end of a file.
"""

import os
from typing import Any

from mesh_transformer.data.batches.stream import Position
from mesh_transformer.data.records.sources import find_source, is_text, record_files
from mesh_transformer.data.records.stamps import or_restart
from mesh_transformer.data.records.tfrecords import RecordReader
from mesh_transformer.errors import UserError


def classic_position(source: str, stored: Any, batch: int) -> Position:
    """The position after the last batch that the original took.

    If that batch was the last of its file, the position is the beginning of the next file. (The original skips the
    first batch of that file when it resumes.)

    Args:
        source: the training set; its index must list the same files in the same order.
        stored: `train_loader` of meta.json: {"used": [file, ...], "file_idx": number}.
        batch: records of one step, all microbatches together.

    Raises:
        UserError: `stored` has another form, or the training set has other files.
    """
    used, number = _checked(stored)
    path = find_source(source)
    listed = () if is_text(path) else record_files(path)
    names = [os.path.basename(name) for name in used]
    if len(used) >= len(listed) or names != [os.path.basename(file) for file in listed[: len(used)]]:
        raise UserError(
            f"the run had read {names[:3] or 'no file'} of its training set to the end, but {path} does not begin with "
            f"these files: restore the former index, {or_restart()}"
        )
    place = len(used)
    with RecordReader(listed[place]) as reader:
        next_record = (number + 1) * batch
        while reader.number < next_record and reader.read(keep=False) is not None:
            pass
        if reader.number < next_record:
            raise UserError(
                f"the run had taken {number + 1} batches of {batch} sequences from {listed[place]}, which holds only "
                f"{reader.number}: restore the former file and batch size, {or_restart()}"
            )
        return {
            "version": 1,
            "order": "index",
            "epoch": 0,
            "file": place,
            "name": os.path.basename(listed[place]),
            "record": reader.number,
            "offset": reader.offset,
            "taken": 0,
            "files": {},
        }


def _checked(stored: Any) -> tuple[list[str], int]:
    used, number = (stored.get("used"), stored.get("file_idx")) if isinstance(stored, dict) else (None, None)
    names: list[Any] = used if isinstance(used, list) else [None]
    if all(isinstance(name, str) for name in names) and type(number) is int and number >= 0:
        return names, number
    raise UserError(
        f"meta.json: train_loader is {str(stored)[:100]}; expected used (files) and file_idx (a number): correct it, "
        f"{or_restart()}"
    )
