"""Sample from a trained model: one prompt, or prompts from standard input."""

from __future__ import annotations

import argparse
import dataclasses

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
    parser.add_argument(
        "--ckpt",
        metavar="DIR",
        help=f"{cli.ANY_FORM} (the config's run if absent)",
    )
    _add_sampling_options(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object a sample, one a line")
    arguments = parser.parse_args()
    from mesh_transformer.runtime import sample_request, sampler

    names = [field.name for field in dataclasses.fields(sample_request.Request)]
    request = sample_request.Request(**{name: getattr(arguments, name) for name in names})
    return sampler.run(
        arguments.config,
        arguments.overrides,
        request,
        checkpoint=arguments.ckpt,
        prompt=arguments.prompt,
        prompt_tokens=arguments.prompt_tokens,
        as_json=arguments.json,
    )


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """One for each field of `sample_request.Request`."""
    parser.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="256, or what the context has room for, if absent"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default %(default)s)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="keep the likeliest tokens of this total probability"
    )
    parser.add_argument("--top-k", type=int, default=0, help="keep the k likeliest tokens; 0 keeps all")
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="P",
        help="divide positive and multiply negative logits of tokens that are there already; 1 is off",
    )
    parser.add_argument(
        "--presence-penalty",
        type=float,
        default=0.0,
        metavar="P",
        help="subtract from the logits of tokens in the completion, -2 to 2",
    )
    parser.add_argument(
        "--frequency-penalty",
        type=float,
        default=0.0,
        metavar="P",
        help="the same, times how often a token is there",
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end a completion before this text (may be repeated)",
    )
    parser.add_argument("--num-samples", type=int, default=1, metavar="N", help="completions of each prompt")
    parser.add_argument("--seed", type=int, default=0, help="the same seed and prompt give the same samples")
    parser.add_argument("--truncate", action="store_true", help="cut a prompt that is too long on its left")


if __name__ == "__main__":
    cli.run(main)
