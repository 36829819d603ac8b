"""Train a byte-level BPE tokenizer on text, as GPT-2's, and write it as a Hugging Face folder."""

from mesh_transformer import environment

with environment.explained_imports(__name__):
    from mesh_transformer.commands.tokenizer import main
    from mesh_transformer.runtime import cli

if __name__ == "__main__":
    cli.run(main)
