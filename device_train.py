"""Train or fine-tune on the devices of this machine, or of all processes of a job.

A run whose model_dir holds a checkpoint resumes from it. See docs/runs.md, and docs/finetune.md for a tutorial.
"""

from mesh_transformer.runtime import cli


def main() -> int:
    """Parse the arguments and run the training job."""
    parser = cli.parser(__doc__.split("\n")[0], needs_config=True)
    cli.add_tuning(parser)
    options = cli.parse_tuned(parser)
    from mesh_transformer.runtime.training import trainer

    return trainer.run(**vars(options))


if __name__ == "__main__":
    cli.run(main)
