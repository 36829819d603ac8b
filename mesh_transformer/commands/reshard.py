"""Convert a checkpoint to another number of shards, such as an 8-shard GPT-J for one GPU, and sample from it.

python resharding_example.py --config C --ckpt step_383500 --shards-out 1 --out gptj_1/step_383500 --prompt "Hello"
"""

from __future__ import annotations

from collections.abc import Sequence

from mesh_transformer.runtime import cli


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments, convert and sample."""
    parser = cli.parser(__doc__.split("\n")[0])
    cli.add_checkpoint(parser, required=True)
    parser.add_argument(
        "--shards-out",
        type=int,
        metavar="K",
        help="shards of a classic output; with --prompt, also the number of devices that split the model (default: "
        "mesh.tp)",
    )
    cli.add_step_output(parser, "--out", "classic")
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        help="complete this text with the new checkpoint, or with --ckpt if --out is not given, and print the result",
    )
    options = vars(parser.parse_args(arguments))
    cli.starting(options["config_path"], options["overrides"])
    from mesh_transformer.runtime import convert

    convert.reshard(**options)
