"""Sample from a trained model: one prompt, or prompts from standard input."""

import argparse

from mesh_transformer.runtime import cli


def main() -> int:
    """Parse the arguments and sample."""
    parser = cli.parser(__doc__)
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--prompt", metavar="TEXT", help="the prompt; without it, one prompt a line of standard input"
    )
    source.add_argument(
        "--prompt-tokens", metavar="1,2,3", help="the prompt as token ids; needs no tokenizer, without --stop"
    )
    cli.add_checkpoint(parser)
    _add_sampling_options(parser)
    parser.add_argument(
        "--json", action="store_true", help="print each sample as a JSON object on a line of its own"
    )
    arguments = parser.parse_args()
    from mesh_transformer.runtime.sampling import sampler

    options = cli.fields(sampler.Options, arguments)
    return sampler.run(arguments.config_path, arguments.overrides, options)


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """One for each field of `sampler.Request`."""
    from mesh_transformer.infer.requests import OPTIONS

    parser.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="largest number of new tokens (default: 256, or what the context has room for)",
    )
    for name, option in OPTIONS.items():
        flag, kind = f"--{name.replace('_', '-')}", type(option.default)
        parser.add_argument(flag, type=kind, default=option.default, metavar="VALUE", help=option.help)
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end a completion before this text; may be given several times",
    )
    parser.add_argument("--num-samples", type=int, default=1, metavar="N", help="completions of each prompt")
    parser.add_argument("--seed", type=int, default=0, help="the same seed and prompt give the same samples")
    parser.add_argument(
        "--truncate",
        action="store_true",
        help="cut the beginning off a prompt that is too long (default: refuse it)",
    )


if __name__ == "__main__":
    cli.run(main)
