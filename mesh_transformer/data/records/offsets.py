"""Where the records of a plain record file begin: little-endian numbers of 8 bytes, one for each record.

`prepare_dataset.py` writes them beside the record file. Without this file, a walk over the records at first use finds
the offsets, and the user's cache folder keeps them under the stamp of the record file.
"""

import hashlib
import logging
import os

import numpy as np

from mesh_transformer import cache_folders, files
from mesh_transformer.data.records.tfrecords import FRAME_BYTES, RecordReader
from mesh_transformer.errors import UserError

SUFFIX = ".offsets"
OFFSET_BYTES = 8
_READ_BYTES = 1 << 20

_log = logging.getLogger(__name__)


def find_offsets(path: str, stamp: str) -> str:
    """The local file with the offsets of a record file (local or `gs://`).

    Args:
        stamp: of the record file.

    Raises:
        UserError: the record file is compressed or damaged, or the file beside it has the offsets of another one.
    """
    beside = path + SUFFIX
    if not files.is_remote(path) and os.path.isfile(beside):
        _check(path, beside)
        return beside
    folder, stem = cache_folders.open_data_sets(), os.path.splitext(os.path.basename(path))[0]
    key = hashlib.sha256(f"{path} {stamp}".encode()).hexdigest()[:32]
    target = os.path.join(folder, f"{stem}-{key}{SUFFIX}")
    if not os.path.isfile(target):
        with files.scratch_file(folder) as scratch:
            if files.is_remote(path) and files.exists(beside):
                if files.size(beside) * FRAME_BYTES > files.size(path) * OFFSET_BYTES:
                    raise _unfit(path)
                with open(scratch, "wb") as file:
                    files.download(beside, 0, None, file)
                _check(path, scratch)
            else:
                _write(path, scratch)
            os.replace(scratch, target)
    return target


def _write(path: str, target: str) -> None:
    """Find the offsets by a walk over the records, which reads no data of a local file."""
    _log.info("%s: finding where its records begin; this is done once", path)
    with RecordReader(path) as reader, open(target, "wb") as file:
        if not reader.plain:
            raise UserError(
                f"{path} is compressed, so it cannot be read from the middle, as a mixture and data.shuffle whole do: "
                f"decompress it, or read it as the only data.train_set with data.shuffle true or false"
            )
        offsets: list[int] = []
        offset = 0
        while reader.read(keep=False) is not None:
            offsets.append(offset)
            offset = reader.offset
        file.write(np.array(offsets, "<u8").tobytes())


def _check(path: str, offsets: str) -> None:
    """Refuse a file that does not list the records of a record file: its numbers ascend from 0 by a record or more, and
    the last one is of the last record."""
    file_bytes, previous = files.size(path), -FRAME_BYTES
    with open(offsets, "rb") as file:
        while content := file.read(_READ_BYTES):
            if len(content) % OFFSET_BYTES:
                raise _unfit(path)
            places = np.frombuffer(content, "<u8")
            if places.max() >= file_bytes or (previous < 0 and places[0]):
                raise _unfit(path)
            if (np.diff(places.astype(np.int64), prepend=previous) < FRAME_BYTES).any():
                raise _unfit(path)
            previous = int(places[-1])
    length = int.from_bytes(files.read_range(path, previous, OFFSET_BYTES), "little") if previous >= 0 else 0
    if previous + FRAME_BYTES + length != file_bytes:
        raise _unfit(path)


def _unfit(path: str) -> UserError:
    return UserError(
        f"{path + SUFFIX} does not fit {path}, whose records it should list: delete it, and it is made again, or make "
        "both files again"
    )
