"""Convert a checkpoint of any format to a Hugging Face folder."""

from mesh_transformer import environment

with environment.explained_imports(__name__):
    from mesh_transformer.commands.to_hf import main
    from mesh_transformer.runtime import cli

if __name__ == "__main__":
    cli.run(main)
