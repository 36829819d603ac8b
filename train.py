"""Train on a TPU slice, on a Ray cluster or in several processes of this machine, from this driver."""

from mesh_transformer import environment

with environment.explained_imports(__name__):
    from mesh_transformer.commands.drive import main
    from mesh_transformer.runtime import cli

if __name__ == "__main__":
    cli.run(main)
