"""Sample from a trained model, for one prompt or for prompts from standard input."""

from mesh_transformer import environment

with environment.explained_imports(__name__):
    from mesh_transformer.commands.sample import main
    from mesh_transformer.runtime import cli

if __name__ == "__main__":
    cli.run(main)
