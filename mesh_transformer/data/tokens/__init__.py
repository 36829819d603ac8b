"""Text and token ids: tokenizers, and encoders that are faster or read as a stream."""
