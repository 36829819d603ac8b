"""Write tests/parallel/tpu_devices.json, the devices of TPU slices as libtpu lists them. It needs jax[tpu], but no TPU.

Run it after an update of libtpu that adds slices or changes the order of their devices.
"""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import jax

from mesh_transformer import slices
from mesh_transformer.estimate.tpus import slice_devices

TARGET = Path(__file__).resolve().parents[1] / "tests" / "parallel" / "tpu_devices.json"
# devices of a slice; larger slices repeat the pattern
LARGEST = 256


def main() -> None:
    """Describe all slices of at most LARGEST devices."""
    jax.config.update("jax_platforms", "cpu")
    types = [name for generation in slices.GENERATIONS for name in generation.types]
    kept = [name for name in types if slices.parse(name).devices <= LARGEST]
    lines = [f"{json.dumps(name)}: {json.dumps(describe(name), separators=(',', ':'))}" for name in kept]
    TARGET.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def describe(name: str) -> dict[str, Any]:
    """The kind of the devices of a slice; for each process its index and its devices, each (id, x, y, z, core)."""
    devices = slice_devices(name)
    processes = [
        [process, [[one.id, *one.coords, one.core_on_chip] for one in some]]
        for process, some in groupby(devices, key=lambda device: device.process_index)
    ]
    return {"kind": devices[0].device_kind, "processes": processes}


if __name__ == "__main__":
    main()
