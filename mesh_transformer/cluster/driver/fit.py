"""Whether a run fits a TPU slice, before the driver creates it."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile

from mesh_transformer.config import Config
from mesh_transformer.environment import CHECKOUT
from mesh_transformer.errors import UserError
from mesh_transformer.logs import log

PREFLIGHT = (sys.executable, "-m", "mesh_transformer", "preflight")
_OTHERWISE = "--no-preflight runs it anyway"


def check_fit(config: Config, slice_type: str) -> None:
    """Run the command preflight for a training run on a slice of this type, and log the prediction.

    Without libtpu nothing is checked. It keeps its result, so that a second check of a run is fast.

    Raises:
        UserError: the run does not fit. The message says what would fit.
    """
    if importlib.util.find_spec("libtpu") is None:
        log.info("whether the run fits %s is not checked: pip install 'jax[tpu]' enables the check", slice_type)
        return
    # a process of its own: libtpu stays out of this one
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(config.model_dump_json())
        file.flush()
        command = [*PREFLIGHT, "--config", file.name, "--tpu", slice_type, "--json", "--plot", ""]
        found = os.pathsep.join(filter(None, (CHECKOUT, os.environ.get("PYTHONPATH"))))
        variables = {**os.environ, "PYTHONPATH": found}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    last = done.stderr.strip().splitlines()[-1:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode == 0:
        (row,) = rows
        seconds, share = row["step_s"], row["mfu"]
        text = "%s: %.2f of %.2f GiB of a device; predicted: %.3g s a step, %.0f tokens/s, MFU %.0f%%"
        log.info(text, slice_type, row["peak_gib"], row["usable_gib"], seconds, row["tokens_per_s"], 100 * share)
    elif rows:
        # the advice, without the time of day of the log
        advice = last[0].partition(f"{slice_type}: ")[2] if last else ""
        raise UserError(f"the run does not fit {slice_type}: {advice or rows[0]['reason']} ({_OTHERWISE})")
    else:
        raise UserError(f"preflight failed: {' '.join(last)} ({_OTHERWISE})")
