"""Take a classic checkpoint to another number of shards, such as an 8-shard GPT-J to one GPU, and try it.

python resharding_example.py --config C --ckpt step_383500 --shards-out 1 --out gptj_1/step_383500 --prompt "Hello"
"""

from __future__ import annotations

from mesh_transformer.runtime import cli


def main() -> int:
    """Parse the arguments, convert and sample."""
    parser = cli.parser(__doc__)
    parser.add_argument(
        "--ckpt", required=True, metavar="DIR", help="a classic step_N folder, or the folder with meta.json"
    )
    parser.add_argument(
        "--shards-out",
        type=int,
        required=True,
        metavar="K",
        help="shards to write, and devices that share the model when it is tried",
    )
    parser.add_argument("--out", metavar="DIR", help="the step folder to write; nothing is written if absent")
    parser.add_argument("--prompt", metavar="TEXT", help="print a completion of it with the new weights")
    parser.add_argument("--overwrite", action="store_true", help="replace the folder if it is there")
    arguments = parser.parse_args()
    from mesh_transformer.runtime import reshard

    return reshard.reshard(
        arguments.config,
        arguments.overrides,
        checkpoint=arguments.ckpt,
        shards_out=arguments.shards_out,
        out=arguments.out,
        prompt=arguments.prompt,
        overwrite=arguments.overwrite,
    )


if __name__ == "__main__":
    cli.run(main)
