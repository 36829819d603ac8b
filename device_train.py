"""Train or fine-tune on the devices of this machine (or of every process that runs this together).

The run resumes by itself when its model_dir holds a checkpoint. See docs/finetune.md.
"""

from mesh_transformer.runtime import cli


def main() -> int:
    """Parse the arguments and run the training job."""
    parser = cli.parser(__doc__.split("\n")[0], needs_config=True)
    cli.add_tuning(parser)
    options = vars(parser.parse_args())
    from mesh_transformer.runtime.training import trainer

    return trainer.run(**options)


if __name__ == "__main__":
    cli.run(main)
