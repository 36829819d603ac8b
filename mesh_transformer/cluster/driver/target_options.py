"""The options of a compute target, for the parsers of arguments. `ComputeTarget.of` reads what they give."""

import argparse
from typing import Any

# flags, help text, further arguments of add_argument
_OPTIONS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("--tpu", "run on this TPU; it is created if it does not exist", {"metavar": "NAME"}),
    ("--tpu_region --tpu-region", "zone of the TPU, such as europe-west4-a", {"metavar": "ZONE"}),
    ("--tpu-type", "type of each slice, such as v4-32 (default: v3-N, N being mesh.tpu_size)", {"metavar": "T"}),
    ("--slices",
     "number of slices of this type; with --tpu they are the nodes of one queued resource (default: %(default)s)",
     {"type": int, "metavar": "N", "default": 1}),
    ("--environment", "existing Python environment on the hosts (default: install a new one)", {"metavar": "DIR"}),
    ("--wheelhouse", "install the hosts' packages from the wheels in DIR, without internet", {"metavar": "DIR"}),
    ("--user", "login name on the hosts (default: your login name on this machine)", {}),
    ("--ssh-key", "private SSH key (default: that of gcloud, or the first one in ~/.ssh)", {"metavar": "FILE"}),
    ("--preemptible", "cheaper capacity that the cloud may preempt at any time", {"action": "store_true"}),
    ("--ray-address", "run on this Ray cluster, HOST:PORT or auto", {"metavar": "A"}),
    ("--processes", "run in N processes on this machine", {"type": int, "metavar": "N"}),
    ("--env", "environment variable of the workers; without a value, that of this environment; may be repeated",
     {"action": "append", "default": [], "metavar": "NAME[=VALUE]"}),
    ("--verbose", "show all lines of the workers, also the lines of Gloo, XLA and JAX", {"action": "store_true"}),
    ("--price", "price of a chip-hour; the driver prints the cost of the run", {"type": float, "metavar": "P"}),
)  # fmt: skip


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add the options to a command line."""
    for flags, text, settings in _OPTIONS:
        parser.add_argument(*flags.split(), help=text, **settings)
