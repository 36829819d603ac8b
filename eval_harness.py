"""Evaluate a model on tasks of lm-evaluation-harness."""

from mesh_transformer import environment

with environment.explained_imports(__name__):
    from mesh_transformer.commands.evaluate import main
    from mesh_transformer.runtime import cli

if __name__ == "__main__":
    cli.run(main)
