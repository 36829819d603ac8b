"""device_serve.py that writes the names of all imported modules to the file $MODULES at its end, one per line."""

import atexit
import os
import sys
from pathlib import Path

import device_serve
from mesh_transformer.runtime import cli

if __name__ == "__main__":
    atexit.register(lambda: Path(os.environ["MODULES"]).write_text("\n".join(sys.modules), encoding="utf-8"))
    cli.run(device_serve.main)
