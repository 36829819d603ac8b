"""The picture of the README: one config on one CPU device, on eight devices, and on a pod of four hosts, with the
training losses of the three runs.

    python benchmarks/one_model.py --plot docs/one_model.png

The devices are CPU devices of this machine, and the hosts are processes of one jax.distributed job. Only the mesh
differs between the runs. A difference of the losses above the tolerance is reported, and the exit code is 1.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import REPO, command, end, parser, report, say

CONFIG = "configs/tiny_shakespeare.json"
# of a loss, relative: the order of float32 sums differs between meshes, and each step builds on the last
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Run:
    """One of the three runs: a mesh of hosts x devices."""

    name: str
    hosts: int
    # of one host
    devices: int
    # sizes of the mesh axes
    mesh: dict[str, int]
    # of its boxes and its curve; the later curves are drawn over the earlier, thinner ones
    color: str
    width: float
    dashes: tuple[float, float] | None

    @property
    def label(self) -> str:
        """The mesh as text, such as dp 2 · tp 2."""
        return " · ".join(f"{axis} {size}" for axis, size in self.mesh.items())

    def command(self, folder: str, overrides: Sequence[str]) -> list[str]:
        """The command that trains into `folder`."""
        mesh = [f"mesh.{axis}={size}" for axis, size in self.mesh.items()]
        changes = [*overrides, *mesh, f"checkpoint.model_dir={folder}"]
        if self.hosts == 1:
            return command("device_train.py", CONFIG, changes)
        return command("train.py", CONFIG, changes, "--processes", str(self.hosts))


RUNS = (
    Run("one CPU", 1, 1, {}, "#9ecae1", 9.0, None),
    Run("eight devices", 1, 8, {"dp": 2, "fsdp": 2, "tp": 2}, "#1f5fa8", 3.5, None),
    Run("a pod of four hosts", 4, 2, {"fsdp": 4, "tp": 2}, "#e6550d", 2.5, (3, 4)),
)


def main() -> None:
    """Train the three runs, compare and draw."""
    made = parser(__doc__, config=None, rounds=None)
    made.add_argument("--steps", type=int, default=150, help="of each run (default: %(default)s)")
    made.add_argument("--runs", metavar="DIR", help="keep the runs in DIR; one that is complete there is not repeated")
    made.add_argument("--plot", metavar="PNG", help="write the picture to this file")
    arguments = made.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.runs or temporary).resolve()
        losses = {run.name: train(run, f"{folder}/{number}", arguments.steps) for number, run in enumerate(RUNS)}
    different = {run.name: difference(losses[RUNS[0].name], losses[run.name]) for run in RUNS[1:]}
    last = {name: curve[-1] for name, curve in losses.items()}
    report({"steps": arguments.steps, "last_losses": last, "largest_relative_difference": different})
    if arguments.plot:
        plot(losses, max(different.values()), arguments.plot)
    end([f"{name}: {value:.1e}, over {TOLERANCE}" for name, value in different.items() if not value <= TOLERANCE])


def train(run: Run, folder: str, steps: int) -> list[float]:
    """Train, and return the loss of each step, which the run wrote to its metrics (nats per byte)."""
    flag = f"--xla_force_host_platform_device_count={run.devices}"
    overrides = [
        *(f"optimizer.total_steps={steps}", f"optimizer.anneal_steps={steps - 50}"),
        *("data.val_set={}", "logging.plot=false"),
    ]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flag}
    say(f"training on {run.name}")
    # standard output is for the result
    subprocess.run(run.command(folder, overrides), cwd=REPO, env=environment, stdout=sys.stderr, check=True)
    records = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found = {record["step"]: record["train/loss"] for record in records if "train/loss" in record}
    return [found[step] for step in range(1, steps + 1)]


def difference(reference: Sequence[float], other: Sequence[float]) -> float:
    """The largest relative difference of two curves."""
    return max(abs(b - a) / a for a, b in zip(reference, other, strict=True))


def plot(losses: dict[str, list[float]], different: float, path: str) -> None:
    """Draw the devices of each run at the left, and its losses at the right, in the same color."""
    from matplotlib.figure import Figure

    # large letters: a phone shows the picture at a quarter of its width
    figure = Figure(figsize=(10, 4.4), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, width_ratios=(4, 5))
    left.set(xlim=(0, 10), ylim=(0, 9.4), aspect="equal")
    left.axis("off")
    for run, top in zip(RUNS, (9.3, 6.1, 2.9), strict=True):
        _devices(left, run, top)
    for run in RUNS:
        curve = losses[run.name]
        style: Any = (0, run.dashes) if run.dashes else "-"
        right.plot(range(1, len(curve) + 1), curve, color=run.color, linewidth=run.width, linestyle=style)
    right.set_xlabel("step", fontsize=17)
    right.set_title("one config, one loss curve", fontsize=19)
    right.set_ylabel("training loss", fontsize=17)
    text = f"largest difference\n{_scientific(different)} of the loss"
    right.text(0.97, 0.93, text, transform=right.transAxes, ha="right", va="top", fontsize=17)
    right.tick_params(labelsize=15)
    right.grid(alpha=0.3)
    right.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=140)
    say(f"plot: {path}")


def _devices(axes: Any, run: Run, top: float) -> None:
    """The name, the mesh and the devices of a run below `top`: a square for each device, a frame around each host."""
    from matplotlib.patches import Rectangle

    title = f"{run.name}: {run.label}" if run.label else run.name
    axes.text(0, top, title, fontsize=17, va="top")
    size, gap = 0.88, 0.2
    # the devices of eight stand in one row
    host = run.devices * (size + gap) + gap
    for number in range(run.hosts):
        x = number * (host + 0.14)
        axes.add_patch(Rectangle((x, top - 2.2), host, size + 2 * gap, fill=False, edgecolor="#666666", linewidth=1.5))
        for device in range(run.devices):
            corner = (x + gap + device * (size + gap), top - 2.2 + gap)
            axes.add_patch(Rectangle(corner, size, size, color=run.color))


def _scientific(value: float) -> str:
    """A number with one digit and a power of ten."""
    digit, power = f"{value:.0e}".split("e")
    return rf"${digit} \times 10^{{{int(power)}}}$"


if __name__ == "__main__":
    main()
