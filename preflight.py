"""Tell whether a training run fits a TPU slice or a GPU that is not attached, and predict its speed and its cost."""

from mesh_transformer import environment

with environment.explained_imports(__name__):
    from mesh_transformer.commands.preflight import main
    from mesh_transformer.runtime import cli

if __name__ == "__main__":
    cli.run(main)
