"""Tokenize text into record files for training and fine-tuning."""

from mesh_transformer import environment

with environment.explained_imports(__name__):
    from mesh_transformer.commands.records import main
    from mesh_transformer.runtime import cli

if __name__ == "__main__":
    cli.run(main)
