"""Convert a checkpoint of any format to a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Sequence

from mesh_transformer.runtime import cli


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments and convert."""
    parser = cli.parser(__doc__)
    cli.add_checkpoint(parser, "--input-ckpt", required=True)
    parser.add_argument(
        "--output-path", required=True, dest="output", metavar="DIR", help="output folder, local or gs://"
    )
    parser.add_argument(
        "--dtype",
        choices=["fp16", "fp32", "bf16"],
        help="dtype of the written weights (default: that of the Hugging Face folder that the checkpoint came from, "
        "else fp16)",
    )
    parser.add_argument("--debug", action="store_true", help="log every tensor")
    parser.add_argument("--cpu", action="store_true", help="no effect: no conversion uses an accelerator")
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="tokenizer of the output: a folder, a name on the Hugging Face hub, or `bytes` (default: the tokenizer of "
        "the Hugging Face folder that the checkpoint came from, or `bytes` if the run used it)",
    )
    parser.add_argument(
        "--push",
        metavar="ORG/NAME",
        help="upload the written folder, which must be local, to this repository on the Hugging Face hub; a new "
        "repository is private, an existing one stays as visible as it is",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="of adapters, write the whole model: their base with the adapters added (default: a folder of PEFT, with "
        "the adapters alone)",
    )
    cli.add_overwrite(parser)
    options = vars(parser.parse_args(arguments))
    del options["cpu"]
    cli.starting(options["config_path"], options["overrides"], debug=options.pop("debug"))
    from mesh_transformer.runtime import convert

    convert.to_hf(**options)
