"""Train on a TPU slice, on a Ray cluster or in several processes of this machine, from this driver.

After any failure the run continues from its newest checkpoint, and so it does after the same command. See
docs/driver.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from mesh_transformer.runtime import cli


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments and drive the training job."""
    from mesh_transformer.cluster.driver.target_options import add_target

    parser = cli.parser(__doc__.split("\n")[0], needs_config=True)
    add_target(parser)
    parser.add_argument("--new", action="store_true", help="delete the files of this run, then start at step 0")
    parser.add_argument("--yes", action="store_true", help="with --new: delete without asking")
    parser.add_argument(
        "--no-preflight", action="store_true", help="with --tpu: do not check first whether the run fits the slice"
    )
    parser.add_argument(
        "--version",
        type=int,
        choices=[1, 2],
        default=1,
        help="how the mesh.tp cores of a replica share the model: 1, tensor parallelism; 2, as with mesh.fsdp "
        "(default: 1)",
    )
    cli.add_tuning(parser)
    given = cli.parse_tuned(parser, arguments)
    from mesh_transformer.cluster.driver import commands

    return commands.train(given)
