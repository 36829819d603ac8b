"""Convert a Hugging Face folder to a native or classic checkpoint at step 0."""

from mesh_transformer import environment

with environment.explained_imports(__name__):
    from mesh_transformer.commands.from_hf import main
    from mesh_transformer.runtime import cli

if __name__ == "__main__":
    cli.run(main)
