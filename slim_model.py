"""Make a slim checkpoint of a run: its parameters alone, bfloat16, classic shards, in RUN_slim/step_N."""

from mesh_transformer.runtime import cli


def main() -> None:
    """Parse the arguments and convert."""
    parser = cli.parser(__doc__)
    cli.add_checkpoint(parser)
    parser.add_argument("--ckpt-step", type=int, dest="step", metavar="N", help="step (default: the newest)")
    parser.add_argument("--f16", action="store_true", help="float16, in RUN_slim_f16 (default: bfloat16)")
    cli.add_overwrite(parser)
    options = vars(parser.parse_args())
    from mesh_transformer.runtime import convert

    convert.slim(**options)


if __name__ == "__main__":
    cli.run(main)
