"""Write only the parameters of a checkpoint, in bfloat16, as a classic checkpoint in RUN_slim/step_N."""

from __future__ import annotations

from collections.abc import Sequence

from mesh_transformer.runtime import cli


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments and convert."""
    parser = cli.parser(__doc__)
    cli.add_checkpoint(parser)
    parser.add_argument(
        "--ckpt-step", type=int, dest="step", metavar="N", help="step of the checkpoint (default: the newest)"
    )
    parser.add_argument("--f16", action="store_true", help="write float16, in RUN_slim_f16 (default: bfloat16)")
    cli.add_overwrite(parser)
    options = vars(parser.parse_args(arguments))
    cli.starting(options["config_path"], options["overrides"])
    from mesh_transformer.runtime import convert

    convert.slim(**options)
