"""Serve a model over HTTP, with OpenAI's APIs for completions and chats and the original's /complete."""

from mesh_transformer import environment

with environment.explained_imports(__name__):
    from mesh_transformer.commands.serve import main
    from mesh_transformer.runtime import cli

if __name__ == "__main__":
    cli.run(main)
