"""The data position of the original program, as one of ours.

The original counts batches: `used` are the lines of the index whose files are read to their end, `file_idx` is the
number of the last batch taken from the next one. It never shuffled, and dropped what did not fill a batch at the end
of a file.
"""

import os
from typing import Any

from mesh_transformer.data.records import RecordReader
from mesh_transformer.data.sources import find_source, is_text, record_files
from mesh_transformer.data.stream import Position
from mesh_transformer.errors import UserError

_INSTEAD = "or read the data from its beginning with --set data.restart=true"


def classic_position(source: str, noted: Any, batch: int) -> Position:
    """The position behind the last batch of `batch` records (all microbatches of a step) that the original took.

    Where that batch was the last of its file the position is the beginning of the next file; the original itself
    lost that file's first batch when it was started again there.

    Args:
        source: the training set; its index must list the files as it did.
        noted: `train_loader` of meta.json: {"used": [file, ...], "file_idx": number}.

    Raises:
        UserError: `noted` is something else, or the files are not those that it was taken from.
    """
    used, number = _checked(noted)
    path = find_source(source)
    listed = () if is_text(path) else record_files(path)
    names = [os.path.basename(name) for name in used]
    if len(used) >= len(listed) or names != [os.path.basename(file) for file in listed[: len(used)]]:
        raise UserError(
            f"the run had read {names[:3] or 'no file'} of its training set to the end, which is not how {path} begins: "
            f"bring back the index as it was, {_INSTEAD}"
        )
    place = len(used)
    with RecordReader(listed[place]) as reader:
        wanted = (number + 1) * batch
        while reader.number < wanted and reader.read(keep=False) is not None:
            pass
        if reader.number < wanted:
            raise UserError(
                f"the run had taken {number + 1} batches of {batch} sequences from {listed[place]}, which holds only "
                f"{reader.number}: bring back that file and the batch size, {_INSTEAD}"
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
        }


def _checked(noted: Any) -> tuple[list[str], int]:
    used, number = (noted.get("used"), noted.get("file_idx")) if isinstance(noted, dict) else (None, None)
    names: list[Any] = used if isinstance(used, list) else [None]
    if all(isinstance(name, str) for name in names) and type(number) is int and number >= 0:
        return names, number
    raise UserError(
        f"meta.json: train_loader is {str(noted)[:100]}; expected used (files) and file_idx (a number): mend it, "
        f"{_INSTEAD}"
    )
