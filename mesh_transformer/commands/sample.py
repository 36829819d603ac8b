"""Sample from a trained model, for one prompt or for prompts from standard input."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mesh_transformer.runtime import cli


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments and sample."""
    parser = cli.parser(__doc__)
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--prompt", metavar="TEXT", help="the prompt (default: read one prompt per line from standard input)"
    )
    source.add_argument(
        "--prompt-tokens",
        metavar="1,2,3",
        help="the prompt as token ids; this needs no tokenizer, except for --stop",
    )
    cli.add_checkpoint(parser)
    cli.add_generation_config(parser)
    _add_sampling_options(parser)
    parser.add_argument("--json", action="store_true", help="print each sample as one line of JSON")
    given = parser.parse_args(arguments)
    cli.starting(given.config_path, given.overrides)
    from mesh_transformer.infer.requests import OPTIONS
    from mesh_transformer.runtime.sampling import sampler

    given.named = [name for name in OPTIONS if name in vars(given)]
    options = cli.fields(sampler.SampleOptions, given)
    return sampler.run(given.config_path, given.overrides, options)


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of infer.requests.OPTIONS, and the options of this command."""
    from mesh_transformer.infer.requests import OPTIONS

    parser.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="largest number of new tokens (default: 256, or fewer if the context is full)",
    )
    for name, option in OPTIONS.items():
        flag, kind = f"--{name.replace('_', '-')}", type(option.default)
        text = option.help.replace("%(default)s", str(option.default))
        parser.add_argument(flag, type=kind, default=argparse.SUPPRESS, metavar="VALUE", help=text)
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end a completion before this text; may be repeated",
    )
    parser.add_argument(
        "--num-samples",
        type=int,
        default=1,
        metavar="N",
        help="completions per prompt (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="random seed; the same seed and prompt give the same samples (default: a drawn one, which the log names)",
    )
    parser.add_argument(
        "--truncate",
        action="store_true",
        help="drop the beginning of a prompt that is too long (default: refuse the prompt)",
    )
