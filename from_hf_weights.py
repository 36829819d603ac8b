"""Write a Hugging Face folder of GPTJForCausalLM as a native checkpoint or a classic one, step 0."""

import argparse

from mesh_transformer.runtime import cli


def main() -> None:
    """Parse the arguments and convert."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--input",
        required=True,
        dest="folder",
        metavar="DIR",
        help="folder with config.json and model.safetensors or pytorch_model.bin, whole or in shards with an index; "
        "local or gs://",
    )
    cli.add_step_output(parser, "--output-path", "native", required=True)
    parser.add_argument("--shards", type=int, metavar="K", help="shards of a classic checkpoint (default: 1)")
    options = parser.parse_args()
    if options.shards is not None and (options.form != "classic" or options.shards < 1):
        parser.error("--shards is a number of 1 or more, and goes with --format classic")
    from mesh_transformer.runtime import convert

    convert.from_hf(**vars(options))


if __name__ == "__main__":
    cli.run(main)
