"""Train or fine-tune on the devices of this machine, or of all processes of a job."""

from mesh_transformer import environment

with environment.explained_imports(__name__):
    from mesh_transformer.commands.train import main
    from mesh_transformer.runtime import cli

if __name__ == "__main__":
    cli.run(main)
