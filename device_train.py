"""Train or fine-tune on the devices of this machine (or of every process that runs this together).

The run resumes by itself when its model_dir holds a checkpoint. See docs/finetune.md.
"""

from __future__ import annotations

from mesh_transformer.runtime import cli


def main() -> int:
    """Parse the arguments and run the training job."""
    parser = cli.parser(__doc__.split("\n")[0])
    parser.add_argument(
        "--tune-model-path",
        metavar="DIR",
        help="start at step 0 from the weights of this checkpoint: a native one, one of the original program or a Hugging "
        "Face folder; local or gs://",
    )
    parser.add_argument(
        "--fresh-opt",
        action="store_true",
        help="with --tune-model-path: do not load its Adam moments; start them at zero",
    )
    arguments = parser.parse_args()
    from mesh_transformer.runtime import trainer

    return trainer.run(arguments.config, arguments.overrides, arguments.tune_model_path, arguments.fresh_opt)


if __name__ == "__main__":
    cli.run(main)
