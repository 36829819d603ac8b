"""device_serve.py that writes the names of all imported modules to the file $MODULES at its end, one per line."""

import atexit
import os
import sys
from pathlib import Path
from typing import NoReturn

import device_serve
from mesh_transformer.runtime import cli

_end = os._exit


def write() -> None:
    Path(os.environ["MODULES"]).write_text("\n".join(sys.modules), encoding="utf-8")


def end(code: int) -> NoReturn:
    write()
    _end(code)


if __name__ == "__main__":
    atexit.register(write)
    # a server whose other thread compiles ends so
    os._exit = end
    cli.run(device_serve.main)
