"""Convert a checkpoint to another number of shards, such as an 8-shard GPT-J for one GPU, and sample from it."""

from mesh_transformer import environment

with environment.explained_imports(__name__):
    from mesh_transformer.commands.reshard import main
    from mesh_transformer.runtime import cli

if __name__ == "__main__":
    cli.run(main)
