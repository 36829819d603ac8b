"""Write a Hugging Face folder of GPTJForCausalLM as a native checkpoint or a classic one."""

from __future__ import annotations

import argparse

from mesh_transformer.runtime import cli


def main() -> None:
    """Parse the arguments and convert."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--input",
        required=True,
        metavar="DIR",
        help="folder with config.json and model.safetensors or pytorch_model.bin, whole or in shards with an index; "
        "local or gs://",
    )
    parser.add_argument(
        "--output-path",
        required=True,
        metavar="DIR",
        help="native: the root, in which step_0 is written; classic: the step folder itself; local or gs://",
    )
    parser.add_argument(
        "--format",
        choices=["native", "classic"],
        default="native",
        help="form to write (default: %(default)s)",
    )
    parser.add_argument("--shards", type=int, metavar="K", help="shards of a classic checkpoint (default: 1)")
    parser.add_argument("--overwrite", action="store_true", help="replace what is there already")
    arguments = parser.parse_args()
    if arguments.shards is not None and (arguments.format != "classic" or arguments.shards < 1):
        parser.error("--shards is a number of 1 or more, and goes with --format classic")
    from mesh_transformer.runtime import convert

    convert.from_hf(
        arguments.input,
        arguments.output_path,
        form=arguments.format,
        shards=arguments.shards or 1,
        overwrite=arguments.overwrite,
    )


if __name__ == "__main__":
    cli.run(main)
