"""Tokenize any corpus into record files for training, on one or many machines."""

from mesh_transformer import environment

with environment.explained_imports(__name__):
    from mesh_transformer.commands.prepare import main
    from mesh_transformer.runtime import cli

if __name__ == "__main__":
    cli.run(main)
