"""Write only the parameters of a checkpoint, in bfloat16, as a classic checkpoint in RUN_slim/step_N."""

from mesh_transformer import environment

with environment.explained_imports(__name__):
    from mesh_transformer.commands.slim import main
    from mesh_transformer.runtime import cli

if __name__ == "__main__":
    cli.run(main)
