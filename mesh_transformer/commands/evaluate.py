"""Evaluate a model on tasks of lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Sequence

from mesh_transformer.runtime import cli


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments and evaluate."""
    parser = cli.parser(__doc__)
    cli.add_checkpoint(parser)
    parser.add_argument(
        "--tasks",
        type=lambda names: tuple(names.split(",")),
        default="lambada_openai,piqa,hellaswag,winogrande,mathqa,pubmedqa",
        metavar="A,B",
        help="names of tasks, groups or tags of the harness (default: %(default)s)",
    )
    parser.add_argument("--include-path", metavar="DIR", help="folder with additional task files")
    parser.add_argument(
        "--data-dir",
        metavar="DIR",
        help="read LAMBADA and PIQA from DIR/lambada and DIR/piqa (default: from the Hugging Face hub)",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="evaluate only the first N questions of each task")
    parser.add_argument("--num-fewshot", type=int, metavar="K", help="solved examples before each question")
    parser.add_argument(
        "--batch-tokens", type=int, default=4096, metavar="N", help="tokens per batch (default: %(default)s)"
    )  # fmt: skip
    parser.add_argument(
        "--cache",
        metavar="FILE",
        help="SQLite file with results of earlier evaluations to reuse; new results are added",
    )
    parser.add_argument(
        "--ftfy",
        action="store_true",
        help="repair broken Unicode in the scored texts with ftfy, as in the original",
    )
    parser.add_argument(
        "--output", metavar="F.json", help="write results, config, versions and token counts to this file"
    )
    from mesh_transformer.cluster.driver.target_options import add_target

    add_target(parser)
    given = parser.parse_args(arguments)
    from mesh_transformer.cluster.driver.compute_target import ComputeTarget

    target = ComputeTarget.of(given)
    cli.starting(given.config_path, given.overrides)
    from mesh_transformer.runtime.evaluation import command

    options = cli.fields(command.EvalOptions, given)
    if target.in_this_process:
        return command.run(given.config_path, given.overrides, options)
    from mesh_transformer.cluster.driver import commands

    return commands.evaluate(given.config_path, given.overrides, target, options)
