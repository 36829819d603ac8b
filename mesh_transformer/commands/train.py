"""Train or fine-tune on the devices of this machine, or of all processes of a job.

A run whose model_dir holds a checkpoint resumes from it. See docs/runs.md, and docs/finetune.md for a tutorial.
"""

from __future__ import annotations

from collections.abc import Sequence

from mesh_transformer.runtime import cli


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments and run the training job."""
    parser = cli.parser(__doc__.split("\n")[0], needs_config=True)
    cli.add_tuning(parser)
    parser.add_argument(
        "--plan-mesh",
        nargs="?",
        const="",
        metavar="SLICE",
        help="do not train: print which host and device holds what, and write mesh.png into model_dir. With the type "
        "of a TPU slice, such as v3-32: for this slice, which need not be attached (docs/parallelism.md)",
    )
    options = cli.parse_tuned(parser, arguments)
    # with --adapter a part of the group lora may be given
    cli.starting(None if options.adapter else options.config_path, options.overrides)
    if options.plan_mesh is not None:
        from mesh_transformer.runtime.training import mesh_plan

        return mesh_plan.run(
            options.config_path, options.overrides, options.tune_model_path, options.plan_mesh, options.adapter
        )
    from mesh_transformer.runtime.training import trainer

    return trainer.run(
        options.config_path, options.overrides, options.tune_model_path, options.fresh_opt, options.adapter
    )
