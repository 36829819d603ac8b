"""Records, loaders, tokenizers and data preparation."""
