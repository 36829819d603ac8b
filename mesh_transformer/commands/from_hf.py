"""Convert a Hugging Face folder or a GGUF file to a native or classic checkpoint at step 0."""

from __future__ import annotations

from collections.abc import Sequence

from mesh_transformer.runtime import cli


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments and convert."""
    parser = cli.Parser(description=__doc__)
    parser.add_argument(
        "--input",
        required=True,
        dest="folder",
        type=cli.checkpoint_path,
        metavar="DIR",
        help="folder with config.json and model.safetensors or pytorch_model.bin, in one file or in shards with an "
        "index; local or gs://; or a model on the Hugging Face hub, hf://ORG/NAME or hf://ORG/NAME@REVISION",
    )
    cli.add_step_output(parser, "--output-path", "native", required=True)
    parser.add_argument("--shards", type=int, metavar="K", help="shards of a classic checkpoint (default: 1)")
    parser.add_argument(
        "--text-only",
        action="store_true",
        help="convert the text model of a folder that also holds a vision tower, whose tensors are left out",
    )
    options = parser.parse_args(arguments)
    if options.shards is not None and (options.format != "classic" or options.shards < 1):
        parser.error("--shards must be 1 or more, and needs --format classic")
    cli.starting()
    from mesh_transformer.runtime import convert

    convert.from_hf(**vars(options))
